"""Checks for custom stores: every kind of store passes them.

    from shmloader.store.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_store(check):
        check(MyStore(rows), rows)

Each check takes a store and a list of the rows it was made from, and raises an AssertionError that tells the
difference. No test framework is needed. The checks compare with `identical`: equal and of the same types, at
any depth.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import pickle
import struct
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from itertools import product, starmap
from typing import Any

import numpy as np
import torch

from shmloader.store.base import Store
from shmloader.store.columns.classes import state_of
from shmloader.store.description import StoreDescription
from shmloader.store.handles import pack, unpack
from shmloader.store.list_methods import equal

Check = Callable[[Any, list[Any]], None]


def identical(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, at any depth.

    NaN is identical to NaN, 0.0 is not to -0.0, and dicts have the same order.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, complex):
        return identical((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, dict):
        return identical(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, np.ndarray | np.generic):
        return _identical_arrays(one, other)
    if isinstance(one, torch.Tensor):
        return _identical_tensors(one, other)
    if dataclasses.is_dataclass(one):
        return identical(state_of(one), state_of(other))
    return bool(one == other)


def _identical_arrays(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.hasobject:
        return identical(one.tolist(), other.tolist())
    if one.dtype.char in "gG":  # some bytes of a long double mean nothing, and may be anything
        return np.array_equal(one, other, equal_nan=True)
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def _identical_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return identical(one.to_dense(), other.to_dense())
    if one.is_quantized or other.is_quantized:  # torch cannot read their bytes: that ends the process
        return one.qscheme() == other.qscheme() and identical(one.dequantize(), other.dequantize())
    # In new memory: a contiguous tensor of one item, or of none, may have strides without a view of bytes.
    octets = [
        torch.empty(one.shape, dtype=one.dtype).copy_(tensor.detach()).reshape(-1).view(torch.uint8)
        for tensor in (one, other)
    ]
    return one.requires_grad == other.requires_grad and torch.equal(*octets)


def _raises(kinds: type[BaseException] | tuple[type[BaseException], ...], call: Any, *args: Any) -> str:
    try:
        result = call(*args)
    except kinds as error:
        return str(error)
    raise AssertionError(f"no {kinds} was raised; the result was {result!r}")


def _agree(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted), f"{len(found)} rows, not {len(wanted)}"
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert identical(one, other), f"row {number} is {one!r}, not {other!r}"


def rows_are_identical(store: Any, rows: list[Any]) -> None:
    """Rows read by index and by negative index are identical, a second time too."""
    for _ in range(2):
        _agree([store[number] for number in range(len(rows))], rows)
        _agree([store[number - len(rows)] for number in range(len(rows))], rows)
    _agree([store[np.int64(number)] for number in range(len(rows))], rows)


def iteration_gives_the_rows(store: Any, rows: list[Any]) -> None:
    """Iterators give the rows: forwards, backwards, and two at a time."""
    _agree(list(store), rows)
    _agree(list(reversed(store)), rows[::-1])
    _agree([one for one, _ in zip(store, store, strict=True)], rows)


def wrong_indices_are_errors(store: Any, rows: list[Any]) -> None:
    """IndexError beyond the ends, TypeError for other objects, KeyError for missing columns."""
    for index in (len(rows), -len(rows) - 1, 1 << 70, -(1 << 70)):
        _raises(IndexError, operator.getitem, store, index)
        _raises(IndexError, store.__getitems__, [index])
        _raises((IndexError, OverflowError, TypeError), store.take, [index])
    for wrong in (0.0, None):
        _raises(TypeError, operator.getitem, store, wrong)
    _raises((KeyError, TypeError), operator.getitem, store, "no such column")


def slices_are_views(store: Any, rows: list[Any]) -> None:
    """A slice, also of a slice, has the rows that a list's slice has."""
    ends = [None, 1, -1, len(rows) + 5]
    for part in starmap(slice, product(ends, ends, (None, 2, -3))):
        view = store[part]
        assert isinstance(view, Store), f"a slice is a {type(view)}"
        _agree(view, rows[part])
        _agree(view[1:], rows[part][1:])
    _agree(store[::-1].__getitems__(range(len(rows))), rows[::-1])


def it_is_a_read_only_sequence(store: Any, rows: list[Any]) -> None:
    """A Sequence, not a MutableSequence; item assignment and deletion are TypeErrors."""
    assert isinstance(store, Sequence)
    assert not isinstance(store, MutableSequence)
    _raises(TypeError, operator.setitem, store, 0, [])
    _raises(TypeError, operator.setitem, store, slice(None), [])
    _raises(TypeError, operator.delitem, store, 0)
    assert not hasattr(store, "append")
    _raises(TypeError, hash, store)


def it_equals_its_rows(store: Any, rows: list[Any]) -> None:
    """``==`` with a list, a tuple and itself, except for rows that do not equal themselves, such as NaN."""
    assert store == store  # noqa: PLR0124
    if all(_equals_itself(row) for row in rows):
        assert store == list(rows)
        assert store == tuple(rows)
        assert store[:] == store
    assert store != [*rows, None]
    assert (store == "rows") is False


def _equals_itself(row: Any) -> bool:
    return equal(copy.deepcopy(row), row)  # NaN does not


def values_are_found(store: Any, rows: list[Any]) -> None:
    """``in``, ``index`` and ``count``, for rows that can be compared."""
    for row in rows[:3] + rows[-2:]:
        if _equals_itself(row):
            likes = [number for number, other in enumerate(rows) if equal(row, other)]
            assert row in store
            assert store.index(row) == likes[0]
            assert store.index(row, likes[-1]) == likes[-1]
            assert store.count(row) == len(likes)
    stranger = object()
    assert stranger not in store
    _raises(ValueError, store.index, stranger)


def selections_are_views(store: Any, rows: list[Any]) -> None:
    """``select``, lists, arrays and masks of indices: the rows in that order, without a copy of any."""
    numbers = [*range(len(rows) - 1, -1, -2), *range(-len(rows), 0, 3)]
    wanted = [rows[number] for number in numbers]
    mask = np.arange(len(rows)) % 3 == 0
    _agree(store.select(mask), [row for row, chosen in zip(rows, mask, strict=True) if chosen])
    for indices in _kinds_of_indices(numbers):
        view = store.select(indices)
        assert isinstance(view, Store), f"a selection is a {type(view)}"
        _agree(view, wanted)
        _agree(store[indices] if len(indices) else view, wanted)
        _agree(view[1:], wanted[1:])
    _raises(IndexError, store.select, [len(rows)])
    _raises(IndexError, store.select, np.zeros(len(rows) + 1, np.bool_))


def many_rows_come_at_once(store: Any, rows: list[Any]) -> None:
    """``__getitems__`` with lists, arrays and tensors of indices, negative ones and repetitions."""
    for indices in _kinds_of_indices([*range(len(rows)), *range(-len(rows), 0), *range(0, len(rows), 2)]):
        _agree(store.__getitems__(indices), [rows[number] for number in indices])


def take_gathers_the_rows(store: Any, rows: list[Any]) -> None:
    """``take`` agrees with the rows, for every type of indices."""
    for indices in (*_kinds_of_indices([*range(len(rows)), *range(-len(rows), 0)] * 3), []):
        _agree_taken(store.take(indices), [rows[number] for number in indices])


def _kinds_of_indices(numbers: list[int]) -> tuple[Any, ...]:
    return numbers, np.array(numbers, np.int64), torch.tensor(numbers, dtype=torch.int64)


def _agree_taken(taken: Any, wanted: list[Any]) -> None:
    """Compare by value: what is gathered is in columns, with the dtype of the column."""
    if isinstance(taken, dict | tuple) and wanted:
        for key, column in taken.items() if isinstance(taken, dict) else enumerate(taken):
            _agree_taken(column, [row[key] for row in wanted])
    elif isinstance(taken, np.ndarray | torch.Tensor):
        assert len(taken) == len(wanted), f"{len(taken)} rows were taken, not {len(wanted)}"
        for one, other in zip(taken, wanted, strict=True):
            plain, likewise = _as_array(one), _as_array(other)
            assert plain.shape == likewise.shape
            equal_nan = plain.dtype.kind in "fc"
            assert np.array_equal(plain, likewise, equal_nan=equal_nan), f"{one!r}, not {other!r}"
    elif wanted:
        _agree(taken, wanted)


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float().numpy()  # NumPy has no bfloat16
    return np.asarray(value)


def arrays_are_read_only(store: Any, rows: list[Any]) -> None:
    """Writing to an ndarray is a ValueError, and it cannot be made writeable, unless it is a private copy."""
    for array in _find(list(store), np.ndarray):
        if array.flags.writeable and array.size and not array.dtype.hasobject:
            array[...] = (np.ones if array.dtype.kind in "biufcU" else np.zeros)((), array.dtype)
        elif array.size and not array.dtype.hasobject:
            _raises(ValueError, operator.setitem, array, ..., 0)
            _raises(ValueError, array.setflags, True)
    _agree(list(store), rows)


def writing_to_tensors_harms_nobody(store: Any, rows: list[Any]) -> None:
    """A tensor may be written to; no other reader of the store sees it."""
    for tensor in _find(list(store), torch.Tensor):
        if tensor.layout is torch.strided and not tensor.requires_grad and tensor.numel():
            before = tensor.clone()
            tensor.fill_(1)
            assert tensor.eq(torch.ones_like(tensor)).all()
            tensor.copy_(before)
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _find(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find(item, kind)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _find(vars(value), kind)


def copies_are_the_store(store: Any, rows: list[Any]) -> None:
    """``copy`` and ``deepcopy`` share the memory, also for a store inside another object."""
    assert copy.copy(store) is store
    assert copy.deepcopy({"dataset": [store]})["dataset"][0] is store


def plain_pickles_are_refused_or_whole(store: Any, rows: list[Any]) -> None:
    """A plain pickle, for a disk say, holds all of the data, or is an error that names an alternative."""
    for part, wanted in ((store, rows), (store[1:], rows[1:])):
        try:
            pickled = pickle.dumps([part])
        except pickle.PicklingError as error:
            if "save" not in str(error):
                raise AssertionError(f"the error does not say what to do instead: {error}") from error
        else:
            _agree(pickle.loads(pickled)[0], wanted)


def it_travels_without_its_data(store: Any, rows: list[Any]) -> None:
    """The pickle for another process is a few hundred bytes, and gives the same rows there."""
    pickled, buffers = pack({"one": store, "again": store[1:]})
    assert len(buffers) <= 1, f"{len(buffers)} buffers"
    assert len(pickled) < 4096, f"{len(pickled):,} bytes"
    there = unpack(pickled, buffers)
    _agree(there["one"], rows)
    _agree(there["again"], rows[1:])


def it_says_what_it_is(store: Any, rows: list[Any]) -> None:
    """``describe`` and ``repr``."""
    description = store.describe()
    assert isinstance(description, StoreDescription)
    assert description.rows == len(rows)
    assert description.nbytes >= 0
    assert description.python_nbytes >= 0
    assert description.kind
    assert description.kind in repr(store)
    assert store[: len(rows) // 2].describe().rows == len(rows) // 2


def arrow_has_the_same_rows(store: Any, rows: list[Any]) -> None:
    """``to_arrow`` gives the rows, or a TypeError."""
    try:
        arrow = store.to_arrow()
    except TypeError:
        return
    assert len(arrow) == len(rows)


CHECKS: list[Check] = [
    rows_are_identical,
    iteration_gives_the_rows,
    wrong_indices_are_errors,
    slices_are_views,
    it_is_a_read_only_sequence,
    it_equals_its_rows,
    values_are_found,
    selections_are_views,
    many_rows_come_at_once,
    take_gathers_the_rows,
    arrays_are_read_only,
    writing_to_tensors_harms_nobody,
    copies_are_the_store,
    plain_pickles_are_refused_or_whole,
    it_travels_without_its_data,
    it_says_what_it_is,
    arrow_has_the_same_rows,
]
"""Every check. All take a store and its rows."""
