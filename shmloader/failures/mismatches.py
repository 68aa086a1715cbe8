"""Notes on errors of collate functions, which name the samples that cannot be joined.

torch's message for two images of different size names neither. Nothing here runs while all is well.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.failures.exceptions import add_note
from shmloader.messages import shorten, shown

_MOST_ODD = 3
_MOST_NAMED = 24
_MOST_NESTED = 20
_MOST_CHARACTERS = 80  # of an index or a key
_MOST_OF_NAMES = 800
# The modules of torch's own functions, and of those that replace them in workers.
_DEFAULT_COLLATE = (default_collate.__module__, "shmloader.worker.collate")
_OF_SIZES = re.compile(r"\b(sizes?|shapes?|dimensions?|dtypes?|cast)\b", re.IGNORECASE)


def explain_collation(error: BaseException, samples: Any, indices: Any, *, of_stream: bool = False) -> None:
    """Add a note to an exception of a collate function: the samples by index, or position in a stream."""
    names: list[str] = []
    with contextlib.suppress(Exception):  # the user's indices and samples: missing notes are not an error
        if isinstance(indices, torch.Tensor | np.ndarray):
            indices = indices.tolist()
        form = "sample {} of the stream" if of_stream else "dataset[{}]"
        names = [form.format(shown(index, _MOST_CHARACTERS)) for index in indices]
    with contextlib.suppress(Exception):
        frames = traceback.walk_tb(error.__traceback__)
        by_default_collate = any(frame.f_globals.get("__name__") in _DEFAULT_COLLATE for frame, _ in frames)
        if by_default_collate or _OF_SIZES.search(str(error)):
            column = list(samples)
            # Shapes first, everywhere: they are the reason more often than dtypes.
            found = _find(column, _kind) or _find(column, _format)
            if found is not None:
                add_note(error, _say(*found, names))
                if by_default_collate:
                    return
    if names:
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        given = shorten(", ".join(names[:_MOST_NAMED]), _MOST_OF_NAMES)
        add_note(error, f"raised by collate_fn, given {given}{more}")


def _find(
    column: list[Any], describe: Callable[[Any], str], path: str = "batch", depth: int = _MOST_NESTED
) -> tuple[str, list[str]] | None:
    """The first place where the items of a column differ, with a description of each ("shape (3, 4)")."""
    first = column[0]
    if depth == 0 or isinstance(first, str | bytes):
        return None  # strings are not joined, and anything may stand beside them
    kind: Any = next((kind for kind in (Mapping, Sequence) if isinstance(first, kind)), None)
    if kind is None:
        each = [describe(item) for item in column]
        unjoinable = not isinstance(first, torch.Tensor | np.ndarray | np.generic | Number)
        return (path, each) if unjoinable or len(set(each)) > 1 else None
    if not all(isinstance(item, kind) and not isinstance(item, str | bytes) for item in column):
        return path, [_kind(item) for item in column]
    if kind is Sequence and len(set(map(len, column))) > 1:
        return path, [f"length {len(item)}" for item in column]
    for key, place in _places(first):
        if kind is Mapping and not all(key in item for item in column):
            return path + place, ["a value" if key in item else "no value" for item in column]
        found = _find([item[key] for item in column], describe, path + place, depth - 1)
        if found is not None:
            return found
    return None


def _places(container: Any) -> Iterator[tuple[Any, str]]:
    """Keys or positions in a container, each with the text to append to the container's path."""
    if isinstance(container, Mapping):
        return ((key, f"[{shown(key, _MOST_CHARACTERS)}]") for key in container)
    fields = getattr(container, "_fields", None)
    return ((n, f"[{n}]" if fields is None else f".{fields[n]}") for n in range(len(container)))


def _kind(item: Any) -> str:
    """Describe an item by what must be equal for torch to join it with others."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return f"shape {tuple(item.shape)}"
    return "a number" if isinstance(item, Number | np.generic) else f"type {type(item).__name__}"


def _format(item: Any) -> str:
    """Describe a tensor or array by what must also be equal once shapes agree."""
    if isinstance(item, torch.Tensor):
        grad = ", requiring grad" if item.requires_grad else ""
        return f"dtype {item.dtype}{grad}, {item.layout}, on {item.device}"
    return f"dtype {item.dtype}" if isinstance(item, np.ndarray) else ""


def _say(path: str, each: list[str], names: list[str]) -> str:
    """A line on one sample of the most frequent kind, and on the first few of other kinds."""
    usual = Counter(each).most_common(1)[0][0]  # of equals, the one that comes first
    like = names[each.index(usual)]
    odd = [f"{name} has {what}" for name, what in zip(names, each, strict=True) if what != usual]
    if not odd:
        return f"cannot join samples: {like} has {usual} at {path}, and so have the others"
    said = ", ".join([f"{like} has {usual}", *odd[:_MOST_ODD]])
    more = f" (and {len(odd) - _MOST_ODD:,} more differ)" if len(odd) > _MOST_ODD else ""
    return f"cannot join samples: {said}{more} at {path}"
