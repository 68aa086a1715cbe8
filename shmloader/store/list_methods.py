"""Methods of lists that stores have as well: all but those that change it.

Results that a list would give as a new list are lists, in the memory of this process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmloader.codec.array_kinds import Array, ArrayKind, array_of_tensor, kind_of_tensor, wrap_array
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.store.columns.kind import Block
from shmloader.store.columns.values import KIND_OF_SCALAR

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    RowT_co = TypeVar("RowT_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    RowT_co = TypeVar("RowT_co", covariant=True)

_NUMBERS = frozenset(KIND_OF_SCALAR.values())


def _as_lists(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """A comparison of a store with a list or another store."""

    def method(self: Any, other: Any) -> bool:
        return compare(list(self), list(other)) if isinstance(other, list | ListMethods) else NotImplemented

    return method


class ListMethods(Sequence[RowT_co]):
    """Methods of lists, derived from ``__len__``, ``__getitem__`` and ``take``, for which see `Store`."""

    take: Callable[..., Any]

    def items_between(self, begin: int, end: int) -> Block | None:
        """Consecutive rows as a block: a view of memory.

        None if they do not lie in one array: they are no numbers or arrays, or in several pieces.
        """
        return None

    def _as_array(self) -> tuple[Array, ArrayKind] | None:
        """All rows as one array; None for rows that become none."""
        found = self.items_between(0, len(self))
        if found is not None:
            return found.items, found.kind
        if not len(self):
            return None
        taken = self.take(np.arange(len(self)))
        if isinstance(taken, torch.Tensor):
            kind = kind_of_tensor(taken)
            return None if kind is None else (array_of_tensor(taken, kind.dtype), kind)
        if not isinstance(taken, np.ndarray):
            return None
        return taken, KIND_OF_SCALAR.get(type(self[0])) or ArrayKind(taken.dtype, taken.ndim)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("the rows of a store become an array by a copy")
        found = self._as_array()
        if found is not None:
            array, kind = found
            is_narrowed = dtype is not None and kind in _NUMBERS
            has_name = kind.torch_dtype is None or DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native
            if has_name and not is_narrowed:
                return np.array(array, dtype=kind.dtype if dtype is None else dtype)
        return np.asarray(list(self), dtype=dtype)  # which refuses numbers that do not fit

    @property
    def __dlpack__(self) -> Any:
        """A copy of all rows, for ``torch.tensor(store)``: of arrays, tensors and NumPy's numbers.

        Python's numbers have none: which dtype is wanted of them, nobody tells this method.
        """
        if not len(self) or not isinstance(self[0], _WITH_DLPACK):
            raise AttributeError("__dlpack__")
        return self._to_dlpack

    def _to_dlpack(self, **options: Any) -> Any:
        found = self._as_array()
        if found is None:
            return torch.tensor(list(self)).__dlpack__(**options)
        array, kind = found
        tensor: Any = wrap_array(np.array(array), kind)
        return (tensor if kind.torch_dtype else torch.from_numpy(tensor)).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the processor

    def copy(self) -> list[Any]:
        """A list of the rows."""
        return list(self)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other] if isinstance(other, list | ListMethods) else NotImplemented

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __mul__(self, times: Any) -> list[Any]:
        rows: list[Any] = list(self) * times
        return rows

    __rmul__ = __mul__

    __lt__, __le__, __gt__, __ge__ = map(_as_lists, (operator.lt, operator.le, operator.gt, operator.ge))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(map(equal, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __contains__(self, value: object) -> bool:
        return any(equal(row, value) for row in self)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The first row that equals ``value``; ValueError if there is none."""
        for number in range(*slice(start, stop).indices(len(self))):
            if equal(self[number], value):
                return number
        raise ValueError(f"{value!r} is not in the store")

    def count(self, value: Any) -> int:
        """The number of rows that equal ``value``."""
        return sum(equal(row, value) for row in self)


def equal(one: Any, other: Any) -> bool:
    """Whether two rows are equal: identical, or ``==``; arrays and tensors, also inside rows, as wholes."""
    if one is other:
        return True
    if isinstance(one, _ARRAYS) or isinstance(other, _ARRAYS):
        return _equal_arrays(one, other)
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # an array in it, of which neither is true
        if type(one) is type(other) and isinstance(one, dict):
            return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        if type(one) is type(other) and isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(equal, one, other))
        raise


_ARRAYS = (np.ndarray, torch.Tensor)
_WITH_DLPACK = (*_ARRAYS, np.generic)


def _equal_arrays(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout is not torch.strided or other.layout is not torch.strided:  # torch compares no others
            return one.layout is other.layout and _equal_arrays(one.to_dense(), other.to_dense())
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        alike = one.shape == other.shape and one.dtype.names == other.dtype.names
        return alike and bool((one == other).all())
    return False
