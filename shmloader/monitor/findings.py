"""Says what a program's memory shows: who grows, why, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shmloader.monitor.inside import Report
from shmloader.monitor.processes import ProcessMemory

LEAST_NBYTES = 32_000_000
"""Bytes about which something is said: of private memory, of an owner, of unexplained growth in a minute."""

_MOST_OF_OWNER = 2  # times the bytes of what is called the cause: its pages hold more, and batches take some
_LEAST_S = 50.0  # of growth that nothing explains
_LEAST_RATE = 1_000_000  # bytes per minute; less is not called growth


@dataclass(frozen=True)
class Growth:
    """The growth of one process's private memory."""

    process: ProcessMemory  # as it is now
    nbytes: int  # since it was first read
    nbytes_per_min: float  # in the last minute
    resident_nbytes_per_min: float  # of all its memory, which does not grow where shared becomes private
    seconds: float  # of that minute in which it was followed


def megabytes(nbytes: float) -> str:
    """A number of bytes in MB (10**6), for people."""
    return f"{nbytes / 1e6:,.0f} MB"


About = tuple[int, str, int]
"""A process, an expression in it, and the ``id`` of what that stood for; 0 where it does not matter.

A program may make a loader for each epoch, and ``loader.dataset`` may be one dataset after the other.
"""


@dataclass(frozen=True)
class Finding:
    """One thing that is seen."""

    about: About
    nbytes: int  # that it is about
    text: str  # the sentence


def find(
    reports: Sequence[Report], growths: Mapping[int, Growth], *, looks_inside: bool
) -> Iterator[Finding]:
    """The findings about all that grows. Without ``looks_inside`` no loader can have reported a cause."""
    workers: set[int] = set()
    for report in reports:
        alive = [growths[pid] for pid in report.workers if pid in growths]
        workers |= {growth.process.pid for growth in alive}
        most = max((growth.process.private_nbytes for growth in alive), default=0)
        rate = max((growth.nbytes_per_min for growth in alive), default=0.0)
        is_forked = report.start_method == "fork"
        finding = _forked(report, alive, most, rate) if is_forked else _rebuilt(report, most, rate)
        if finding is not None:
            yield finding
        if report.original_nbytes >= LEAST_NBYTES:
            yield Finding((report.pid, f"del {report.original}", 0), report.original_nbytes, _held(report))
    why = "no loader of the program has reported it as its worker, so the cause cannot be told"
    if not looks_inside:
        why = "the cause cannot be told from outside, but if the program is started by this command"
    for pid, growth in growths.items():
        grows_itself = growth.resident_nbytes_per_min >= LEAST_NBYTES  # not only as its children end
        if pid not in workers and grows_itself and _is_lasting(growth):
            grows = f"grows by {megabytes(growth.nbytes_per_min)}/min"
            yield Finding(
                (pid, "", 0), growth.nbytes, f"process {pid} ({growth.process.name}) {grows}: {why}"
            )


def _is_lasting(growth: Growth) -> bool:
    """Whether a process grows that nothing explains, and not only because it starts."""
    return growth.seconds >= _LEAST_S and growth.nbytes_per_min >= LEAST_NBYTES


def _forked(report: Report, workers: Sequence[Growth], most: int, rate: float) -> Finding | None:
    """On forked workers, which copy objects by reading them. At their start they have no private memory."""
    each = f"each of {len(workers)} workers'" if len(workers) > 1 else "the worker's"
    grows = f"grows by {megabytes(rate)}/min" if rate >= _LEAST_RATE else "has grown"
    said = f"{each} private memory {grows}"
    if report.nbytes >= LEAST_NBYTES and LEAST_NBYTES <= most <= _MOST_OF_OWNER * report.nbytes:
        said += (
            f" towards the {megabytes(report.nbytes)} of `{report.owner}` ({megabytes(most)} so far): a "
            f"forked worker copies the objects that it reads. {cure(report)}"
        )
    elif any(map(_is_lasting, workers)):
        holds = f"`{report.owner}`, the largest in {report.dataset}, has only {megabytes(report.nbytes)}"
        said += f" ({megabytes(most)} so far). The cause cannot be told: {report.error or holds}"
    else:
        return None
    return Finding((report.pid, report.owner, report.owned), most, said)


def _rebuilt(report: Report, most: int, rate: float) -> Finding | None:
    """On spawned workers, each of which gets a dataset of its own."""
    if not report.start_method or report.nbytes < LEAST_NBYTES:
        return None
    done = f" ({megabytes(most)} private so far)" if most else ""
    grows = f", growing by {megabytes(rate)}/min" if rate >= _LEAST_RATE else ""
    return Finding(
        (report.pid, report.owner, report.owned),
        most,
        f"each worker of {report.dataset} is sent, and rebuilds, the {megabytes(report.nbytes)} of "
        f"`{report.owner}`{done}{grows}: {report.start_method} shares no objects. {cure(report)}",
    )


def _held(report: Report) -> str:
    """On the list or dict that a store was made from, which the program no longer needs."""
    return (
        f"process {report.pid} still holds `{report.original}`, about {megabytes(report.original_nbytes)} of "
        f"Python objects that it has shared: the store has them too. Cure: del {report.original}"
    )


def cure(report: Report) -> str:
    """The line that cures it, or what to do where no line does."""
    if report.is_shareable:
        return f"Cure: {report.owner} = shmloader.share({report.owner})"
    return (
        f"shmloader.share() does not take `{report.owner}`: keep numbers, texts, lists and dicts in one "
        "plain list or dict, or arrays"
    )
