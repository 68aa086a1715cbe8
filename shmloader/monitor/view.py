"""A program's memory as text of any width, without colours or escapes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from shmloader.monitor.findings import Growth, megabytes
from shmloader.monitor.monitor import Monitor, Reading

_COLUMN = 9
_LEAST_NAME = 20
_COLUMNS: list[tuple[str, Callable[[Growth], float]]] = [
    ("private", lambda growth: growth.process.private_nbytes / 1e6),
    ("MB/min", lambda growth: growth.nbytes_per_min / 1e6),
    ("PSS", lambda growth: growth.process.pss_nbytes / 1e6),
    ("shared", lambda growth: growth.process.shared_nbytes / 1e6),
    ("grown", lambda growth: growth.nbytes / 1e6),
]
"""Columns of figures in MB, the most telling first: as many are shown as fit."""


def render(monitor: Monitor, at: Reading, width: int, most_rows: int = 1000) -> str:
    """The processes at one moment, the memory of all, and what was seen; no line is longer than ``width``."""
    lines = [*_table(monitor, at, width, most_rows), *_summary(monitor, at)]
    for finding in monitor.findings():
        lines += ["", *textwrap.wrap(finding.text, width, initial_indent="-> ", subsequent_indent="   ")]
    return "\n".join(
        line for one in lines for line in textwrap.wrap(one, width, subsequent_indent="  ") or [""]
    )


def _table(monitor: Monitor, at: Reading, width: int, most_rows: int) -> list[str]:
    names, growths = monitor.names(), list(monitor.growths(at).values())
    columns = _COLUMNS[: max(1, (width - _LEAST_NAME) // _COLUMN)]
    rows = [
        (f"{'  ' * growth.process.depth}{names.get(growth.process.pid, growth.process.name)}", growth)
        for growth in growths[:most_rows]
    ]
    longest = max([len(f"{name} {growth.process.pid}") for name, growth in rows], default=0)
    name_width = max(_LEAST_NAME - 1, min(longest, width - _COLUMN * len(columns)))
    lines = ["MB".ljust(name_width) + "".join(title.rjust(_COLUMN) for title, _ in columns)]
    for name, growth in rows:
        pid = f" {growth.process.pid}"
        label = name[: name_width - len(pid)] + pid
        figures = "".join(f"{figure(growth):{_COLUMN},.0f}" for _, figure in columns)
        lines.append(label.ljust(name_width) + figures)
    if len(growths) > most_rows:
        lines.append(f"and {len(growths) - most_rows} more")
    return lines


def _summary(monitor: Monitor, reading: Reading) -> list[str]:
    room, seconds = reading.room, monitor.time_to_limit_s(reading)
    minutes = (seconds or 0.0) / 60
    duration = f"{minutes:,.0f} min" if minutes >= 2 else f"{60 * minutes:.0f} s"
    until = "" if seconds is None else f", reached in {duration} at this growth"
    shared = ", ".join(f"{owner} {megabytes(nbytes)}" for owner, nbytes in sorted(reading.shared.items()))
    limit = f"limit: {megabytes(room.limit_nbytes)} ({room.source}), {megabytes(room.available_nbytes)} left"
    return [
        "",
        f"together: {megabytes(reading.pss_nbytes)}, at most {megabytes(monitor.peak.pss_nbytes)} so far",
        limit + until,
        f"shared: {shared or 'nothing'}",
    ]
