"""Real English text that needs no download: the prose in the documentation that comes with Python.

The topics of ``help()`` and the docstrings of some modules, about 540,000 characters after code, tables and markup are
left out. The words differ a little between versions of Python.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from importlib.abc import InspectLoader

from manyhands.base.errors import ConfigError

DOCUMENTED_MODULES = (
    "_pydecimal", "_pyio", "argparse", "ast", "bdb", "configparser", "difflib", "doctest", "inspect",
    "ipaddress", "optparse", "pdb", "pydoc", "shutil", "smtplib", "socket", "ssl", "statistics", "subprocess",
    "tarfile", "threading", "traceback", "typing",
)  # fmt: skip
"""Modules of the standard library, Python 3.10 and later, with much prose in their docstrings."""

_PARAGRAPH_END = re.compile(r"\n\s*\n")
_HYPHEN_AT_LINE_END = re.compile(r"(?<=\w)-\n\s*")
_MARKUP = re.compile(
    r"^(?:[*-]|\d+\.|\[\d+\])\s+"  # the mark of a list item or a footnote
    r"|\s*\[\d+\]_?"  # a reference to a footnote
    r"|:[a-z]+:(?=`)"  # the role before a `name`
    r"|[\"“”`]|(?<!\w)\*{1,2}(?=\w)|(?<=\w)\*{1,2}(?!\w)"  # quotes around names, *emphasis*
)
_PLAIN_WORD = re.compile(r"[(\"“'`*]*[A-Za-z’'-]+[)\"”'`*]*[.,;:?!]*[)\"”]?")  # noqa: RUF001
_MIN_WORDS = 8
_MIN_PLAIN_SHARE = 0.8


def texts() -> Iterator[list[str]]:
    """Paragraphs of prose, one list for each topic and each module.

    Raises:
        ConfigError: this Python comes without its ``help()`` topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("this Python comes without its help() topics; name text files instead: --text FILE") from None
    for name in sorted(topics):
        yield prose_paragraphs(topics[name])
    for name in DOCUMENTED_MODULES:
        yield [paragraph for docstring in _docstrings(name) for paragraph in prose_paragraphs(docstring)]


def prose_paragraphs(text: str) -> list[str]:
    """The paragraphs of ``text`` that are prose rather than code, tables or headings, without reST markup."""
    return [_without_markup(paragraph) for paragraph in _PARAGRAPH_END.split(text) if _is_prose(paragraph)]


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    num_plain = sum(bool(_PLAIN_WORD.fullmatch(word)) for word in words)
    is_code = ">>>" in paragraph or "::=" in paragraph
    return not is_code and len(words) >= _MIN_WORDS and num_plain >= _MIN_PLAIN_SHARE * len(words)


def _without_markup(paragraph: str) -> str:
    joined = " ".join(_HYPHEN_AT_LINE_END.sub("-", paragraph).split())
    return _MARKUP.sub("", joined).strip()


def _docstrings(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _source(module: str) -> str:
    """The source of a module, without importing it; empty where Python comes without sources."""
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    return (loader.get_source(module) or "") if isinstance(loader, InspectLoader) else ""
