"""Columns of single values: numbers, texts, times, and other immutable objects of the standard library."""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import uuid
import zoneinfo
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from shmloader.store.columns import types

_SAMPLED_TEXTS = 256
_MOST_WORDS = 4096  # different texts of a column that are kept once each
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


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
    return pa.array(wide.astype(code))


def _texts(values: list[str]) -> Any:
    try:
        column = pa.array(values, pa.string())
    except UnicodeEncodeError:
        raise UnfitError(is_unicode) from None
    except (pa.ArrowInvalid, pa.ArrowCapacityError):
        return pa.array(values, pa.large_string())
    return pa.array(values, pa.large_string()) if isinstance(column, pa.ChunkedArray) else _each_once(column)


def _octets(values: list[bytes]) -> Any:
    column = pa.array(values, pa.binary())
    return pa.array(values, pa.large_binary()) if isinstance(column, pa.ChunkedArray) else _each_once(column)


def _each_once(column: Any) -> Any:
    """Texts as a dictionary, where there are few different ones."""
    sample = column[:: max(1, len(column) // _SAMPLED_TEXTS)]
    if len(column) < 16 or len(sample.unique()) * 4 > len(sample):
        return column
    found = column.dictionary_encode()
    if len(found.dictionary) > min(_MOST_WORDS, len(column) // 4):
        return column
    places = found.indices.cast(pa.int8() if len(found.dictionary) < 128 else pa.int16())
    return pa.DictionaryArray.from_arrays(places, found.dictionary)


def _decimals(values: list[decimal.Decimal]) -> Any:
    return types.DecimalType(pa.string()).wrap(pa.array(list(map(str, values)), pa.string()))


def _uuids(values: list[uuid.UUID]) -> Any:
    return types.UuidType(pa.binary(16)).wrap(pa.array([value.bytes for value in values], pa.binary(16)))


def _paths(values: list[pathlib.PurePath]) -> Any:
    try:
        texts = pa.array(list(map(str, values)), pa.string())
    except UnicodeEncodeError:
        raise UnfitError(lambda value: is_unicode(str(value))) from None
    return types.PathType(pa.string(), kind=type(values[0]).__name__).wrap(texts)


def _times(values: list[dt.time]) -> Any:
    def fits(value: dt.time) -> bool:
        return value.tzinfo is None and not value.fold

    if not all(map(fits, values)):
        raise UnfitError(fits)
    return pa.array(values, pa.time64("us"))


def _datetimes(values: list[dt.datetime]) -> Any:
    """Naive ones as Arrow's timestamps; of one time zone with that zone's name."""
    zone = values[0].tzinfo

    def fits(value: dt.datetime) -> bool:
        found = value.tzinfo
        return not value.fold and (type(found), str(found)) == (type(zone), str(zone))

    if not all(map(fits, values)):
        raise UnfitError(fits)
    if zone is None:
        return pa.array(values, pa.timestamp("us"))
    offset = zone.utcoffset(None)
    named: dict[str, Any]
    if type(zone) is dt.timezone and offset is not None and str(zone) == str(dt.timezone(offset)):
        named = {"offset_s": offset.total_seconds()}
    elif type(zone) is zoneinfo.ZoneInfo and zone.key and all(map(_is_in_no_gap, values)):
        named = {"key": zone.key}
    else:
        raise UnfitError(lambda value: False)
    numbers = [(value - _EPOCH) // _MICROSECOND for value in values]
    storage = pa.array(numbers, pa.timestamp("us", "UTC"))
    return types.DatetimeType(storage.type, **named).wrap(storage)


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
    float: lambda values: pa.array(np.frombuffer(array("d", values), np.float64)),
    bool: lambda values: pa.array(values, pa.bool_()),
    str: _texts,
    bytes: _octets,
    dt.date: lambda values: pa.array(values, pa.date32()),
    dt.time: _times,
    dt.timedelta: lambda values: pa.array(values, pa.duration("us")),
    dt.datetime: _datetimes,
    decimal.Decimal: _decimals,
    uuid.UUID: _uuids,
    pathlib.PosixPath: _paths,
    pathlib.PurePosixPath: _paths,
    pathlib.PureWindowsPath: _paths,
}
"""Makers of a column of values of exactly one type; they raise `UnfitError` where not all fit."""
