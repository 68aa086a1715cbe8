"""Notes on errors of collate functions, which name the samples that cannot be joined.

torch's message for two images of different size names neither. Nothing here runs while all is well.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
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
        if _name_difference(error, samples, names):
            return
    if names:
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        given = shorten(", ".join(names[:_MOST_NAMED]), _MOST_OF_NAMES)
        add_note(error, f"raised by collate_fn, given {given}{more}")


def _name_difference(error: BaseException, samples: Any, names: list[str]) -> bool:
    """Add a note on what differs if it is the reason, or may be; returns whether torch joined the samples."""
    column, path, most = samples, "batch", 1
    given = _given_to_default_collate(error)
    if given is None:
        if not _OF_SIZES.search(str(error)):
            return False
        most = 2
    elif given is not samples:
        column, path = given, "default_collate's batch"
        names = _names_in(given, samples, names)
    column = list(column)
    # Shapes first, everywhere: they are the reason more often than dtypes.
    found = list(islice(_find(column, _kind, path), most)) or list(islice(_find(column, _format, path), most))
    # The program's own may well join what differs: of two such places either may be padded, say.
    if len(found) == 1:
        add_note(error, _say(*found[0], names))
    return bool(found) and given is samples


def _given_to_default_collate(error: BaseException) -> Any:
    """The batch that torch's function was given, if that is what has raised; else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in _DEFAULT_COLLATE and "batch" in frame.f_locals:
            return frame.f_locals["batch"]
    return None


def _names_in(column: Any, samples: Any, names: list[str]) -> list[str]:
    """The samples' names, if each item of a column is of its sample: a collate_fn may have sorted them."""
    if len(column) == len(names) and all(map(_has, samples, column)):
        return names
    return [f"item {place}" for place in range(len(column))]


def _has(sample: Any, item: Any) -> bool:
    parts = sample.values() if isinstance(sample, Mapping) else sample
    return item is sample or (isinstance(sample, Mapping | Sequence) and any(part is item for part in parts))


def _find(
    column: list[Any], describe: Callable[[Any], str], path: str, depth: int = _MOST_NESTED
) -> Iterator[tuple[str, list[str]]]:
    """The places where the items of a column differ, each with a description of each ("shape (3, 4)")."""
    first = column[0]
    if depth == 0 or isinstance(first, str | bytes):
        return  # strings are not joined, and anything may stand beside them
    kind: Any = next((kind for kind in (Mapping, Sequence) if isinstance(first, kind)), None)
    if kind is None:
        each = [describe(item) for item in column]
        if len(set(each)) > 1 or not isinstance(first, torch.Tensor | np.ndarray | np.generic | Number):
            yield path, each
    elif not all(isinstance(item, kind) and not isinstance(item, str | bytes) for item in column):
        yield path, [_kind(item) for item in column]
    elif kind is Sequence and len(set(map(len, column))) > 1:
        yield path, [f"length {len(item)}" for item in column]
    else:
        for key, place in _places(first):
            if kind is Mapping and not all(key in item for item in column):
                yield path + place, ["a value" if key in item else "no value" for item in column]
            else:
                yield from _find([item[key] for item in column], describe, path + place, depth - 1)


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
