"""Columns of single values: numbers, texts, times, others of the standard library; pickles of the rest."""

from __future__ import annotations

import datetime as dt
import decimal
import gc
import io
import pathlib
import pickle
import uuid
import zoneinfo
from array import array
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.codec.array_kinds import Array, array_of_tensor, kind_of_tensor
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.store.columns import types
from shmloader.store.columns.buffers import numbers_to_arrow, octets_to_arrow, texts_to_arrow
from shmloader.store.columns.types import PickleType

_SAMPLED_TEXTS = 256
_MOST_WORDS = 4096  # different texts of a column that are kept once each
_SAMPLED_VALUES = 4
_MOST_REFERENCES = 1000  # that are followed from a value before it counts as free of cycles
_MOST_NAMED = 8
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_MOST_DAYS = 100_000_000  # of which 64 bits hold the microseconds


class UnfitError(Exception):
    """Not all values fit into a column of their type; ``fits`` tells which do."""

    def __init__(self, fits: Callable[[Any], bool]) -> None:
        super().__init__()
        self.fits = fits


def _ints(values: list[int]) -> Any:
    """Integers, in as few bits as they need."""
    try:
        wide = np.frombuffer(array("q", values), np.int64)
    except OverflowError:
        raise UnfitError(lambda value: -(1 << 63) <= value < 1 << 63) from None
    least, most = int(wide.min()), int(wide.max())
    code = next(code for code in "bBhHiIq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
    return numbers_to_arrow(wide.astype(code))


def _texts(values: list[str]) -> Any:
    try:
        return _each_once(texts_to_arrow(values))
    except UnicodeEncodeError:
        raise UnfitError(is_unicode) from None


def _octets(values: list[bytes]) -> Any:
    return _each_once(octets_to_arrow(values))


def _each_once(column: Any) -> Any:
    """Texts as a dictionary, where there are few different ones."""
    step = max(1, len(column) // _SAMPLED_TEXTS)
    sample = column.take(numbers_to_arrow(np.arange(0, len(column), step)))
    if len(column) < 16 or len(sample.unique()) * 4 > len(sample):
        return column
    found = column.dictionary_encode()
    if len(found.dictionary) > min(_MOST_WORDS, len(column) // 4):
        return column
    places = found.indices.cast(pa.int8() if len(found.dictionary) < 128 else pa.int16())
    return pa.DictionaryArray.from_arrays(places, found.dictionary)


def _decimals(values: list[decimal.Decimal]) -> Any:
    texts = texts_to_arrow(list(map(str, values)))
    return types.DecimalType(texts.type).wrap(texts)


def _uuids(values: list[uuid.UUID]) -> Any:
    octets = np.array([value.bytes for value in values], "V16")
    return types.UuidType(pa.binary(16)).wrap(numbers_to_arrow(octets, pa.binary(16)))


def _paths(values: list[pathlib.PurePath]) -> Any:
    try:
        texts = texts_to_arrow(list(map(str, values)))
    except UnicodeEncodeError:
        raise UnfitError(lambda value: is_unicode(str(value))) from None
    return types.PathType(texts.type, kind=type(values[0]).__name__).wrap(texts)


def _dates(values: list[dt.date]) -> Any:
    days = np.fromiter(map(dt.date.toordinal, values), np.int32, len(values))
    return numbers_to_arrow(days - _EPOCH.toordinal(), pa.date32())


def _times(values: list[dt.time]) -> Any:
    def fits(value: dt.time) -> bool:
        return value.tzinfo is None and not value.fold

    if not all(map(fits, values)):
        raise UnfitError(fits)
    seconds = np.array([(one.hour * 60 + one.minute) * 60 + one.second for one in values], np.int64)
    return numbers_to_arrow(seconds * 10**6 + [one.microsecond for one in values], pa.time64("us"))


def _datetimes(values: list[dt.datetime]) -> Any:
    """Naive ones as Arrow's timestamps; of one time zone with that zone's name."""
    zone = values[0].tzinfo

    def fits(value: dt.datetime) -> bool:
        found = value.tzinfo
        is_alike = not value.fold and (type(found), str(found)) == (type(zone), str(zone))
        return is_alike and (zone is None or 1 < value.year < dt.MAXYEAR)  # else UTC may be out of range

    if not all(map(fits, values)):
        raise UnfitError(fits)
    if zone is None:
        epoch = _EPOCH.replace(tzinfo=None)
        return numbers_to_arrow(_microseconds(value - epoch for value in values), pa.timestamp("us"))
    # Other classes of zones may need a time for that.
    offset = zone.utcoffset(None) if type(zone) is dt.timezone else None
    named: dict[str, Any]
    if offset is not None and str(zone) == str(dt.timezone(offset)):
        named = {"offset_s": offset.total_seconds()}
    elif type(zone) is zoneinfo.ZoneInfo and zone.key and all(map(_is_in_no_gap, values)):
        named = {"key": zone.key}
    else:
        raise UnfitError(lambda value: False)
    storage = numbers_to_arrow(_microseconds(value - _EPOCH for value in values), pa.timestamp("us", "UTC"))
    return types.DatetimeType(storage.type, **named).wrap(storage)


def _durations(values: list[dt.timedelta]) -> Any:
    try:
        return numbers_to_arrow(_microseconds(values), pa.duration("us"))
    except OverflowError:
        raise UnfitError(lambda value: abs(value.days) < _MOST_DAYS) from None


def _microseconds(values: Iterable[dt.timedelta]) -> Array:
    return np.array([value // _MICROSECOND for value in values], np.int64)


def _is_in_no_gap(value: dt.datetime) -> bool:
    """Whether a time comes back from UTC as it was: an hour that a zone leaves out does not."""
    return value.astimezone(dt.UTC).astimezone(value.tzinfo).replace(fold=0) == value


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates, which Arrow refuses."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


ENCODERS: dict[type, Callable[[list[Any]], Any]] = {
    int: _ints,
    float: lambda values: numbers_to_arrow(np.frombuffer(array("d", values), np.float64)),
    bool: lambda values: numbers_to_arrow(np.frombuffer(bytes(values), np.bool_)),
    str: _texts,
    bytes: _octets,
    dt.date: _dates,
    dt.time: _times,
    dt.timedelta: _durations,
    dt.datetime: _datetimes,
    decimal.Decimal: _decimals,
    uuid.UUID: _uuids,
    pathlib.PosixPath: _paths,
    pathlib.PurePosixPath: _paths,
    pathlib.PureWindowsPath: _paths,
}
"""Makers of a column of values of exactly one type; they raise `UnfitError` if not all fit."""


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
    """A column of any objects but None, one pickle for each; raises what pickling raises."""
    pickled = list(map(pickled_value, values))
    kinds = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in set(map(type, values))})[
        :_MOST_NAMED
    ]
    storage = octets_to_arrow(pickled)
    return PickleType(storage.type, types=kinds).wrap(storage)


def pickled_value(value: Any) -> bytes:
    """The pickle of one value."""
    file = io.BytesIO()
    try:
        _ObjectPickler(file, 5).dump(value)
    except RecursionError as error:
        error.add_note(
            f"shmloader: a {type(value).__qualname__} is nested too deeply for pickle, such as rows of which "
            "each holds the one before. Let rows refer to others by their row numbers"
        )
        raise
    except Exception as error:
        error.add_note(
            f"shmloader: this was raised while pickling a {type(value).__qualname__}, as values "
            "are kept that no type of column holds. Its class must be found by name in a module, and its "
            "contents must be picklable: leave out or convert what is not."
        )
        raise
    return file.getvalue()


def refer_to_themselves(values: list[Any]) -> bool:
    """Whether any of a few of the values is reached from itself, through a limited number of references."""
    for value in values[:: max(1, len(values) // _SAMPLED_VALUES)][:_SAMPLED_VALUES]:
        todo, seen = [value], {id(value)}
        while todo and len(seen) < _MOST_REFERENCES:
            parts = gc.get_referents(*todo)
            if any(part is value for part in parts):
                return True
            todo = [part for part in parts if _may_have_parts(part) and id(part) not in seen]
            seen.update(map(id, todo))
    return False


def _may_have_parts(value: Any) -> bool:
    return gc.is_tracked(value) and not isinstance(value, type | ModuleType | FunctionType)
