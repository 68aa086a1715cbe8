"""Kinds of objects that can be shared, and their sizes: one rule for `share`, ``share_dataset``, the watch.

A kind is decided by the real type alone; objects are read by `shmloader.store.static`, which runs no code of
their classes. Imports no pyarrow: workers without stores use this too.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import gc
import logging
import mmap
import multiprocessing.process
import pathlib
import sys
import threading
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.store.static import (
    base_of,
    bases_of,
    dict_of,
    is_a,
    is_python_class,
    items,
    length,
    mro_of,
    names_of,
    of_class,
    sizeof,
    slots_of,
    some_items,
)

LEAST_NBYTES = 1 << 20
"""The least size of a held object that is shared, in bytes as Python objects. A smaller one is not worth a
microsecond at each access: 64 processes with a copy each would take 64 MiB."""

MOST_WALKED = 10_000
"""Elements of a container of objects that are walked through."""

_MOST_LOOKED = 256  # parts of a value that are checked
_SAMPLED = 100  # elements of a container that are checked
_FEW = 32  # a container of so few large things is taken apart, not shared as a whole

_SAMPLED_OF_CHUNK = 8
_MOST_SIZED = 20_000  # objects that are looked at for one size
_MOST_PASSED = 100 * _SAMPLED  # elements of a dict or set that are: passing over one writes to it
_MOST_DEPTH = 12
_TENSOR_NBYTES = 300  # the Python object, TensorImpl and StorageImpl, roughly

_SCALARS = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, np.dtype, torch.dtype)
_VALUES = (enum.Enum, dt.date, dt.time, dt.timedelta, decimal.Decimal, pathlib.PurePath)
# By ``id``, for the classes of a value's ``__mro__``: that is quick, and asks no metaclass.
_DATA = frozenset(map(id, (*_SCALARS, *_VALUES, uuid.UUID, np.ndarray, torch.Tensor)))
# Never walked through: they are not data, or their attributes do not show what belongs to them.
_CLOSED = _DATA | set(
    map(
        id,
        (
            torch.nn.Module,
            logging.Logger,
            multiprocessing.process.BaseProcess,
            threading.Thread,
            type,
            types.ModuleType,
            types.FunctionType,
            types.BuiltinFunctionType,
        ),
    )
)
# Classes of libraries that may not be installed, where these define them: a program may have a package
# ``datasets`` of its own. None is imported for it.
_ARROW = {"pyarrow": ("Table", "RecordBatch", "Array", "ChunkedArray")}
_PANDAS_ROWS = {"pandas": ("Series", "DataFrame")}
_PANDAS = {
    **_PANDAS_ROWS,
    "pandas.api.extensions": ("ExtensionArray",),
    "pandas.core.indexes.base": ("Index",),
}
_HUGGING_FACE = {
    "datasets.arrow_dataset": ("DatasetInfoMixin",),  # the base of Dataset and IterableDataset
    "datasets.dataset_dict": ("DatasetDict", "IterableDatasetDict"),
}
_SEQUENCES, _MAPPINGS, _SETS = (
    (list, tuple, deque),
    (dict, OrderedDict, defaultdict, Counter),
    (set, frozenset),
)
CONTAINERS = (*_SEQUENCES, *_SETS, dict)
_WITHOUT_MEANING = set(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __orig_bases__ __parameters__ __firstlineno__ "
    "__static_attributes__ __slots__ __slotnames__ __annotations__".split()
)
_SHARED_BY_THEMSELVES = (torch.utils.data.Dataset, torch.nn.Module)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
_NO_CONTAINERS = (str, bytes, bytearray, memoryview, range)

# --- arrays and tensors

Array = np.ndarray[Any, Any]


class ArrayKind(NamedTuple):
    """The properties that all arrays of one column share."""

    dtype: np.dtype[Any]  # of tensors that of the NumPy carrier
    ndim: int
    torch_dtype: torch.dtype | None = None  # of tensors


def kind_of_array(array: Array) -> ArrayKind | None:
    """The kind of column that an ndarray fits in; None if it fits in no column of arrays."""
    return ArrayKind(array.dtype, array.ndim) if is_plain(array.dtype) else None


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether a string identifies a dtype: numbers, times and texts that have bytes."""
    return dtype.kind in "biufcmMSU" and dtype.itemsize > 0


_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def kind_of_tensor(tensor: torch.Tensor) -> ArrayKind | None:
    """The kind of column that a tensor fits in; None if it fits in no column of arrays."""
    code = CODE_OF_TORCH_DTYPE.get(tensor.dtype)
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if code is None or not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return None
    return ArrayKind(DTYPES[code].carrier, tensor.dim(), tensor.dtype)


def wrap_array(array: Array, kind: ArrayKind) -> Any:
    """The object that a stored array stands for: itself, or a tensor over its memory."""
    return array if kind.torch_dtype is None else wrap_tensor(array, kind.torch_dtype)


def array_of_tensor(tensor: torch.Tensor, carrier: np.dtype[Any]) -> Array:
    """A tensor's items as a C-ordered ndarray of its carrier dtype; a view if it is contiguous."""
    tensor = tensor.contiguous()
    if DTYPES[CODE_OF_TORCH_DTYPE[tensor.dtype]].native:
        return tensor.numpy()
    # By a dtype of the same size: to any other, a stride is in the way that one item may have.
    array: Array = tensor.view(_SAME_SIZE[carrier.itemsize]).numpy().view(carrier)
    return array


# --- objects


def is_store(value: Any) -> bool:
    """Whether a value is a store. Does not import the module of stores, which imports pyarrow."""
    base = sys.modules.get("shmloader.store.base")
    return base is not None and is_a(value, base.SharedObject)


def is_arrow(value: Any) -> bool:
    """Whether a value is Arrow data: a table, a batch or a column."""
    return _is_one_of(value, _ARROW)


def is_pandas(value: Any) -> bool:
    """Whether a value is a pandas Series or DataFrame."""
    return _is_one_of(value, _PANDAS_ROWS)


def is_pandas_part(value: Any) -> bool:
    """Whether a value is a pandas object of any kind, an index or an array too."""
    return _is_one_of(value, _PANDAS)


def is_hugging_face(value: Any) -> bool:
    """Whether a value is a dataset of Hugging Face's ``datasets``."""
    return _is_one_of(value, _HUGGING_FACE)


def _is_one_of(value: Any, names: Mapping[str, tuple[str, ...]]) -> bool:
    for module, classes in names.items():
        if (loaded := sys.modules.get(module)) is not None:  # else nothing is of it
            for name in classes:
                kind = getattr(loaded, name, None)
                if isinstance(kind, type) and is_a(value, kind):
                    return True
    return False


def container_kind(value: Any) -> type | None:
    """``list``, ``dict`` or ``set`` for a container of Python objects that a store can stand for, else None.

    A subclass is one if it adds nothing: neither methods nor attributes.
    """
    kind = plain_kind(value)
    if kind in _SEQUENCES:
        return list
    if kind in _MAPPINGS:
        return dict
    if kind in _SETS:
        return set
    if type(value) is np.ndarray and value.dtype.hasobject and value.ndim == 1 and value.dtype.names is None:
        return list
    return None


def plain_kind(value: Any) -> type:
    """The type of a value, or the type that it is a subclass of that adds nothing."""
    kind = type(value)
    while (
        is_python_class(kind)
        and set(names_of(kind)) <= _WITHOUT_MEANING
        and len(bases_of(kind)) == 1
        and not dict_of(value)
    ):
        (kind,) = bases_of(kind)
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
        or (is_open(one) and not is_data(one) and _holds_large(one))
        for one in some(container)
    )


def _holds_large(value: Any) -> bool:
    return any(_Sizes().of(held) >= LEAST_NBYTES for _, held in attributes_of(value))


def is_shareable_tensor(value: torch.Tensor) -> bool:
    """Whether a tensor is dense, on the CPU and without gradients."""
    return kind_of_tensor(value) is not None and not value.is_quantized


def some(container: Any) -> Iterator[Any]:
    """Elements of a container, evenly spaced; of a dict the values."""
    return (element for _, element in some_items(container, _SAMPLED))


def is_data(value: Any) -> bool:
    """Whether a value is only data, so that a copy made at each access can replace it.

    For values with very many parts only the outer ones are checked.
    """
    todo = deque([value])
    looked = 0
    while todo and looked < _MOST_LOOKED:
        part = todo.popleft()
        looked += 1
        if not _DATA.isdisjoint(map(id, mro_of(type(part)))):
            continue
        if base_of(part) is not None:
            todo.extend(some(part))
        elif is_a(part, torch.utils.data.Dataset):
            return False
        elif fields := of_class(type(part), "__dataclass_fields__"):
            state = dict_of(part) | slots_of(part)
            todo.extend(map(state.get, fields))
        else:
            return False
    return True


def is_few_large(value: Any) -> bool:
    """Whether a container has few elements, some of which are large ones themselves."""
    if length(value) > _FEW or container_kind(value) is set:
        return False
    large = np.ndarray, torch.Tensor
    return any(
        estimate_nbytes(element) >= LEAST_NBYTES
        for element in some(value)
        if is_a(element, large)
        or is_arrow(element)
        or is_pandas_part(element)
        or container_kind(element) is not None
    )


def plain_if_few(value: Any) -> Any:
    """A mapping of any other class as a dict, if it is short: then its values may be shared one by one."""
    is_other = isinstance(value, Mapping) and container_kind(value) is None
    if not is_other or is_store(value) or is_hugging_face(value):
        return value
    is_open_ended = isinstance(value, torch.utils.data.Dataset) or hasattr(type(value), "__missing__")
    return value if is_open_ended or len(value) > _FEW else dict(value)


def elements_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """The elements of a container, each with how it is reached from there."""
    return (((key,), element) for key, element in items(container))


def is_open(value: Any) -> bool:
    """Whether to walk through an object's attributes."""
    if is_a(value, (types.MethodType, functools.partial)) or type(value) is types.SimpleNamespace:
        return True
    if is_a(value, tuple):
        return of_class(type(value), "_fields") is not None
    closed = not _CLOSED.isdisjoint(map(id, mro_of(type(value)))) or is_store(value)
    if closed and not is_a(value, torch.utils.data.Dataset):
        return False
    if is_pandas_part(value) or is_hugging_face(value):
        return False
    return _is_all_python(type(value))


def _is_all_python(kind: type) -> bool:
    """Whether instances have no state beside their attributes, so that copying these copies the object."""
    for base in mro_of(kind)[:-1]:
        new = names_of(base).get("__new__", object.__new__)
        written_in_python = type(new) is staticmethod or new is object.__new__
        if not (written_in_python and is_python_class(base)):
            return False
    return kind is not object


def attributes_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The attributes of an open object, each with how it is reached from there."""
    held = dict_of(value) | slots_of(value)  # a partial and a method keep theirs as if in slots
    if is_a(value, tuple):
        held |= zip(of_class(type(value), "_fields"), tuple.__iter__(value), strict=False)
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
    if hasattr(value, "__iter__"):
        return "If iterating over it gives the rows, share iter(data)"
    return ""


# --- sizes


def estimate_nbytes(value: Any, *, only_objects: bool = False) -> int:
    """Bytes that an object takes in memory, with all that it refers to, estimated from samples.

    Args:
        value: The object.
        only_objects: Whether to count what a forked worker copies by reading: the pages where Python objects
            begin, and no data of arrays and tensors.
    """
    if not only_objects and type(value) is np.ndarray and not value.dtype.hasobject:
        return value.nbytes  # also of a view
    if not only_objects and is_arrow(value):
        return int(value.nbytes)
    return _Sizes(only_objects).of(value)


def nbytes_of_rows(rows: Sequence[Any], sampled: int = _SAMPLED_OF_CHUNK) -> int:
    """Bytes that rows take as Python objects, with their places in a list, from about so many of them."""
    return 8 * len(rows) + _Sizes().of_some(rows, 0, sampled)


class _Sizes:
    """Sizes of objects that may refer to each other: each is counted once."""

    def __init__(self, only_objects: bool = False) -> None:
        self._only_objects = only_objects
        self._seen: set[int] = set()  # by ``id``

    def of_some(self, container: Any, depth: int, sampled: int = _SAMPLED, count: int | None = None) -> int:
        """Bytes of the values of a container, which has ``count`` in all, from those of some.

        Objects that they share (keys, small numbers, a vocabulary) are counted once, with the first value.
        """
        is_dict = is_a(container, dict)
        first, *rest = [
            self.of(value, depth) + (self.of(key, depth) if is_dict else 0)
            for key, value in some_items(container, sampled, _MOST_PASSED)
        ] or [0]
        others = (length(container) if count is None else count) - 1
        return first + (round(sum(rest) / len(rest) * others) if rest else first * others)

    def of(self, value: Any, depth: int = 0) -> int:
        """Bytes of an object and its contents, without objects that were counted before."""
        if id(value) in self._seen or is_a(value, _CODE) or len(self._seen) > _MOST_SIZED:
            return 0
        self._seen.add(id(value))
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            strided = value.layout is torch.strided and not self._only_objects
            return _TENSOR_NBYTES + (value.numel() * value.element_size() if strided else 0)
        nbytes = sizeof(value)
        if self._only_objects:
            nbytes = min(nbytes, mmap.PAGESIZE)
        if is_a(value, np.ndarray):
            return nbytes + self._in_array(value, depth + 1)
        if depth >= _MOST_DEPTH or is_a(value, str | bytes | int | float):
            return nbytes
        if base_of(value) is not None:
            return nbytes + self.of_some(value, depth + 1)
        return nbytes + sum(self.of(held, depth + 1) for held in gc.get_referents(value))

    def _in_array(self, array: Any, depth: int) -> int:
        """Bytes of an array's objects, and of the memory that is another array's."""
        if np.ndarray.dtype.__get__(array).hasobject:
            count = np.ndarray.size.__get__(array)
            some = [np.ndarray.item(array, number) for number in range(0, count, max(1, count // _SAMPLED))]
            return self.of_some(some, depth, count=count)
        is_own = self._only_objects or np.ndarray.base.__get__(array) is None
        return 0 if is_own else int(np.ndarray.nbytes.__get__(array))
