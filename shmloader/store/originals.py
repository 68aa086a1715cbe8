"""Knows the lists and dicts that were shared in this process, so that one that is still held is named."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

_MOST = 16
_KINDS = (list, dict)
_shared: dict[int, tuple[int, ...]] = {}  # by ``id``, what tells it from another one that gets the number


def note_shared(values: Iterable[Any]) -> None:
    """Note containers that a store was just made from. They are not kept alive."""
    for value in values:
        if type(value) in _KINDS:
            _shared[id(value)] = _mark(value)
    while len(_shared) > _MOST:
        del _shared[next(iter(_shared))]


def is_original(value: object) -> bool:
    """Whether a store was made from this very list or dict, in this process."""
    return type(value) in _KINDS and id(value) in _shared and _shared[id(value)] == _mark(value)


def _mark(value: Any) -> tuple[int, ...]:
    some = islice(value, 3) if type(value) is dict else value[:: max(1, len(value) // 3)]
    return len(value), *map(id, some)
