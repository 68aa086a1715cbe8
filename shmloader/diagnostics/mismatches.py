"""Why samples could not be joined: which of them do not go with the others, and where they differ.

torch's message for two images of different size names neither. When a collate function has raised, this
looks at the samples themselves and says it in a note. Nothing here runs while all is well.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.diagnostics.exceptions import add_note

_MOST_ODD = 3
_MOST_NAMED = 24
_MOST_NESTED = 20
_MOST_CHARACTERS = 80
# torch's own join, and ours that stands in for it in workers.
_DEFAULT_COLLATE = (default_collate.__module__, "shmloader.worker.collate")
_OF_SIZES = re.compile(r"\b(sizes?|shapes?|dimensions?|dtypes?|cast)\b", re.IGNORECASE)


def explain_collation(error: BaseException, samples: Any, indices: Any, *, of_stream: bool = False) -> None:
    """Add a note to what a collate function raised: the samples, and those that do not go together.

    Args:
        error: What it raised, with its traceback. Its type and text stay as they are.
        samples: What the collate function was given.
        indices: The samples' indices, in their order; for a stream's samples, their positions in it.
        of_stream: Whether the samples are those of an iterable-style dataset.
    """
    names: list[str] = []
    with contextlib.suppress(Exception):  # the user's indices: a lack of notes is no error
        names = _names(indices, of_stream)
    with contextlib.suppress(Exception):  # the user's samples
        by_default_collate = _came_through(error, _DEFAULT_COLLATE)
        if by_default_collate or _OF_SIZES.search(str(error)):
            found = _find(list(samples), "batch", _MOST_NESTED, (_shape, _format))
            if found is not None:
                add_note(error, _say(found, names))
                if by_default_collate:
                    return
    if names:
        add_note(error, f"raised by collate_fn, given {_join(names)}")


def _names(indices: Any, of_stream: bool) -> list[str]:
    """What to call each sample."""
    if of_stream:
        return [f"sample {position} of the stream" for position in indices]
    if isinstance(indices, torch.Tensor | np.ndarray):
        indices = indices.tolist()
    return [f"dataset[{_shorten(repr(index))}]" for index in indices]


def _join(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _came_through(error: BaseException, modules: tuple[str, ...]) -> bool:
    """Whether the traceback leads through one of the modules."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") in modules:
            return True
        trace = trace.tb_next
    return False


# --- finding


class _Mismatch(NamedTuple):
    """Where samples differ, and what each of them has there ("shape (3, 4)")."""

    path: str
    each: list[str]


_Describe = Callable[[Any, Any], str]


def _find(column: list[Any], path: str, depth: int, describes: tuple[_Describe, ...]) -> _Mismatch | None:
    """The first place where the items of a column do not go together.

    Args:
        column: For each sample, what it has at this place.
        path: The place, as one would write it.
        depth: How much deeper to look.
        describes: What to compare tensors and the like by. What comes first is looked for everywhere
            before what comes later: shapes that differ are the reason more often than dtypes are.
    """
    for describe in describes:
        found = _find_by(column, path, depth, describe)
        if found is not None:
            return found
    return None


def _find_by(column: list[Any], path: str, depth: int, describe: _Describe) -> _Mismatch | None:
    first = column[0]
    if depth == 0 or isinstance(first, str | bytes):
        return None  # strings are not joined, and anything may stand beside them
    if isinstance(first, Mapping):
        return _find_in_mappings(column, path, depth, describe)
    if isinstance(first, Sequence):
        return _find_in_sequences(column, path, depth, describe)
    each = [describe(item, first) for item in column]
    unjoinable = not isinstance(first, torch.Tensor | np.ndarray | np.generic | Number)
    return _Mismatch(path, each) if unjoinable or len(set(each)) > 1 else None


def _find_in_mappings(column: list[Any], path: str, depth: int, describe: _Describe) -> _Mismatch | None:
    if not all(isinstance(item, Mapping) for item in column):
        return _Mismatch(path, [f"type {type(item).__name__}" for item in column])
    for key in column[0]:
        there = f"{path}[{_shorten(repr(key))}]"
        if not all(key in item for item in column):
            return _Mismatch(there, ["a value" if key in item else "no value" for item in column])
        found = _find_by([item[key] for item in column], there, depth - 1, describe)
        if found is not None:
            return found
    return None


def _find_in_sequences(column: list[Any], path: str, depth: int, describe: _Describe) -> _Mismatch | None:
    if not all(isinstance(item, Sequence) and not isinstance(item, str | bytes) for item in column):
        return _Mismatch(path, [f"type {type(item).__name__}" for item in column])
    lengths = [len(item) for item in column]
    if len(set(lengths)) > 1:
        return _Mismatch(path, [f"length {length}" for length in lengths])
    fields = getattr(column[0], "_fields", None)
    for n in range(lengths[0]):
        there = f"{path}[{n}]" if fields is None else f"{path}.{fields[n]}"
        found = _find_by([item[n] for item in column], there, depth - 1, describe)
        if found is not None:
            return found
    return None


def _shape(item: Any, first: Any) -> str:
    """What decides whether torch can stack an item with the first one at all."""
    if isinstance(first, torch.Tensor | np.ndarray):
        # torch converts the others of an ndarray, and no others of a tensor.
        fits = isinstance(item, torch.Tensor) or (isinstance(first, np.ndarray) and hasattr(item, "shape"))
        return f"shape {tuple(item.shape)}" if fits else f"type {type(item).__name__}"
    if isinstance(first, Number | np.generic):
        scalar = isinstance(item, Number | np.generic) or getattr(item, "shape", None) == ()
        return "a number" if scalar else f"type {type(item).__name__}"
    return f"type {type(item).__name__}"


def _format(item: Any, first: Any) -> str:
    """What decides the same once shapes agree."""
    if isinstance(first, torch.Tensor) and isinstance(item, torch.Tensor):
        grad = ", requiring grad" if item.requires_grad else ""
        return f"dtype {item.dtype}{grad}, {item.layout}, on {item.device}"
    if isinstance(first, np.ndarray):
        return f"dtype {getattr(item, 'dtype', type(item).__name__)}"
    return ""


# --- saying


def _say(found: _Mismatch, names: list[str]) -> str:
    """One line: a sample of the kind that is most frequent, and the first few that are not of it."""
    usual = Counter(found.each).most_common(1)[0][0]  # of equals, the one that comes first
    pairs = list(zip(names, found.each, strict=True))
    like = next(name for name, what in pairs if what == usual)
    odd = [(name, what) for name, what in pairs if what != usual]
    if not odd:
        return f"cannot join samples: {like} has {usual} at {found.path}, and so have the others"
    said = ", ".join(f"{name} has {what}" for name, what in [(like, usual), *islice(odd, _MOST_ODD)])
    more = f" (and {len(odd) - _MOST_ODD:,} more differ)" if len(odd) > _MOST_ODD else ""
    return f"cannot join samples: {said}{more} at {found.path}"
