"""Columns of any picklable objects: one pickle per row."""

from __future__ import annotations

import io
import pickle
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.store.arrays import array_of_tensor, kind_of_tensor
from shmloader.store.columns.classes import is_plain_dataclass, is_plain_namedtuple, state_of
from shmloader.store.columns.types import PickleType

_SAMPLED = 4
_MOST_REFERENCES = 4000  # that are followed in a column before its values count as free of cycles
_MOST_NAMED = 8


class _ObjectPickler(pickle.Pickler):
    """Pickles tensors as their bytes: torch's own way is slow, and drags whole storages along."""

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        if value.layout is torch.sparse_coo and value.is_coalesced():
            # torch's own way keeps every such tensor that pickle.loads makes alive for good: it expects
            # torch.load to check them.
            return _make_sparse, (value.indices(), value.values(), tuple(value.shape))
        kind = kind_of_tensor(value)
        if kind is None:
            return NotImplemented
        return _make_tensor, (array_of_tensor(value, kind.dtype), CODE_OF_TORCH_DTYPE[value.dtype])


def _make_tensor(array: Any, code: int) -> torch.Tensor:
    return wrap_tensor(array, DTYPES[code].torch_dtype)


def _make_sparse(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def pickles_to_arrow(values: list[Any]) -> Any:
    """A column of any objects, or None; whatever pickling them raises, if one cannot be pickled."""
    pickled = [None if value is None else pickled_value(value) for value in values]
    kinds = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in set(map(type, values))})[
        :_MOST_NAMED
    ]
    storage = pa.array(pickled, pa.binary())
    if isinstance(storage, pa.ChunkedArray) or storage.type != pa.binary():
        storage = pa.array(pickled, pa.large_binary())
    return PickleType(storage.type, types=kinds).wrap(storage)


def pickled_value(value: Any) -> bytes:
    """The pickle of one value."""
    file = io.BytesIO()
    try:
        _ObjectPickler(file, 5).dump(value)
    except RecursionError as error:
        add_advice(error, f"pickling a {type(value).__qualname__}")
        raise
    except Exception as error:
        error.add_note(
            f"shmloader: this was raised while pickling a {type(value).__qualname__}, as values are kept "
            "of which no column gives back what was given. Its class must be found by name in a module, "
            "and what it holds be picklable: leave out or convert what is not."
        )
        raise
    return file.getvalue()


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


def refer_to_themselves(values: list[Any]) -> bool:
    """Whether any of a few of the values is reached from itself, through a limited number of references."""
    sample = values[:: max(1, len(values) // _SAMPLED)][:_SAMPLED]
    return any(_reaches_itself(value, _MOST_REFERENCES // len(sample)) for value in sample)


def _reaches_itself(value: Any, most: int) -> bool:
    seen = {id(value)}
    todo = deque([value])
    while todo:
        for part in _parts(todo.popleft()):
            most -= 1
            if part is value:
                return True
            if most < 0:
                return False
            if id(part) not in seen and _has_parts(type(part)):
                seen.add(id(part))
                todo.append(part)
    return False


def _has_parts(kind: type) -> bool:
    return kind in (list, dict, tuple) or is_plain_dataclass(kind) or is_plain_namedtuple(kind)


def _parts(value: Any) -> Iterable[Any]:
    """The objects that a value refers to which columns would take apart."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    try:
        return state_of(value).values()
    except AttributeError:
        return ()
