"""Values of Python as Arrow arrays.

Columns are chosen from the exact types of the values, so that what is read equals what was given.

Each type has one column. Values of several types are a dense union of these; None beside another type is
Arrow's null where that type has nulls. Subclasses of the types that columns know (an ``OrderedDict``, a
``str`` subclass) are pickled, and so is everything else that no column gives back as it was.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import pathlib
import uuid
import zoneinfo
from array import array
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, compress, cycle, pairwise
from operator import is_, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.store.arrays import has_plain_dtype, kind_of_array, kind_of_tensor
from shmloader.store.columns import types
from shmloader.store.columns.arrays import arrays_to_arrow, lists_to_arrow, scalars_to_arrow
from shmloader.store.columns.classes import is_plain_dataclass, is_plain_namedtuple, name_of_class
from shmloader.store.columns.links import Links
from shmloader.store.columns.pickles import pickles_to_arrow, refer_to_themselves

_NONE = type(None)
_MOST_KINDS = 127  # as many as Arrow's union has
_MOST_DEPTH = 12  # of containers in containers; also what ends the walk into a cycle that was not found
_MOST_FIELDS = 4096
_LEAST_FILLED = 0.125  # of optional fields: if fewer are there, each dict keeps its own keys
_MOST_TUPLE = 64
_SAMPLED_TEXTS = 256
_MOST_WORDS = 4096  # different texts of a column that are kept once each
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - Arrow's
_MICROSECOND = dt.timedelta(microseconds=1)

ABSENT: Any = object()
"""Stands for the value of a key that a dict does not have."""


class Encoder:
    """Makes columns of values, and of the values inside them.

    Args:
        links: Where values that occur several times are kept once; None to keep each in its place.

    Attributes:
        classes: The classes that columns name, by these names.
    """

    def __init__(self, links: Links | None = None) -> None:
        self.classes: dict[str, type] = {}
        self._links = links
        self._scalars: dict[type, Callable[[list[Any]], Any]] = {
            int: _ints,
            float: lambda values: _numbers(values, "d"),
            bool: lambda values: pa.array(values, pa.bool_()),
            str: _texts,
            bytes: _octets,
            dt.date: lambda values: pa.array(values, pa.date32()),
            dt.time: _times,
            dt.timedelta: lambda values: pa.array(values, pa.duration("us")),
            dt.datetime: _datetimes,
            decimal.Decimal: lambda values: types.DecimalType(pa.string()).wrap(_as_texts(values)),
            uuid.UUID: lambda values: types.UuidType(pa.binary(16)).wrap(
                pa.array([None if value is None else value.bytes for value in values], pa.binary(16))
            ),
        }
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
            self._scalars[kind] = _paths
        self._containers: dict[type, Callable[[list[Any], int], Any]] = {
            dict: self._dicts,
            list: self._lists,
            tuple: self._tuples,
            set: self._sets,
            frozenset: self._sets,
            np.ndarray: lambda values, depth: self._arrays(values, kind_of_array),
            torch.Tensor: lambda values, depth: self._arrays(values, kind_of_tensor),
        }

    def rows(self, values: list[Any]) -> Any:
        """A record batch: columns for the keys of dicts of one form, else one column for all rows."""
        column = self.encode(values)
        if pa.types.is_struct(column.type) and column.type.num_fields and not column.null_count:
            return pa.RecordBatch.from_struct_array(column)
        return pa.RecordBatch.from_arrays([column], schema=pa.schema([pa.field("", column.type)], COLUMN))

    def encode(self, values: list[Any], depth: int = 0) -> Any:
        """A column of these values.

        Raises:
            Exception: What pickling a value raises that no other column holds.
        """
        kinds = set(map(type, values))
        if len(kinds) > 1:
            return self._several(kinds, values, depth)
        if not kinds or _NONE in kinds:
            return pa.nulls(len(values))
        return self._of_kind(kinds.pop(), values, depth)

    def _several(self, kinds: set[type], values: list[Any], depth: int) -> Any:
        if len(kinds) == 2 and _NONE in kinds:
            (kind,) = kinds - {_NONE}
            scalars = self._scalars.get(kind)
            if scalars is not None or kind in (dict, list):
                try:
                    return scalars(values) if scalars is not None else self._containers[kind](values, depth)
                except _Unfit:
                    pass
            if issubclass(kind, enum.Enum):
                return self._of_kind(kind, values, depth)
        if len(kinds) > _MOST_KINDS:
            return pickles_to_arrow(values)
        return union(values, list(map(type, values)), lambda _, group: self.encode(group, depth))

    def _of_kind(self, kind: type, values: list[Any], depth: int) -> Any:
        """A column of values that are all exactly of one type; enums beside None."""
        scalars = self._scalars.get(kind)
        if scalars is not None:
            try:
                return scalars(values)
            except _Unfit as unfit:
                return self._some_pickled(values, unfit.fits)
        if issubclass(kind, np.generic) and len({value.dtype for value in values}) == 1:
            return (
                scalars_to_arrow(values, values[0].dtype)
                if has_plain_dtype(values[0])
                else pickles_to_arrow(values)
            )
        if issubclass(kind, enum.Enum):
            return self._enums(kind, values)
        if self._links is not None:
            linked = self._links.column(values, depth, self.encode)
            if linked is not None:
                return linked
        return self._each(kind, values, depth)

    def _each(self, kind: type, values: list[Any], depth: int) -> Any:
        if depth >= _MOST_DEPTH:
            return pickles_to_arrow(values)
        if issubclass(kind, np.generic):
            return union(
                values, [value.dtype for value in values], lambda _, group: self.encode(group, depth)
            )
        container = self._containers.get(kind)
        is_record = is_plain_namedtuple(kind) or is_plain_dataclass(kind)
        if (is_record or kind in (list, dict, tuple)) and refer_to_themselves(values):
            return pickles_to_arrow(values)
        if container is not None:
            return container(values, depth)
        name = name_of_class(kind) if is_record else None
        if name is not None:
            column = self._records(kind, name, values, depth)
            if column is not None:
                self.classes[name] = kind
                return column
        return pickles_to_arrow(values)

    def _some_pickled(self, values: list[Any], fits: Callable[[Any], bool]) -> Any:
        return union(
            values,
            list(map(fits, values)),
            lambda fit, group: self.encode(group) if fit else pickles_to_arrow(group),
        )

    def _enums(self, kind: Any, values: list[Any]) -> Any:
        name = name_of_class(kind)
        members = list(kind.__members__)
        places = {id(kind.__members__[member]): place for place, member in reversed(list(enumerate(members)))}
        numbers = [None if value is None else places.get(id(value), -1) for value in values]
        if name is None or -1 in numbers:  # combined flags
            return pickles_to_arrow(values)
        self.classes[name] = kind
        storage = pa.array(numbers, pa.int8() if len(members) < 128 else pa.int32())
        return types.EnumType(storage.type, python=name, members=members).wrap(storage)

    def _arrays(self, values: list[Any], kind_of: Callable[[Any], Any]) -> Any:
        kinds = list(map(kind_of, values))
        if len(set(kinds)) > _MOST_KINDS:
            return pickles_to_arrow(values)
        return union(
            values,
            kinds,
            lambda kind, group: pickles_to_arrow(group) if kind is None else arrays_to_arrow(group, kind),
        )

    def _lists(self, values: list[Any], depth: int) -> Any:
        absent = [value is None for value in values] if None in values else None
        if absent is not None:
            values = [value or () for value in values]
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        return lists_to_arrow(lengths, self.encode(list(chain.from_iterable(values)), depth + 1), absent)

    def _sets(self, values: list[Any], depth: int) -> Any:
        lists = self._lists(list(map(list, values)), depth)
        return types.SetType(lists.type, kind=type(values[0]).__name__).wrap(lists)

    def _tuples(self, values: list[Any], depth: int) -> Any:
        lengths = set(map(len, values))
        if len(lengths) == 1 and 0 < max(lengths) <= _MOST_TUPLE:
            storage = self._fields(values, [str(n) for n in range(len(values[0]))], depth)
        else:
            storage = self._lists(values, depth)
        return types.TupleType(storage.type).wrap(storage)

    def _fields(self, values: list[Any], names: Sequence[str], depth: int) -> Any:
        """A struct of the items of tuples of one length."""
        columns = [self.encode(list(map(itemgetter(n), values)), depth + 1) for n in range(len(names))]
        return pa.StructArray.from_arrays(columns, list(names))

    def _records(self, kind: type, name: str, values: list[Any], depth: int) -> Any:
        if issubclass(kind, tuple):
            fields = kind._fields  # type: ignore[attr-defined]
            if not fields or {len(fields)} != set(map(len, values)):
                return None
            storage = self._fields(values, fields, depth)
            return types.NamedTupleType(storage.type, python=name).wrap(storage)
        state = self._dicts(list(map(vars, values)), depth)
        # Arrow has no extension types over others.
        return (
            types.DataclassType(state.type, python=name).wrap(state)
            if pa.types.is_struct(state.type)
            else None
        )

    def _dicts(self, values: list[Any], depth: int) -> Any:
        absent = [value is None for value in values] if None in values else None
        present = values if absent is None else [value for value in values if value is not None]
        first = tuple(present[0])
        if _all_have_the_keys(present, first):
            names, fit = first, None
        else:
            key_tuples = list(map(tuple, present))
            names = _merged(dict.fromkeys(key_tuples))
            places = {key: place for place, key in enumerate(names)}
            ordered = {keys: _ascend([places[key] for key in keys]) for keys in set(key_tuples)}
            fit = [ordered[keys] for keys in key_tuples]
            if sum(map(len, present)) < _LEAST_FILLED * len(present) * len(names):
                return self._maps(values, depth)
        if len(names) > _MOST_FIELDS or not all(type(key) is str and _is_unicode(key) for key in names):
            return self._maps(values, depth)
        if fit is not None and not all(map(_exact_keys, present)):
            return self._maps(values, depth)
        if fit is not None and not all(fit):  # the same keys in several orders
            if absent is not None:
                raise _Unfit(lambda value: value is not None)
            return union(
                values, fit, lambda _, group: self._dicts(group, depth) if _ else self._maps(group, depth)
            )
        return self._structs(values, present, names, absent, depth, complete=fit is None)

    def _structs(
        self,
        values: list[Any],
        present: list[Any],
        names: Sequence[str],
        absent: list[bool] | None,
        depth: int,
        *,
        complete: bool,
    ) -> Any:
        """A struct of dicts with these keys, of which all have all if they are ``complete``."""
        if not names:
            if absent is not None:
                raise _Unfit(lambda value: value is not None)
            return pa.array([{}] * len(values), pa.struct([]))
        if absent is not None:
            values = [value or _NO_KEYS for value in values]
        columns = []
        for name in names:
            if absent is None and (complete or all(name in value for value in values)):
                columns.append(self.encode(list(map(itemgetter(name), values)), depth + 1))
            elif complete or all(name in value for value in present):
                columns.append(self.encode([value.get(name) for value in values], depth + 1))
            else:
                columns.append(self._optional([value.get(name, ABSENT) for value in values], depth))
        mask = None if absent is None else pa.array(absent)
        return pa.StructArray.from_arrays(columns, list(names), mask=mask)

    def _optional(self, values: list[Any], depth: int) -> Any:
        """A column of values some of which are ``ABSENT``."""
        column = self.encode([None if value is ABSENT else value for value in values], depth + 1)
        kind = column.type
        if None in map(_none_or_other, values) or not _has_nulls(kind):
            mask = pa.array([value is ABSENT for value in values])
            column = pa.StructArray.from_arrays([column], ["value"], mask=mask)
            return types.OptionalType(column.type, boxed=True).wrap(column)
        return types.OptionalType(kind, boxed=False).wrap(column)

    def _maps(self, values: list[Any], depth: int) -> Any:
        """Any dicts: a list of keys and values each."""
        if None in values:
            raise _Unfit(lambda value: value is not None)
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        keys = self.encode(list(chain.from_iterable(values)), depth + 1)
        items = self.encode([item for value in values for item in value.values()], depth + 1)
        lists = lists_to_arrow(lengths, pa.StructArray.from_arrays([keys, items], ["key", "value"]))
        return types.DictType(lists.type).wrap(lists)


COLUMN = {b"shmloader": b'{"rows": "column", "version": 1}'}
"""Metadata of a schema whose one column has the rows."""

_NO_KEYS: dict[str, Any] = {}


class _Unfit(Exception):
    """Not all values fit into a column of their type; ``fits`` tells which do."""

    def __init__(self, fits: Callable[[Any], bool]) -> None:
        super().__init__()
        self.fits = fits


def union(values: list[Any], keys: Sequence[Hashable], encode: Callable[[Any, list[Any]], Any]) -> Any:
    """A column of values of several kinds.

    Args:
        values: The values.
        keys: The kind of each; at most as many different ones as Arrow's union has.
        encode: Called with a kind and its values.

    Returns:
        A dense union, or the one kind's column where there is but one.
    """
    tag_of = {key: tag for tag, key in enumerate(dict.fromkeys(keys))}
    if len(tag_of) == 1:
        return encode(keys[0], values)
    tags = np.fromiter(map(tag_of.__getitem__, keys), np.int8, len(keys))
    places = np.empty(len(keys), np.int32)
    children = []
    for key, tag in tag_of.items():
        chosen = tags == tag
        group = list(compress(values, chosen.tolist()))
        places[chosen] = np.arange(len(group), dtype=np.int32)
        children.append(encode(key, group))
    return pa.UnionArray.from_dense(pa.array(tags), pa.array(places), children)


def _numbers(values: list[Any], code: str) -> Any:
    try:
        return pa.array(np.frombuffer(array(code, values), code))
    except TypeError:  # None
        return pa.array(values, pa.float64() if code == "d" else pa.int64())


def _ints(values: list[Any]) -> Any:
    """Integers, in as few bits as they need."""
    try:
        wide = _numbers(values, "q")
    except (OverflowError, pa.ArrowInvalid):
        raise _Unfit(lambda value: value is not None and -(1 << 63) <= value < 1 << 63) from None
    numbers = wide.drop_null() if wide.null_count else wide
    found = numbers.to_numpy()
    least, most = int(found.min()), int(found.max())
    code = next(code for code in "bBhHiIq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
    return (
        pa.array(found.astype(code))
        if not wide.null_count
        else wide.cast(pa.from_numpy_dtype(np.dtype(code)))
    )


def _texts(values: list[Any]) -> Any:
    try:
        column = pa.array(values, pa.string())
    except UnicodeEncodeError:
        raise _Unfit(lambda value: value is not None and _is_unicode(value)) from None
    except (pa.ArrowInvalid, pa.ArrowCapacityError):
        return pa.array(values, pa.large_string())
    if isinstance(column, pa.ChunkedArray):
        return pa.array(values, pa.large_string())
    return _each_once(values, column)


def _octets(values: list[Any]) -> Any:
    column = pa.array(values, pa.binary())
    if isinstance(column, pa.ChunkedArray):
        return pa.array(values, pa.large_binary())
    return _each_once(values, column)


def _each_once(values: list[Any], column: Any) -> Any:
    """Texts as a dictionary, where there are few different ones."""
    step = max(1, len(values) // _SAMPLED_TEXTS)
    if len(values) < 16 or len(set(values[::step])) * 4 > len(values[::step]):
        return column
    found = column.dictionary_encode()
    if len(found.dictionary) > min(_MOST_WORDS, len(values) // 4):
        return column
    places = found.indices.cast(pa.int8() if len(found.dictionary) < 128 else pa.int16())
    return pa.DictionaryArray.from_arrays(places, found.dictionary)


def _as_texts(values: list[Any]) -> Any:
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _paths(values: list[Any]) -> Any:
    kind = next(type(value) for value in values if value is not None)
    try:
        return types.PathType(pa.string(), kind=kind.__name__).wrap(_as_texts(values))
    except UnicodeEncodeError:
        raise _Unfit(lambda value: value is not None and _is_unicode(str(value))) from None


def _times(values: list[Any]) -> Any:
    if any(value is not None and (value.tzinfo is not None or value.fold) for value in values):
        raise _Unfit(lambda value: value is not None and value.tzinfo is None and not value.fold)
    return pa.array(values, pa.time64("us"))


def _datetimes(values: list[Any]) -> Any:
    """Naive ones as Arrow's timestamps; of one time zone with that zone's name."""
    zone = next(value.tzinfo for value in values if value is not None)

    def fits(value: Any) -> bool:
        found = value.tzinfo if value is not None else None
        return value is not None and not value.fold and (type(found), str(found)) == (type(zone), str(zone))

    if not all(value is None or fits(value) for value in values):
        raise _Unfit(fits)
    if zone is None:
        return pa.array(values, pa.timestamp("us"))
    named: dict[str, Any]
    offset = zone.utcoffset(None)
    if type(zone) is dt.timezone and offset is not None and str(zone) == str(dt.timezone(offset)):
        named = {"offset_s": offset.total_seconds()}
    elif type(zone) is zoneinfo.ZoneInfo and zone.key and all(map(_is_in_no_gap, values)):
        named = {"key": zone.key}
    else:
        raise _Unfit(lambda value: False)
    epoch = _EPOCH.replace(tzinfo=dt.UTC)
    numbers = [None if value is None else (value - epoch) // _MICROSECOND for value in values]
    storage = pa.array(numbers, pa.timestamp("us", "UTC"))
    return types.DatetimeType(storage.type, **named).wrap(storage)


def _is_in_no_gap(value: Any) -> bool:
    """Whether a time comes back from UTC as it was: an hour that a zone leaves out does not."""
    return value is None or value.astimezone(dt.UTC).astimezone(value.tzinfo).replace(fold=0) == value


def _has_nulls(kind: Any) -> bool:
    """Whether a column can have nulls, and be the storage of another type."""
    return not (isinstance(kind, types.PythonType) or pa.types.is_union(kind) or pa.types.is_null(kind))


def _none_or_other(value: Any) -> Any:
    """None, or something that can be compared with it."""
    return None if value is None else ABSENT


def _merged(key_tuples: Sequence[tuple[Any, ...]] | dict[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    """All keys in an order that is, if there is one, that of every tuple."""
    order: list[Any] = []
    known: set[Any] = set()
    for keys in key_tuples:
        at = 0
        for key in keys:
            if key in known:
                at = order.index(key) + 1
            else:
                order.insert(at, key)
                known.add(key)
                at += 1
    return tuple(order)


def _ascend(places: list[int]) -> bool:
    return all(one < other for one, other in pairwise(places))


def _exact_keys(value: dict[Any, Any]) -> bool:
    return set(map(type, value)) <= {str}


def _all_have_the_keys(values: list[dict[Any, Any]], keys: tuple[Any, ...]) -> bool:
    """Whether all dicts have these very objects as keys, in this order: mostly so, and quick to see."""
    if set(map(len, values)) != {len(keys)}:
        return False
    return all(map(is_, chain.from_iterable(values), cycle(keys)))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
