"""Outcomes of a loader, each batch or the exception in its place, and their comparison with torch's."""

from __future__ import annotations

from typing import Any

from parity.compare import assert_same


def outcomes(loader: Any) -> list[Any]:
    """Each batch, or the exception in its place; samplers and workers raise none here."""
    got: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            got.append(next(iterator))
        except StopIteration:
            return got
        except Exception as error:
            got.append(error)


def assert_same_outcomes(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, Exception):
            # In a worker, torch uses the traceback as the message, and a KeyError class of its own.
            assert isinstance(mine, Exception), f"a batch, where torch raises {theirs!r}"
            assert isinstance(theirs, type(mine)), f"{mine!r} is not {theirs!r}"
        else:
            assert not isinstance(mine, Exception), f"torch makes a batch of it, and not {mine!r}"
            assert_same(mine, theirs)
