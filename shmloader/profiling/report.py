"""`ProfileReport`: the figures of a profile, as a table, as scalars for trackers, as a picture or a trace."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from shmloader.profiling.recorder import BatchRecorder, Made, Returned, Sums
from shmloader.verdict import Evidence, Profiled, Verdict, judge, time_of

MAIN = {"wait": "waiting for a batch", "sampler": "sampler", "next": "next() itself", "step": "your program"}
WORKERS = {"fetch": "fetch", "collate": "collate", "write": "write", "idle": "waiting for a slot"}
"""Parts of the time of the main process and of the workers, with their names in the table."""

_TIMES = ("p50", "p95", "p99", "most")
_SUMMED = "steps step_s sampler_s next_s fetch_s collate_s write_s cpu_s delay_s excess_s".split()
"""Figures of the same name in `Sums` and `Profiled`."""

_Times = np.ndarray[Any, np.dtype[np.float64]]
_MOST_DRAWN = 300  # batches in a picture: more would be thinner than a pixel
_LEAST_OF_WORKER = 5  # batches, for a worker to be compared with the others


class Spread(NamedTuple):
    """One part of the time: seconds per batch, and its share of the time of its process."""

    share: float
    p50_s: float
    p95_s: float
    p99_s: float
    most_s: float


@dataclass(frozen=True)
class ProfileReport:
    """The figures of a loader's profile; percentiles, medians and entries are of its last 10,000 entries.

    Attributes:
        batches: Batches returned.
        total_s: Seconds from batch to batch, without the time between epochs.
        num_workers: Workers there are, or were last.
        main: Spreads of ``wait``, ``sampler``, ``next`` and ``step`` (the program's own work).
        workers: Spreads of ``fetch``, ``collate``, ``write`` and ``idle`` (waiting for a task and its slot).
        by_worker: By worker: batches, and the median seconds that it took for one.
        slowest: Names of the slowest samples and their seconds, the slowest first.
        bound_batches_per_s: Batches per second if loading took no time.
        verdict: The cause that holds the loader up.
        returned, made: The times of each batch, or of quick ones together.
    """

    batches: int
    total_s: float
    num_workers: int
    main: dict[str, Spread]
    workers: dict[str, Spread]
    by_worker: dict[int, tuple[int, float]]
    slowest: dict[str, float]
    bound_batches_per_s: float
    verdict: Verdict
    returned: tuple[Returned, ...] = ()
    made: tuple[Made, ...] = ()

    @classmethod
    def of(cls, recorder: BatchRecorder, evidence: Evidence) -> ProfileReport:
        """The report on what was recorded; ``evidence`` has what the loader's statistics know."""
        recorder.note_returned()
        sums, returned, made = recorder.sums, tuple(recorder.returned), tuple(recorder.made)
        batches = [one.batches for one in returned]
        of_each = [one.times.batches for one in made]
        fields = {name: "wait_s" if name == "idle" else f"{name}_s" for name in (*MAIN, *WORKERS)}
        main = {name: np.array([getattr(one, fields[name]) for one in returned]) / batches for name in MAIN}
        parts = {name: np.array([getattr(one.times, fields[name]) for one in made]) for name in WORKERS}
        main = {name: np.repeat(times, batches) for name, times in main.items()}
        parts = {name: np.repeat(times, of_each) for name, times in parts.items()}
        total_s = sum(getattr(sums, f"{name}_s") for name in MAIN)
        slowest = dict(sorted(recorder.slowest.items(), key=lambda pair: -pair[1]))
        by_worker = _by_worker(made, sums)
        profiled = _profiled(sums, by_worker, slowest)
        found = replace(
            evidence,
            batches=sums.batches,
            total_s=total_s,
            wait_s=sums.wait_s,
            held=sums.held,
            profiled=profiled,
        )
        return cls(
            batches=sums.batches,
            total_s=total_s,
            num_workers=evidence.num_workers,
            main=_spreads(main, sums),
            workers=_spreads(parts, sums),
            by_worker=by_worker,
            slowest=slowest,
            bound_batches_per_s=profiled.bound_batches_per_s,
            verdict=judge(found),
            returned=returned,
            made=made,
        )

    def scalars(self) -> dict[str, float]:
        """Figures by name, for TensorBoard, W&B and other trackers: seconds per batch, shares, rates."""
        found = {"batches_per_s": self.batches / self.total_s if self.total_s else 0.0}
        for where, spreads in (("main", self.main), ("workers", self.workers)):
            for name, spread in spreads.items():
                found |= {f"{where}/{name}/{field}": value for field, value in spread._asdict().items()}
        return found

    def as_dict(self) -> dict[str, Any]:
        """All figures but those of single batches, for JSON."""
        return {
            "verdict": {"cause": str(self.verdict.cause), "text": self.verdict.text},
            "batches": self.batches,
            "total_s": self.total_s,
            "num_workers": self.num_workers,
            "bound_batches_per_s": self.bound_batches_per_s,
            "main": {name: spread._asdict() for name, spread in self.main.items()},
            "workers": {name: spread._asdict() for name, spread in self.workers.items()},
            "by_worker": {str(number): figures for number, figures in self.by_worker.items()},
            "slowest": self.slowest,
        }

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write the batches as Chrome trace events (JSON), for Perfetto or ``chrome://tracing``."""
        write_trace(path, list(self.spans()))

    def save_picture(self, path: str | PathLike[str]) -> None:
        """Draw the last 300 batches over time, a row for the main process and one for each worker.

        The form (PNG, SVG, PDF) is that of the name's ending. It needs matplotlib (``shmloader[plots]``).
        """
        from shmloader.profiling.picture import draw

        draw(path, self.verdict.text, self.last_spans())

    def last_spans(self) -> list[tuple[str, str, float, float]]:
        """The `spans` of the last 300 batches."""
        returned, made = self.returned[-_MOST_DRAWN:], self.made[-_MOST_DRAWN:]
        begins = [returned[0].began_ns] if returned else []  # entries stand for different numbers of batches
        begin_ns = max([*begins, made[0].times.began_ns] if made else begins, default=0)
        returned = tuple(one for one in returned if one.began_ns >= begin_ns)
        made = tuple(one for one in made if one.times.began_ns >= begin_ns)
        return list(replace(self, returned=returned, made=made).spans())

    def spans(self) -> Iterator[tuple[str, str, float, float]]:
        """Spans of work: who did it, its name, its beginning and its duration, in seconds."""
        for one in self.returned:
            at_s = one.began_ns / 1e9
            for name in ("step", "wait", "sampler", "next"):
                spent_s = getattr(one, f"{name}_s")
                yield "main", name, at_s, spent_s
                at_s += spent_s
        for made in self.made:
            at_s = made.times.began_ns / 1e9
            for name in ("fetch", "collate", "write"):
                spent_s = getattr(made.times, f"{name}_s")
                yield f"worker {made.worker_id}", name, at_s, spent_s
                at_s += spent_s

    def __str__(self) -> str:
        return render(self.as_dict())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def write_trace(path: str | PathLike[str], spans: Iterable[Sequence[Any]]) -> None:
    """Write spans of time as Chrome trace events."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for who, name, at_s, spent_s in spans:
        row = rows.setdefault(who, len(rows))
        events.append({"name": name, "ph": "X", "pid": 0, "tid": row, "ts": at_s * 1e6, "dur": spent_s * 1e6})
    events += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": who}}
        for who, row in rows.items()
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def render(figures: dict[str, Any], width: int | None = None) -> str:
    """A report as text, from its `ProfileReport.as_dict`.

    With a ``width``, of 40 columns or more, no line is longer: the table has as many columns as fit.
    """
    batches, total_s = figures["batches"], figures["total_s"]
    lines: list[str] = [figures["verdict"]["text"]]
    if not batches:
        return wrapped(lines[0], width)
    rate, bound = batches / max(total_s, 1e-9), figures["bound_batches_per_s"]
    limit = f"; {bound:,.1f} if loading took no time" if bound else ""
    lines.append(f"{batches:,} batches in {time_of(total_s)}: {rate:,.1f} batches/s{limit}")
    workers = f"{figures['num_workers']} worker(s)" if figures["num_workers"] else "in next()"
    heads = ((MAIN, "main", "main process"), (WORKERS, "workers", workers))
    for names, key, head in heads if figures["by_worker"] else heads[:1]:
        shown = _TIMES if width is None else _TIMES[: (width - 29) // 10]
        lines.append(f"{head:<22}{'share':>7}" + "".join(f"{title:>10}" for title in shown))
        for name, title in names.items():
            share, *times = figures[key][name].values()
            spent = "".join(f"{time_of(one):>10}" for one in times[: len(shown)])
            lines.append(f"  {title:<20}{share:>7.0%}{spent}")
    for number, (made, usual_s) in figures["by_worker"].items():
        lines.append(f"worker {number}: {made:,} batches, {time_of(usual_s)} for half of them or more")
    lines += [f"slowest: {name}, {time_of(slow_s)}" for name, slow_s in figures["slowest"].items()]
    return "\n".join(wrapped(line, width) for line in lines)


def wrapped(line: str, width: int | None) -> str:
    """A line of text, in several lines if it is longer than a width."""
    if width is None or len(line) <= width:
        return line
    return "\n".join(textwrap.wrap(line, width, subsequent_indent="  "))


def _spreads(times: dict[str, _Times], sums: Sums) -> dict[str, Spread]:
    spent_s: dict[str, float] = {name: getattr(sums, f"{name}_s") for name in times}
    total_s = sum(spent_s.values()) or 1.0
    spreads = {}
    for name, each in times.items():
        p50, p95, p99, most = np.percentile(each if len(each) else [0.0], [50, 95, 99, 100]).tolist()
        spreads[name] = Spread(spent_s[name] / total_s, p50, p95, p99, most)
    return spreads


def _by_worker(made: tuple[Made, ...], sums: Sums) -> dict[int, tuple[int, float]]:
    spent: dict[int, list[float]] = {}
    for worker_id, times, _ in made:
        each_s = times.fetch_s + times.collate_s + times.write_s
        spent.setdefault(worker_id, []).extend([each_s] * times.batches)
    return {number: (sums.made[number], median(spent[number])) for number in sorted(spent)}


def _profiled(sums: Sums, by_worker: dict[int, tuple[int, float]], slowest: dict[str, float]) -> Profiled:
    slow_worker = None
    known = {number: usual_s for number, (count, usual_s) in by_worker.items() if count >= _LEAST_OF_WORKER}
    if len(known) > 1:
        slow = max(known, key=lambda number: known[number])
        others = median([usual_s for number, usual_s in known.items() if number != slow])
        slow_worker = slow, known[slow] / max(others, 1e-9)
    name, slow_s = next(iter(slowest.items()), ("", 0.0))
    made = max(1, sums.made.total())
    return Profiled(
        **{each: getattr(sums, each) for each in _SUMMED},
        copied_nbytes=sums.copied_nbytes / made,
        header_nbytes=sums.header_nbytes / made,
        slow_worker=slow_worker,
        slow_sample=f"{name} took {time_of(slow_s)}" if name else "",
    )
