"""What to do instead: words for errors about data that cannot be shared, or not as it is."""

from __future__ import annotations

import sys
from typing import Any


def how_to_share(value: Any) -> str:
    """A sentence on what of an object that is no container of rows can be shared; empty if there is none."""
    name = type(value).__qualname__
    if isinstance(value, str):
        return "A text is one value: share a list of texts, such as text.splitlines()"
    if isinstance(value, bytes | bytearray | memoryview):
        return (
            f"{name} are one value: share them in a list, or as an array, numpy.frombuffer(data, numpy.uint8)"
        )
    if isinstance(value, range):
        return "A range takes no memory, however long it is: leave it as it is, or share list(range(...))"
    if isinstance(value, set | frozenset):
        return "A set has no rows: share list(data), or dict.fromkeys(data) to look values up in"
    if isinstance(value, type) or callable(value):
        return "Share what calling it returns"
    if hasattr(value, "__iter__"):
        return "If iterating over it gives the rows, share iter(data)"
    return ""


def add_advice(error: RecursionError, doing: str) -> None:
    """Add a note that says what to change, once.

    Args:
        error: What was raised.
        doing: While doing what.
    """
    if getattr(error, "__notes__", None):
        return
    error.add_note(
        f"shmloader: this was raised while {doing}, which goes one call deeper for each object that leads to "
        f"the next. Python allows {sys.getrecursionlimit():,} (sys.setrecursionlimit); a linked list, or a "
        "chain of neighbours, can be longer. Keep row numbers in place of such references (node.next = 17), "
        "which every process can look up in the store."
    )
