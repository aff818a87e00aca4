"""Plain serializable values: numbers, bools, strings, None, and lists and dicts of them. Pure."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 32
"""Depth limit of nested lists and dicts; a stranger's value must not exhaust a reader's stack."""


def is_serializable(value: object, max_depth: int = MAX_DEPTH) -> bool:
    """Whether a value is serializable with all that it contains."""
    if isinstance(value, (list, tuple)):
        return max_depth > 0 and all(is_serializable(item, max_depth - 1) for item in value)
    if type(value) is dict:  # no subclass: a Counter, say, would come back as a dict
        items_depth = max_depth - 1
        return max_depth > 0 and all(isinstance(key, str) and is_serializable(value[key], items_depth) for key in value)
    return value is None or isinstance(value, (bool, int, float, str))


def serializable_part(value: Any) -> Any:
    """A copy of a value without what is not serializable: dicts lose items whose key is no string.

    None takes the place of any other value that is not serializable.
    """
    if type(value) is dict:
        return {key: serializable_part(item) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, (list, tuple)):
        return [serializable_part(item) for item in value]
    return value if is_serializable(value) else None


def merged(own: Any, sent: Any) -> Any:
    """``own`` with the values of ``sent`` wherever both have a value of the same kind; nothing is added or removed."""
    if type(own) is dict:
        if not isinstance(sent, dict):
            return own
        return {key: merged(item, sent[key]) if key in sent else item for key, item in own.items()}
    if isinstance(own, (list, tuple)):
        if not isinstance(sent, (list, tuple)) or len(own) != len(sent):
            return own
        items = [merged(own_item, sent_item) for own_item, sent_item in zip(own, sent, strict=True)]
        return items if isinstance(own, list) else tuple(items)
    if is_number(own) and is_number(sent):
        return sent
    return sent if type(own) is type(sent) else own


def is_number(value: object) -> bool:
    """Whether a value is an integer or a float; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
