"""Text to train on, as documents: lists of sentences in their order.

A document here is a stretch of one text that is long enough for several samples. It is either trained on or held out,
never both. A repeated paragraph is kept only once, since its copies could be in both.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from manyhands.base.errors import ConfigError
from manyhands.base.text import counted
from manyhands.recipes.albert.data import python_docs

DOCUMENT_CHARS = 4_000
"""A document ends with the sentence that reaches this number of characters: about 800 tokens of English."""

SENTENCE_CHARS = 1_000
"""Sentences of more characters (text without punctuation) are cut between two words."""

DIGEST_BYTES = 16
"""Size of the digests that detect repeated paragraphs. The text itself may not fit into memory."""

Splitter = Callable[[str], list[str]]
"""Splits a paragraph into sentences."""

_ABBREVIATIONS = ("Mr.", "Mrs.", "Ms.", "Dr.", "Prof.", "St.", "Mt.", "vs.", "cf.", "e.g.", "i.e.")
_INITIAL = r"(?<!\b[A-Z]\.)"
_NO_ABBREVIATION = _INITIAL + "".join(rf"(?<!\b{re.escape(abbreviation)})" for abbreviation in _ABBREVIATIONS)
_SENTENCE_END = re.compile(
    rf"(?:(?<=[.!?…]){_NO_ABBREVIATION}|(?<=[.!?…][\"'”’)\]]))"  # noqa: RUF001  # an end mark, perhaps a closing quote
    r"\s+(?![a-z])"  # the next word may begin a sentence
    r"|(?<=[。！？])"  # noqa: RUF001  # or one of the scripts written without spaces
)


def load_documents(paths: Sequence[Path] = ()) -> list[list[str]]:
    """Read text files, or the documentation that comes with Python when ``paths`` is empty.

    The default text depends on the version of Python, and so does a tokenizer trained on it.

    Args:
        paths: plain text in UTF-8; blank lines separate paragraphs.
    Returns:
        Documents of about ``DOCUMENT_CHARS`` characters, in the order of the text; each is a list of sentences, white
        space collapsed. The last document of a file may be short.
    Raises:
        ConfigError: a file is missing, unreadable, a directory, not UTF-8 or empty.
    """
    return list(iter_documents(paths))


def check_text(paths: Sequence[Path]) -> None:
    """Check that text files can be read, and have at least two documents: one to train on, and one to hold out.

    Raises:
        ConfigError: as :func:`load_documents`; or there are fewer documents.
    """
    text_digest(tuple(paths))


@functools.lru_cache(maxsize=1)  # called before and after a run is found
def text_digest(paths: tuple[Path, ...]) -> str:
    """The SHA-256 of the documents of :func:`load_documents`. It is equal for text that gives the same samples.

    Raises:
        ConfigError: as :func:`check_text`.
    """
    digest = hashlib.sha256()
    num_documents = 0
    num_chars = 0
    for document in iter_documents(paths):
        digest.update("\n".join([*document, "", ""]).encode())
        num_documents += 1
        num_chars += sum(map(len, document))
    if num_documents < 2:
        raise ConfigError(
            f"the text is too short: it has {counted(num_chars, 'character')}, and a part of it is kept out of "
            "training; give more text, some dozens of pages"
        )
    return digest.hexdigest()


def iter_documents(paths: Sequence[Path] = (), split: Splitter | None = None) -> Iterator[list[str]]:
    """Yield the documents of :func:`load_documents` one by one, for text that is larger than the memory.

    Args:
        split: splits a paragraph into sentences; by default :func:`split_sentences`.
    """
    texts: Iterable[Iterable[str]] = map(_paragraphs_of_file, paths) if paths else python_docs.texts()
    seen: set[bytes] = set()
    for paragraphs in texts:
        yield from _documents(_fresh(paragraphs, seen), split or split_sentences)


def split_sentences(paragraph: str) -> list[str]:
    """Split one paragraph after end marks that are followed by white space and no lower-case letter.

    Some abbreviations and initials are recognized. The rules make mistakes; these do not affect masked language
    modelling, and affect sentence-order prediction little.
    """
    sentences = (part.strip() for part in _SENTENCE_END.split(paragraph))
    return [piece for sentence in sentences if sentence for piece in _cut_between_words(sentence)]


def _fresh(paragraphs: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    for paragraph in paragraphs:
        digest = hashlib.blake2b(paragraph.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
        if digest not in seen:
            seen.add(digest)
            yield paragraph


def _documents(paragraphs: Iterable[str], split: Splitter) -> Iterator[list[str]]:
    document: list[str] = []
    num_chars = 0
    for paragraph in paragraphs:
        for sentence in split(paragraph):
            document.append(sentence)
            num_chars += len(sentence)
            if num_chars >= DOCUMENT_CHARS:
                yield document
                document = []
                num_chars = 0
    if document:
        yield document


def _cut_between_words(sentence: str) -> Iterator[str]:
    while len(sentence) > SENTENCE_CHARS:
        end = sentence.rfind(" ", 1, SENTENCE_CHARS)
        end = end if end > 0 else SENTENCE_CHARS
        yield sentence[:end]
        sentence = sentence[end:].lstrip()
    yield sentence


def _paragraphs_of_file(path: Path) -> Iterator[str]:
    words: list[str] = []
    is_empty = True
    for line in _lines(path):
        if line_words := line.split():
            words += line_words
            is_empty = False
        elif words:
            yield " ".join(words)
            words = []
    if is_empty:
        raise ConfigError(f"text file {path} is empty; name a file with some pages of text")
    if words:
        yield " ".join(words)


def _lines(path: Path) -> Iterator[str]:
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                yield line.decode().removeprefix("\ufeff") if offset == 0 else line.decode()
                offset += len(line)
    except IsADirectoryError:
        raise ConfigError(f"text file {path} is a directory; name the files in it") from None
    except OSError as error:
        raise ConfigError(f"text file {path}: {error.strerror}; name a text file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"text file {path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start}; "
            "convert it, for example with: iconv -f LATIN1 -t UTF-8"
        ) from None
