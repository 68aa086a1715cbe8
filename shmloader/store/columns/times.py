"""Kinds of dates, times and durations."""

from __future__ import annotations

import datetime as dt
import functools
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from shmloader.codec.array_kinds import Array
from shmloader.store.columns.buffers import numbers_of, numbers_to_arrow
from shmloader.store.columns.kind import Kind, Origin, PythonType, Reader, UnfitError, storage_of

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_NAIVE_EPOCH = _EPOCH.replace(tzinfo=None)
_MICROSECOND = dt.timedelta(microseconds=1)
_MOST_DAYS = 100_000_000  # of which 64 bits hold the microseconds


def _microseconds(values: Iterable[dt.timedelta]) -> Array:
    return np.array([value // _MICROSECOND for value in values], np.int64)


class _Counts(Kind):
    """Values that a function, which ``maker`` gives, makes of a number each: of days, or of microseconds."""

    CODE = "q"
    maker: Callable[[Origin], Callable[[int], Any]]

    def getter(self, column: Any, origin: Origin) -> Reader:
        counts, make = numbers_of(storage_of(column), 1, self.CODE, len(column)), self.maker(origin)
        return lambda i: make(counts[i])


class Dates(_Counts, arrow=[pa.date32()]):
    """Dates, as days."""

    takes = (dt.date,)
    CODE = "i"

    @classmethod
    def write(cls, values: list[dt.date], encoder: Any, depth: int) -> Any:
        days = np.fromiter(map(dt.date.toordinal, values), np.int32, len(values))
        return numbers_to_arrow(days - _EPOCH.toordinal(), pa.date32())

    def maker(self, origin: Origin) -> Callable[[int], dt.date]:
        return lambda days: dt.date.fromordinal(days + 719_163)


class Times(_Counts, arrow=[pa.time64("us")]):
    """Times of day without a zone."""

    takes = (dt.time,)
    EXACT = pa.time64("us")

    @classmethod
    def write(cls, values: list[dt.time], encoder: Any, depth: int) -> Any:
        def is_plain(value: dt.time) -> bool:
            return value.tzinfo is None and not value.fold

        if not all(map(is_plain, values)):
            raise UnfitError(is_plain)
        seconds = np.array([(one.hour * 60 + one.minute) * 60 + one.second for one in values], np.int64)
        return numbers_to_arrow(seconds * 10**6 + [one.microsecond for one in values], cls.EXACT)

    def maker(self, origin: Origin) -> Callable[[int], dt.time]:
        def make(count: int) -> dt.time:
            minutes, microseconds = divmod(count, 60 * 10**6)
            return dt.time(minutes // 60, minutes % 60, microseconds // 10**6, microseconds % 10**6)

        return make


class Durations(_Counts, arrow=[pa.duration("us")]):
    """Durations."""

    takes = (dt.timedelta,)
    EXACT = pa.duration("us")

    @classmethod
    def write(cls, values: list[dt.timedelta], encoder: Any, depth: int) -> Any:
        try:
            return numbers_to_arrow(_microseconds(values), cls.EXACT)
        except OverflowError:
            raise UnfitError(lambda value: abs(value.days) < _MOST_DAYS) from None

    def maker(self, origin: Origin) -> Callable[[int], dt.timedelta]:
        return functools.partial(dt.timedelta, 0, 0)


class Datetimes(_Counts, arrow=[pa.timestamp("us")]):
    """Times without a zone as Arrow's timestamps; those of one zone as `ZonedDatetimes`."""

    takes = (dt.datetime,)
    EXACT = pa.timestamp("us")

    @classmethod
    def write(cls, values: list[dt.datetime], encoder: Any, depth: int) -> Any:
        zone = values[0].tzinfo

        def is_alike(value: dt.datetime) -> bool:
            found = value.tzinfo
            is_sure = zone is None or 1 < value.year < dt.MAXYEAR  # else UTC may be out of range
            return is_sure and not value.fold and (type(found), str(found)) == (type(zone), str(zone))

        if not all(map(is_alike, values)):
            raise UnfitError(is_alike)
        if zone is not None:
            return ZonedDatetimes.write(values, encoder, depth)
        return numbers_to_arrow(_microseconds(value - _NAIVE_EPOCH for value in values), cls.EXACT)

    def maker(self, origin: Origin) -> Callable[[int], dt.datetime]:
        return lambda count: _NAIVE_EPOCH + dt.timedelta(0, 0, count)


class ZonedDatetimes(_Counts, PythonType, name="datetime"):
    """Times with a zone: microseconds in UTC; the zone is ``key`` (zoneinfo) or ``offset_s``."""

    @classmethod
    def write(cls, values: list[dt.datetime], encoder: Any, depth: int) -> Any:
        zone = values[0].tzinfo
        # Other classes of zones may need a time for that.
        offset = zone.utcoffset(None) if type(zone) is dt.timezone else None
        named: dict[str, Any]
        if offset is not None and str(zone) == str(dt.timezone(offset)):
            named = {"offset_s": offset.total_seconds()}
        elif type(zone) is zoneinfo.ZoneInfo and zone.key and all(map(_is_in_no_gap, values)):
            named = {"key": zone.key}
        else:
            raise UnfitError
        counts = _microseconds(value - _EPOCH for value in values)
        return cls.around(numbers_to_arrow(counts, pa.timestamp("us", "UTC")), **named)

    def check(self, column: Any) -> None:
        if self.storage_type != pa.timestamp("us", "UTC"):
            raise ValueError(f"datetimes over {self.storage_type} mean nothing")

    def maker(self, origin: Origin) -> Callable[[int], dt.datetime]:
        said = self.parameters
        zone: dt.tzinfo = dt.timezone(dt.timedelta(seconds=said.get("offset_s", 0)))
        if "key" in said:
            zone = zoneinfo.ZoneInfo(said["key"])
        if zone is dt.UTC:
            return lambda count: _EPOCH + dt.timedelta(0, 0, count)
        return lambda count: (_EPOCH + dt.timedelta(0, 0, count)).astimezone(zone)


def _is_in_no_gap(value: dt.datetime) -> bool:
    """Whether a time comes back from UTC as it was: an hour that a zone leaves out does not."""
    return value.astimezone(dt.UTC).astimezone(value.tzinfo).replace(fold=0) == value
