"""A text that says of each of its sentences where it stands."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from manyhands.recipes.albert.data.corpus import load_documents

WORDS = "the of a model trains peers many hands make light work and data loss goes down step by"


class Book(NamedTuple):
    """Documents of sentences such as ``S17 the model.``, numbered through; ``document_of`` has the number of each."""

    documents: list[list[str]]
    document_of: dict[int, int]
    text: str


def _made(num_sentences: int) -> str:
    rng = random.Random(0)
    words = WORDS.split()
    sentences = (f"S{number} {' '.join(rng.choices(words, k=rng.randint(2, 18)))}." for number in range(num_sentences))
    paragraphs: list[list[str]] = [[]]
    for sentence in sentences:
        paragraphs[-1].append(sentence)
        if rng.random() < 0.2:
            paragraphs.append([])
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)


def write_book(path: Path) -> Path:
    """The text as a file."""
    path.write_text(BOOK.text)
    return path


def _book() -> Book:
    text = _made(4_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "book.txt"
        path.write_text(text)
        documents = load_documents([path])
    document_of = {
        int(sentence.split()[0][1:]): number for number, document in enumerate(documents) for sentence in document
    }
    return Book(documents, document_of, text)


BOOK = _book()
