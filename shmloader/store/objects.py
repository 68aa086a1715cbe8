"""The rule which objects can be shared and how large they are: one for all that share, and for the watch.

It goes by an object's real type and runs none of its class's code. Imports no pyarrow: workers use this too.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import gc
import itertools
import logging
import multiprocessing.process
import pathlib
import sys
import threading
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shmloader.foreign import (
    ARROW,
    PANDAS,
    is_arrow,
    is_hugging_face,
    is_pandas,
    is_pandas_part,
    is_polars,
    is_table_in_memory,
    loaded_classes,
)
from shmloader.store import static
from shmloader.store.handles import bounds_of
from shmloader.store.static import base_of, is_a

LEAST_NBYTES = 1 << 20
"""The least size of a held object that is shared, in bytes as Python objects. A smaller one is not worth a
microsecond at each access: 64 processes with a copy each would take 64 MiB."""

MOST_WALKED = 10_000
"""Elements of a container of objects that are walked through."""

_MOST_LOOKED = 256  # parts of a value that are checked
_SAMPLED = 100  # elements of a container that are checked
_FEW = 32  # a container of so few large things is taken apart, not shared as a whole

_SAMPLED_OF_CHUNK = 8
_MOST_DEPTH = 12
_MOST_SIZED = 20_000  # objects that are looked at for one size
_TENSOR_NBYTES = 300  # the Python object, TensorImpl and StorageImpl, roughly

_SCALARS = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, np.dtype, torch.dtype)
_VALUES = (enum.Enum, dt.date, dt.time, dt.timedelta, decimal.Decimal, pathlib.PurePath)
_DATA = (*_SCALARS, *_VALUES, uuid.UUID, np.ndarray, torch.Tensor)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)  # of no size
ATOMS = (*_SCALARS, *_VALUES, uuid.UUID, *_CODE)
"""Values that hold no others, and code: neither is walked through or shared."""
# Never walked through: they are not data, or their attributes do not show what belongs to them.
_CLOSED = (
    torch.nn.Module,
    logging.Logger,
    multiprocessing.process.BaseProcess,
    threading.Thread,
    *_CODE,
    *_DATA,
)
_SEQUENCES, _MAPPINGS = (list, tuple, deque), (dict, OrderedDict, defaultdict, Counter)
# By ``id``: a metaclass may define how its classes are compared.
_PLAIN: dict[int, type] = {id(kind): list for kind in _SEQUENCES} | {id(kind): dict for kind in _MAPPINGS}
_PLAIN |= {id(set): set, id(frozenset): set}
_WITHOUT_MEANING = set(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __orig_bases__ __parameters__ __firstlineno__ "
    "__static_attributes__ __slots__ __slotnames__ __annotations__".split()
)
_SHARED_BY_THEMSELVES = (torch.utils.data.Dataset, torch.nn.Module)
_NO_CONTAINERS = (str, bytes, bytearray, memoryview, range)
_DTYPE: Any = np.ndarray.dtype.__get__  # also of subclasses, whose own attributes are not asked

# --- objects


def is_store(value: Any) -> bool:
    """Whether a value is a store. Does not import the module of stores, which imports pyarrow."""
    base = sys.modules.get("shmloader.store.base")
    return base is not None and type.__subclasscheck__(base.SharedObject, type(value))  # not that of an ABC


def is_dataset(value: Any) -> bool:
    """Whether a value is torch's, or Hugging Face's, idea of a dataset."""
    return is_a(value, torch.utils.data.Dataset) or is_hugging_face(value)


def container_kind(value: Any) -> type | None:
    """``list``, ``dict`` or ``set`` for a container of Python objects that a store can stand for, else None.

    A subclass is one if it adds nothing: neither methods nor attributes.
    """
    kind = _PLAIN.get(id(plain_kind(value)))
    if kind is None and type(value) is np.ndarray and value.dtype.hasobject:
        return list if value.ndim == 1 and value.dtype.names is None else None
    return kind


def plain_kind(value: Any) -> type:
    """The type of a value, or the type that it is a subclass of that adds nothing."""
    kind = type(value)
    names, bases = static.names_of, static.bases_of
    while set(names(kind)) <= _WITHOUT_MEANING and len(bases(kind)) == 1 and not static.dict_of(value):
        (kind,) = bases(kind)
    return kind


def is_rows(value: Any) -> bool:
    """Whether `share` reads rows from a value: of Arrow or pandas, an iterator, a container of any class."""
    if is_arrow(value) or is_pandas(value) or isinstance(value, Iterator | Mapping):
        return True
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, _NO_CONTAINERS) and not named


def holds_datasets(container: Any) -> bool:
    """Whether a container holds objects that are shared themselves: datasets, large ones of other classes."""
    return any(
        is_a(one, _SHARED_BY_THEMSELVES)
        or is_store(one)
        or is_hugging_face(one)
        or (is_open(one) and not is_data(one) and any(_is_large(held) for _, held in attributes_of(one)))
        for one in some(container)
    )


def some(container: Any, most: int = _SAMPLED) -> Iterator[Any]:
    """About so many elements of a container, evenly spaced; of a dict the values."""
    step, base = max(1, static.length(container) // most), base_of(container)
    if base is list or base is tuple or type(container) is np.ndarray:
        return iter((base or np.ndarray).__getitem__(container, slice(None, None, step)))
    return (element for _, element in itertools.islice(static.items(container), 0, None, step))


def is_data(value: Any) -> bool:
    """Whether a value is only data, so that a copy made at each access can replace it.

    For values with very many parts only the outer ones are checked.
    """
    todo = deque([value])
    looked = 0
    while todo and looked < _MOST_LOOKED:
        part = todo.popleft()
        looked += 1
        if is_a(part, _DATA):
            continue
        fields = static.of_class(type(part), "__dataclass_fields__")
        if base_of(part) is not None:
            todo.extend(some(part))
        elif fields and not is_a(part, torch.utils.data.Dataset):
            held = static.dict_of(part) | static.slots_of(part)
            todo.extend(map(held.get, fields))
        else:
            return False
    return True


def is_few_large(value: Any) -> bool:
    """Whether a container has few elements, some of which are large ones themselves."""
    if static.length(value) > _FEW or container_kind(value) is set:
        return False
    large = (np.ndarray, torch.Tensor, *loaded_classes(ARROW), *loaded_classes(PANDAS))
    return any(
        _is_large(element)
        for element in some(value)
        if is_a(element, large) or container_kind(element) is not None
    )


def _is_large(value: Any) -> bool:
    return estimate_nbytes(value) >= LEAST_NBYTES


def plain_if_few(value: Any) -> Any:
    """A mapping of any other class as a dict, if it is short: then its values may be shared one by one."""
    is_other = isinstance(value, Mapping) and container_kind(value) is None
    if not is_other or is_store(value) or is_hugging_face(value):
        return value
    is_open_ended = isinstance(value, torch.utils.data.Dataset) or hasattr(type(value), "__missing__")
    return value if is_open_ended or len(value) > _FEW else dict(value)


def elements_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """The elements of a container, each with how it is reached from there."""
    return (((key,), element) for key, element in static.items(container))


def is_open(value: Any) -> bool:
    """Whether to walk through an object's attributes."""
    if is_a(value, types.MethodType | functools.partial) or type(value) is types.SimpleNamespace:
        return True
    if is_a(value, tuple):
        return static.of_class(type(value), "_fields") is not None
    closed = is_a(value, _CLOSED) or is_store(value)
    if closed and not is_a(value, torch.utils.data.Dataset):
        return False
    if is_pandas_part(value) or is_hugging_face(value) or is_polars(value):
        return False
    return _is_all_python(type(value))


def _is_all_python(kind: type) -> bool:
    """Whether instances have no state beside their attributes, so that copying these copies the object."""
    for base in static.mro_of(kind)[:-1]:
        new = static.names_of(base).get("__new__", object.__new__)
        written_in_python = type(new) is staticmethod or new is object.__new__
        if not (written_in_python and static.is_python_class(base)):
            return False
    return kind is not object


def attributes_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The attributes of an open object, each with how it is reached from there."""
    held = static.dict_of(value) | static.slots_of(value)
    if is_a(value, tuple):
        held |= zip(static.of_class(type(value), "_fields"), tuple.__iter__(value), strict=False)
    return [(f".{name}", attribute) for name, attribute in held.items()]


def how_to_share(value: Any) -> str:
    """A sentence on the parts to share of an object that is not a container of rows; may be empty."""
    name = type(value).__qualname__
    if isinstance(value, str):
        return "A text is one value: share a list of texts, such as text.splitlines()"
    if isinstance(value, bytes | bytearray | memoryview):
        return (
            f"{name} are one value: share them in a list, or as an array, numpy.frombuffer(data, numpy.uint8)"
        )
    if isinstance(value, range):
        return "A range takes no memory, however long it is: leave it as it is, or share list(range(...))"
    if isinstance(value, type) or callable(value):
        return "Share what calling it returns"
    if is_polars(value):
        return "Share the to_arrow() of it"
    if hasattr(value, "__iter__"):
        return "If iterating over it gives the rows, share iter(data)"
    return ""


# --- sizes


def estimate_nbytes(value: Any, *, arrays: bool = True) -> int:
    """Bytes that an object takes in memory, with all that it refers to, estimated from samples.

    Without ``arrays`` the data of arrays, tensors and stores do not count, which no one copies by reading it.
    """
    table = value.table if is_table_in_memory(value) else value
    return int(table.nbytes) if is_arrow(table) else _nbytes_of(value, set(), arrays=arrays)


def nbytes_of_rows(rows: Sequence[Any], sampled: int = _SAMPLED_OF_CHUNK) -> int:
    """Bytes that rows take as Python objects, with their places in a list, from about so many of them."""
    return 8 * len(rows) + _of_some(rows, set(), 0, True, sampled)


def _of_some(container: Any, seen: set[int], depth: int, arrays: bool, sampled: int = _SAMPLED) -> int:
    """Bytes of the values of a container, from those of some.

    Objects that they share (keys, small numbers, a vocabulary) are counted once, with the first value.
    """
    first, *rest = [_nbytes_of(value, seen, depth, arrays) for value in some(container, sampled)] or [0]
    others = static.length(container) - 1
    return first + (round(sum(rest) / len(rest) * others) if rest else first * others)


def _nbytes_of(value: Any, seen: set[int], depth: int = 0, arrays: bool = True) -> int:
    """Bytes of an object and its contents, without objects that were ``seen`` before, by ``id``.

    Without the data of ``arrays`` if they are not to be counted.
    """
    if id(value) in seen or len(seen) > _MOST_SIZED or is_a(value, _CODE):
        return 0
    seen.add(id(value))
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        has_items = arrays and value.layout is torch.strided and not value.is_nested
        return _TENSOR_NBYTES + (_nbytes_under(value) if has_items else 0)
    nbytes = static.sizeof(value)
    if not arrays and is_store(value):
        return nbytes
    if is_a(value, np.ndarray):
        if not _DTYPE(value).hasobject:
            return max(nbytes, _nbytes_under(value)) if arrays else _TENSOR_NBYTES  # of a view too
        value = np.ndarray.tolist(value)
    if depth >= _MOST_DEPTH or is_a(value, str | bytes | int | float):
        return nbytes
    if is_a(value, dict):
        nbytes += _of_some(dict.keys(value), seen, depth + 1, arrays)
    if base_of(value) is not None:
        return nbytes + _of_some(value, seen, depth + 1, arrays)
    return nbytes + sum(_nbytes_of(held, seen, depth + 1, arrays) for held in gc.get_referents(value))


def _nbytes_under(array: Any) -> int:
    """Bytes of memory under the items of an array or a tensor: those of overlapping windows count once."""
    plain = array if isinstance(array, torch.Tensor) else np.ndarray.view(array, np.ndarray)
    low, high = bounds_of(plain)
    return min(plain.nbytes, high - low) if plain.nbytes else 0
