"""English text that needs no download: the prose in the documentation that comes with Python.

The topics of ``help()`` and the docstrings of some modules: about 540,000 characters without code, tables and markup.
The words differ a little between versions of Python.
"""

from __future__ import annotations

import dis
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.abc import InspectLoader
from itertools import islice, pairwise
from types import CodeType

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
    r"^(?:[*-]|\d+\.|\[\d+\])\s+"  # list item or footnote mark
    r"|\s*\[\d+\]_?"  # footnote reference
    r"|:[a-z]+:(?=`)"  # role before a `name`
    r"|[\"“”`]|(?<!\w)\*{1,2}(?=\w)|(?<=\w)\*{1,2}(?!\w)"  # quotes around names, *emphasis*
)
_PLAIN_WORD = re.compile(r"[(\"“'`*]*[A-Za-z’'-]+[)\"”'`*]*[.,;:?!]*[)\"”]?")  # noqa: RUF001
_CO_HAS_DOCSTRING = 0x4000000
"""Flag of functions with a docstring from Python 3.14 on. Before, the first constant is the docstring or None."""

_DOCSTRING_WITHIN = 16
"""The code of a class or module sets its docstring within this many instructions from its start."""

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
    """The paragraphs of ``text`` that are prose, not code, tables or headings, without reST markup."""
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
    """All docstrings of a module, without importing it; none if the library's sources are missing.

    They are read from the compiled module, in a tenth of the time that parsing takes.
    """
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    code = loader.get_code(module) if isinstance(loader, InspectLoader) else None
    if code is not None:
        yield from _docstrings_in(code)


def _docstrings_in(code: CodeType) -> Iterator[str]:
    yield inspect.cleandoc(_docstring_of(code))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _docstrings_in(constant)


def _docstring_of(code: CodeType) -> str:
    if code.co_name.startswith("<") and code.co_name != "<module>":  # for example a lambda
        return ""
    if code.co_flags & inspect.CO_OPTIMIZED:  # a function
        first = code.co_consts[0] if code.co_consts else None
        has_one = sys.version_info < (3, 14) or code.co_flags & _CO_HAS_DOCSTRING
        return first if isinstance(first, str) and has_one else ""
    beginning = list(islice(dis.get_instructions(code), _DOCSTRING_WITHIN))
    for load, store in pairwise(beginning):
        if store.opname == "STORE_NAME" and store.argval == "__doc__" and isinstance(load.argval, str):
            return load.argval
    return ""
