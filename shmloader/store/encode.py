"""Which column holds some values: chosen from their exact types, so that what is read equals what was given.

Subclasses of the types that columns know (``IntEnum``, ``OrderedDict``, a ``str`` subclass) are pickled,
and so is everything else that no column gives back as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, cycle
from operator import is_
from typing import Any

import numpy as np
import torch

from shmloader.shared_memory.sealed_buffer import BufferBuilder
from shmloader.store.arrays import ArrayKind, encode_arrays, kind_of_array, kind_of_tensor, memory_of
from shmloader.store.columns import Column
from shmloader.store.graphs import encode_graphs, refer_to_themselves
from shmloader.store.kept import Kept
from shmloader.store.lists import encode_lists, encode_maps
from shmloader.store.objects import encode_pickles
from shmloader.store.records import (
    encode_dicts,
    encode_objects,
    encode_tuples,
    is_plain_dataclass,
    is_plain_namedtuple,
)
from shmloader.store.repeats import encode_by_memory, encode_repeats
from shmloader.store.scalars import Nones, encode_bools, encode_numbers, encode_numpy_scalars
from shmloader.store.strings import encode_strings
from shmloader.store.unions import MOST_KINDS, encode_union

_NONE = type(None)
_MOST_DEPTH = 12  # of containers in containers; also what ends the walk into a cycle that was not found
_LONG = 64  # characters or bytes, on the average, of texts of which the same ones are looked for
_SAMPLED_TEXTS = 64
_SCALARS = (int, float, bool, _NONE)
_CONTAINERS = (dict, list, tuple)
_MOST_FIELDS = 512
_MOST_KEY_SETS = 16  # different sets of keys in dicts that are still columns
_INT64 = range(-(1 << 63), 1 << 63)


class ValueEncoder:
    """Encodes values, and the values inside them.

    Attributes:
        out: Where buffers are appended.
    """

    def __init__(
        self, out: BufferBuilder, kept: Kept | None = None, depth: int = 0, are_held: bool = True
    ) -> None:
        """Prepare to encode.

        Args:
            out: Where to.
            kept: What has been encoded before and may be referred to; None for nothing.
            depth: In how many containers the values are.
            are_held: Whether the values (not what is inside of them) live as long as ``kept``.
        """
        self.out = out
        self._kept = Kept(out) if kept is None else kept
        self._depth = depth
        self._are_held = are_held
        self._by_type: dict[type, Callable[[list[Any]], Column]] = {
            int: self._ints,
            float: lambda values: encode_numbers(values, True, self.out, False),
            bool: lambda values: encode_bools(values, self.out, False),
            _NONE: lambda values: Nones(len(values)),
            str: self._texts,
            bytes: lambda values: encode_strings(values, False, self.out, False),
            dict: self._dicts,
            list: lambda values: encode_lists(values, list, self._inner()),
            tuple: self._tuples,
            np.ndarray: lambda values: self._arrays(values, kind_of_array),
            torch.Tensor: lambda values: self._arrays(values, kind_of_tensor),
        }

    def _inner(self) -> ValueEncoder:
        return ValueEncoder(self.out, self._kept, self._depth + 1)

    def encode(self, values: list[Any]) -> Column:
        """Append the buffers of a column of these values and describe it.

        Raises:
            SharedMemoryExhausted: If the host has not enough memory left.
            Exception: What pickling a value raises that no other column holds.
        """
        kinds = set(map(type, values))
        if not kinds:
            return Nones(0)
        if len(kinds) == 1:
            return self._encode_type(kinds.pop(), values)
        if len(kinds) == 2 and _NONE in kinds:
            column = self._encode_nullable((kinds - {_NONE}).pop(), values)
            if column is not None:
                return column
        keys = list(map(type, values))
        if len(kinds) > MOST_KINDS:
            return self._pickles(values)
        return encode_union(values, keys, self._encode_type, self.out)

    def _encode_nullable(self, kind: type, values: list[Any]) -> Column | None:
        """A column of one type and None; None where that type has no bitmap of its own."""
        try:
            if kind is int or kind is float:
                return encode_numbers(values, kind is float, self.out, True)
            if kind is bool:
                return encode_bools(values, self.out, True)
            if kind is str or kind is bytes:
                return self._shared(
                    kind, values, lambda all_: encode_strings(all_, kind is str, self.out, True)
                )
        except (OverflowError, UnicodeEncodeError):
            pass
        return None

    def _encode_type(self, kind: type, values: list[Any]) -> Column:
        """A column of values that are all exactly of one type."""
        if kind in _SCALARS or issubclass(kind, np.generic):
            return self._encode_each(kind, values)
        return self._shared(kind, values, lambda distinct: self._encode_each(kind, distinct))

    def _shared(self, kind: type, values: list[Any], encode: Callable[[list[Any]], Column]) -> Column:
        """A column of values some of which may be one and the same object."""
        is_text = kind is str or kind is bytes
        if is_text and not _are_long(values):
            return encode(values)
        # All are compared, but for texts and whole rows: there may be millions in a second.
        look_at_all = (self._depth > 0 and not is_text) or kind in (np.ndarray, torch.Tensor)
        return encode_repeats(
            kind,
            values,
            encode,
            self._kept,
            self.out,
            look_at_all=look_at_all,
            are_held=self._are_held,
        )

    def _encode_each(self, kind: type, values: list[Any]) -> Column:
        """A column with a row for each of the values."""
        if self._depth < _MOST_DEPTH:
            encode = self._by_type.get(kind)
            has_fields = is_plain_namedtuple(kind) and len(set(map(len, values))) == 1
            is_record = has_fields or is_plain_dataclass(kind)
            if (is_record or kind in _CONTAINERS) and refer_to_themselves(values):
                return encode_graphs(values, self._pickles, self.out)
            if encode is not None:
                return encode(values)
            if issubclass(kind, np.generic):
                return self._numpy_scalars(values)
            if has_fields:
                return encode_tuples(values, kind, self._inner())
            if is_record:
                return encode_objects(values, kind, self._inner())
        return self._pickles(values)

    def _pickles(self, values: list[Any]) -> Column:
        return encode_pickles(values, self._kept, self.out)

    def _ints(self, values: list[int]) -> Column:
        try:
            return encode_numbers(values, False, self.out, False)
        except OverflowError:
            return self._some_pickled(values, [value in _INT64 for value in values], self._ints)

    def _texts(self, values: list[str]) -> Column:
        try:
            return encode_strings(values, True, self.out, False)
        except UnicodeEncodeError:
            return self._some_pickled(values, list(map(_is_unicode, values)), self._texts)

    def _some_pickled(
        self, values: list[Any], fit: list[bool], encode: Callable[[list[Any]], Column]
    ) -> Column:
        return encode_union(
            values,
            fit,
            lambda fits, group: encode(group) if fits else self._pickles(group),
            self.out,
        )

    def _dicts(self, values: list[dict[Any, Any]]) -> Column:
        first = tuple(values[0])
        if _all_have_the_keys(values, first):
            key_sets, exact = {first}, set(map(type, first)) <= {str}
        else:
            key_sets = set(map(tuple, values))
            exact = set(map(type, chain.from_iterable(values))) <= {str}
        if not exact or len(key_sets) > _MOST_KEY_SETS or max(map(len, key_sets)) > _MOST_FIELDS:
            return encode_maps(values, self._inner())
        inner = self._inner()
        if len(key_sets) == 1:
            return encode_dicts(values, key_sets.pop(), inner)
        return encode_union(
            values,
            list(map(tuple, values)),
            lambda names, group: encode_dicts(group, names, inner),
            self.out,
        )

    def _tuples(self, values: list[tuple[Any, ...]]) -> Column:
        lengths = set(map(len, values))
        if len(lengths) == 1 and max(lengths) <= 64:
            return encode_tuples(values, tuple, self._inner())
        return encode_lists(values, tuple, self._inner())

    def _arrays(self, values: list[Any], kind_of: Callable[[Any], ArrayKind | None]) -> Column:
        kinds = list(map(kind_of, values))
        if len(set(kinds)) > MOST_KINDS:
            return self._pickles(values)
        return encode_union(values, kinds, self._arrays_of_kind, self.out)

    def _arrays_of_kind(self, kind: ArrayKind | None, values: list[Any]) -> Column:
        if kind is None:
            return self._pickles(values)
        return encode_by_memory(
            values,
            lambda value: memory_of(value, kind),
            lambda distinct: encode_arrays(distinct, kind, self.out),
            self._kept,
            self.out,
        )

    def _numpy_scalars(self, values: list[Any]) -> Column:
        dtypes = [value.dtype for value in values]
        if len(set(dtypes)) > MOST_KINDS:
            return self._pickles(values)
        return encode_union(values, dtypes, self._scalars_of_dtype, self.out)

    def _scalars_of_dtype(self, dtype: np.dtype[Any], values: list[Any]) -> Column:
        if dtype.kind in "biufcmM":
            return encode_numpy_scalars(values, dtype, self.out)
        return self._pickles(values)


def _all_have_the_keys(values: list[dict[Any, Any]], keys: tuple[Any, ...]) -> bool:
    """Whether all dicts have these very objects as keys, in this order: mostly so, and quick to see."""
    if set(map(len, values)) != {len(keys)}:
        return False
    return all(map(is_, chain.from_iterable(values), cycle(keys)))


def _are_long(values: list[Any]) -> bool:
    """Whether texts, or None, are so long that the same ones are worth a place instead."""
    sample = values[:: max(1, len(values) // _SAMPLED_TEXTS)]
    return sum([len(value) for value in sample if value is not None]) >= _LONG * len(sample)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
