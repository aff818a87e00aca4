from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data.corpus import DOCUMENT_CHARS, SENTENCE_CHARS, load_documents, split_sentences
from manyhands.recipes.albert.data.python_docs import prose_paragraphs


def write(path, text: str):
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("One came. Two went! Did three? 4 did.", ["One came.", "Two went!", "Did three?", "4 did."]),
        ("Mr. Darcy met J. R. Smith, e.g. Tom. He left.", ["Mr. Darcy met J. R. Smith, e.g. Tom.", "He left."]),
        ('"Is it so?" asked he. "It is." She rose.', ['"Is it so?" asked he.', '"It is."', "She rose."]),
        ("It costs 3.14 in v. 2 of the list", ["It costs 3.14 in v.", "2 of the list"]),
        ("Он пришёл. Она ушла.", ["Он пришёл.", "Она ушла."]),
        ("他来了。她走了。", ["他来了。", "她走了。"]),
        ("no end mark", ["no end mark"]),
    ],
)
def test_paragraphs_are_split_into_sentences(paragraph, sentences):
    assert split_sentences(paragraph) == sentences


def test_text_without_punctuation_is_cut_between_words():
    words = [f"word{number}" for number in range(1000)]
    pieces = split_sentences(" ".join(words))
    assert all(len(piece) <= SENTENCE_CHARS for piece in pieces)
    assert " ".join(pieces).split() == words
    assert "".join(split_sentences("x" * 2500)) == "x" * 2500


def test_a_file_becomes_documents_that_keep_its_order_and_all_its_sentences(tmp_path):
    sentences = [f"This is the sentence with number {number}." for number in range(500)]
    paragraphs = ["\n".join(sentences[start : start + 5]) for start in range(0, 500, 5)]
    path = write(tmp_path / "book.txt", "\ufeff" + "\r\n \r\n".join(paragraphs))
    documents = load_documents([path])
    assert [sentence for document in documents for sentence in document] == sentences
    assert len(documents) > 2
    for document in documents[:-1]:
        assert DOCUMENT_CHARS <= sum(map(len, document)) < DOCUMENT_CHARS + 100


def test_a_paragraph_is_kept_once_also_across_files(tmp_path):
    first = write(tmp_path / "a.txt", "All rights reserved.\n\nOne thing.\n\nAll rights\nreserved.\n")
    second = write(tmp_path / "b.txt", "Another thing.\n\nAll rights reserved.")
    assert load_documents([first, second]) == [["All rights reserved.", "One thing."], ["Another thing."]]


def test_bad_files_are_named_with_the_reason(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("né".encode("latin-1"))
    for path, message in [
        (tmp_path / "missing.txt", "missing.txt: No such file or directory"),
        (tmp_path, "is a directory; name the files in it"),
        (latin, "latin.txt is not UTF-8: byte 0xe9 at offset 1; convert it"),
        (write(tmp_path / "empty.txt", " \n\n"), "empty.txt is empty"),
    ]:
        with pytest.raises(ConfigError, match=message) as raised:
            load_documents([path])
        assert "\n" not in str(raised.value)


def test_python_comes_with_enough_english_prose(python_documents):
    text = " ".join(sentence for document in python_documents for sentence in document)
    assert len(text) > 400_000
    words = text.lower().split()
    assert words.count("the") / len(words) > 0.04  # as in English prose; code and tables would thin it out
    assert ">>>" not in text
    assert "::=" not in text


def test_prose_is_told_from_code_and_loses_its_markup():
    text = (
        'The "assert" statement\n**********************\n\n'
        "* Assert statements are a *convenient* way to insert debugging asser-\n  tions into ``a`` program: [3]\n\n"
        '   assert_stmt ::= "assert" expression ["," expression]\n\n'
        "   >>> assert this is a line of code that has many plain words in it\n"
    )
    assert prose_paragraphs(text) == [
        "Assert statements are a convenient way to insert debugging asser-tions into a program:"
    ]
