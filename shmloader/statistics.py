"""Statistics of a loader: the snapshot that users see, and the counters behind it."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeVar

from shmloader.messages import shown
from shmloader.verdict import Evidence, judge, time_of

_MOST_BAD_SAMPLES = 3  # that a table shows
_SAME = (
    "batches spills in_process_s num_workers is_undivided usable_cores own_cores foreign_cores "
    "throttled_share"
).split()
"""Figures of the same name in `LoaderStatistics` and `Evidence`."""

_Counts = TypeVar("_Counts")
_Replay = Callable[[Any, int | None], Any]


@dataclass(frozen=True)
class BadSample:
    """A sample that raised and that the loader left out or replaced (``on_error``)."""

    index: object  # for an iterable-style dataset its position in its worker's stream, in this epoch
    error: str  # name of the exception's type
    message: str  # its text, cut at 500 characters
    of_stream: bool = False  # the dataset is iterable-style
    worker_id: int | None = None  # whose stream it is; None if map-style, and for ``num_workers=0``

    def __str__(self) -> str:
        whose = "the" if self.worker_id is None else f"worker {self.worker_id}'s"
        index = shown(self.index)
        where = f"sample {index} of {whose} stream" if self.of_stream else f"dataset[{index}]"
        return f"{where}: {self.error}: {self.message}"


@dataclass(frozen=True)
class PlacedSite:
    """A call in the program's code that makes a part of the batch (``place_results``)."""

    call: str  # its name, ``torch.stack``, say
    where: str  # the file, the line and the function that call it
    placed: bool  # its results are made in the slot
    why: str = ""  # they are not

    def __str__(self) -> str:
        return f"{self.call} at {self.where}: {'made in the slot' if self.placed else f'copied, {self.why}'}"


@dataclass(frozen=True)
class AutotuneReport:
    """The choice of a loader with ``num_workers="auto"`` or ``prefetch_factor="auto"``."""

    num_workers: int  # now: those that are at work or are being started
    prefetch_factor: int  # now
    settled: bool  # it changes only if batches become so large that the memory budget asks for fewer
    batches: int  # returned until the choice was made, or so far; at most 200
    why: str  # the reasons, with what was measured, for people
    chooses_workers: bool = True  # and not only the depth


@dataclass(frozen=True)
class LoaderStatistics:
    """A snapshot of one loader, from ``loader.statistics()``.

    Counters run from the loader's creation over all its epochs; slots and bytes are those of its live
    iterators at the moment of the call. With ``num_workers=0`` there are no slots and no waiting. ``print()``
    shows a table and names the bottleneck. docs/api.md explains each field.
    """

    slots_free: int = 0  # hold nothing
    slots_granted: int = 0  # a worker writes them, or is about to
    slots_published: int = 0  # with a batch that ``next()`` has not returned yet
    slots_leased: int = 0  # with a batch that the program still holds, in whatever form
    slots_guarded: int = 0  # the program has dropped the batch, and an accelerator may still read it
    reserved_nbytes: int = 0  # shared memory for slots
    used_nbytes: int = 0  # of the batches in published and leased slots
    largest_batch_nbytes: int = 0  # so far, header included
    batches: int = 0  # returned
    failures: int = 0  # exceptions of workers that were raised in place of a batch
    spills: int = 0  # batches moved to private memory: larger than a slot, or kept beyond the memory budget
    spilled_nbytes: int = 0
    detached: int = 0  # batches whose memory a worker kept, which costs it a private copy
    pin_copies: int = 0  # batches copied into pinned memory
    bad_samples: int = 0  # those that raised and were left out or replaced (``on_error``)
    bad_sample_list: tuple[BadSample, ...] = ()  # the first 1,000, in the order of their batches
    batches_left_out: int = 0  # they had no good sample
    batches_one_by_one: int = 0  # samples were fetched one by one because ``__getitems__`` raised
    oldest_leases: tuple[str, ...] = ()  # with ``SHMLOADER_DEBUG=1``, the batches that are held for longest
    worker_restarts: int = 0  # workers that died or did not answer and were replaced
    workers_renewed: int = 0  # that had more memory than ``worker_max_nbytes`` and were replaced
    tasks_ahead: int = 0  # sent because a slow batch held the other workers up (``dispatch="dynamic"``)
    epochs_prefetched: int = 0  # they began with batches that were made early (``prefetch_epochs``)
    epochs_in_vain: int = 0  # their early batches were discarded and made again
    iterating_s: float = 0.0  # from ``iter()`` to the last ``next()`` so far, summed over the epochs
    num_workers: int = 0  # of the iterator that was begun last, with those added since
    is_undivided: bool = False  # each worker has the whole stream, unless the dataset divides itself
    workers_made_s: float = 0.0  # that all workers together took to make batches
    usable_cores: int = 0  # that this process may use: of cores that ranks share, its part
    own_cores: float | None = None  # that this process and its workers kept busy, on average so far
    foreign_cores: float = 0.0  # that everything else kept busy meanwhile, of the usable ones; 0 if unknown
    throttled_share: float = 0.0  # of the scheduler's periods in which a cgroup's processor quota was used up
    wait_for_workers_s: float = 0.0  # that ``next()`` waited for a batch
    wait_for_first_batches_s: float = 0.0  # its part for the first batch of each epoch
    wait_for_starts_s: float = 0.0  # the part of that in which new workers had not begun their first batch
    in_process_s: float = 0.0  # in which ``next()`` made batches itself, with ``num_workers=0``
    wait_for_device_s: float = 0.0  # that ``next()`` waited for slots that an accelerator still read
    workers_wait_for_slots_s: float = 0.0  # that all workers together waited for a slot
    torchs_way: bool = False  # torch's own iterator loads, and nothing is counted
    placed_sites: tuple[PlacedSite, ...] = ()  # calls of torch's that make parts of the batch
    autotune: AutotuneReport | None = None  # for ``num_workers="auto"`` or ``prefetch_factor="auto"``

    @property
    def verdict(self) -> str:
        """One sentence that names the bottleneck (the workers or the training loop), with the figures."""
        if self.torchs_way:
            return (
                "Torch's own iterator loads the batches here, and nothing is counted. A RuntimeWarning says "
                "why, once in each process."
            )
        return judge(self.evidence()).text

    def evidence(self) -> Evidence:
        """The figures that the verdict rests on."""
        chosen = self.autotune
        slots = (self.slots_free, self.slots_granted, self.slots_published, self.slots_leased)
        return Evidence(
            **{name: getattr(self, name) for name in _SAME},
            total_s=self.iterating_s,
            wait_s=self.wait_for_workers_s,
            first_s=self.wait_for_first_batches_s,
            start_s=self.wait_for_starts_s,
            made_s=self.workers_made_s,
            held=self.slots_leased,
            slots=sum(slots) + self.slots_guarded,
            autotune=chosen.why if chosen is not None and chosen.chooses_workers else "",
            is_settled=chosen is None or chosen.settled,
        )

    def __str__(self) -> str:
        if self.torchs_way:
            return self.verdict
        rows = [*self._figures(), *self._events()]
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}" for label, value in rows]
        bad = [f"  {sample}" for sample in self.bad_sample_list[:_MOST_BAD_SAMPLES]]
        held = [f"  {lease}" for lease in self.oldest_leases]
        sites = [f"  {site}" for site in self.placed_sites]
        chosen = [] if self.autotune is None else [self.autotune.why]
        return "\n".join([self.verdict, *lines, *bad, *sites, *held, *chosen])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _figures(self) -> Iterator[tuple[str, str]]:
        yield "batches returned", f"{self.batches:,}"
        yield "time in the loop", time_of(self.iterating_s)
        if self.in_process_s:
            yield "next() made batches", time_of(self.in_process_s)
        else:
            first, start = time_of(self.wait_for_first_batches_s), time_of(self.wait_for_starts_s)
            parts = f"{first} of it for first batches, {start} until workers started"
            yield "next() waited for workers", f"{time_of(self.wait_for_workers_s)}, {parts}"
            summed = f"{time_of(self.workers_wait_for_slots_s)}, summed over the workers"
            yield "workers waited for slots", summed
        if self.wait_for_device_s:
            yield "next() waited for the accelerator", time_of(self.wait_for_device_s)
        slots = {
            "free": self.slots_free,
            "being written": self.slots_granted,
            "ready for next()": self.slots_published,
            "held by the program": self.slots_leased,
        }
        if self.slots_guarded:
            slots["read by the accelerator"] = self.slots_guarded
        if any(slots.values()):
            yield "slots", ", ".join(f"{count} {name}" for name, count in slots.items())
            yield "shared memory", f"{_size(self.reserved_nbytes)} reserved, {_size(self.used_nbytes)} used"
        if self.largest_batch_nbytes:
            yield "largest batch", _size(self.largest_batch_nbytes)

    def _events(self) -> Iterator[tuple[str, str]]:
        """Rows for those special events that have happened."""
        counts = {
            "exceptions of workers": self.failures,
            "workers replaced": self.worker_restarts,
            "workers replaced for their memory": self.workers_renewed,
            "batches moved to private memory": self.spills,
            "batches kept by their worker": self.detached,
            "batches copied to pinned memory": self.pin_copies,
            "tasks sent ahead": self.tasks_ahead,
            "epochs begun early": self.epochs_prefetched,
            "epochs begun early and made anew": self.epochs_in_vain,
            "batches left out": self.batches_left_out,
            "batches fetched one by one": self.batches_one_by_one,
            "bad samples": self.bad_samples,
        }
        spilled = f" ({_size(self.spilled_nbytes)})"
        for label, count in counts.items():
            if count:
                yield label, f"{count:,}{spilled if label.endswith('private memory') else ''}"


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):,.1f} MiB"
    return f"{nbytes / (1 << 10):,.1f} KiB" if nbytes >= 1 << 10 else f"{nbytes} bytes"


class Recorder(Protocol):
    """Takes the times of batches while a loader is profiled; main process."""

    def begin_epoch(self) -> None:
        """Begin an epoch."""

    def time_sampler(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An iterator over the same index batches that is timed."""

    def begin_next(self, waited_ns: int) -> None:
        """Note that the program asks for a batch; ``waited_ns`` counts all waiting of the loader so far."""

    def end_next(self, waited_ns: int, held: int) -> None:
        """Note that it gets one, and how many it holds besides."""

    def note_times(self, worker_id: int, times: Any, payload: bytes) -> None:
        """Take a worker's `BatchTimes`; ``payload`` is the packed index batch."""


_Rare = Literal[
    "failures",
    "spills",
    "spilled_nbytes",
    "detached",
    "pin_copies",
    "worker_restarts",
    "workers_renewed",
    "tasks_ahead",
    "epochs_prefetched",
    "epochs_in_vain",
    "wait_for_device_ns",
]
_Warned = Literal["warned_of_spills", "warned_of_copies"]


@dataclass
class Counters:
    """The counters of one loader, shared by its iterators; main process only.

    An owner keeps its counts in a dataclass of its own, which it gets by `of` and which only it writes. Names
    are those of `LoaderStatistics`, with ``_ns`` for nanoseconds in place of ``_s``.
    """

    batches: int = 0
    rare: Counter[str] = field(default_factory=Counter)  # counts that few batches have, by their names
    largest_batch_nbytes: int = 0
    wait_for_workers_ns: int = 0
    wait_for_first_batches_ns: int = 0
    wait_for_starts_ns: int = 0
    in_process_ns: int = 0
    workers_wait_for_slots_ns: int = 0
    workers_made_ns: int = 0
    num_workers: int = 0
    is_undivided: bool = False
    torchs_way: bool = False
    warned_of_spills: bool = False
    warned_of_copies: bool = False
    began_ns: int = 0  # the moment at which the present epoch began
    last_next_ns: int = 0  # and that at which `next()` last returned a batch
    earlier_ns: int = 0  # time in the loop, in epochs before it
    waited_before_ns: int = 0  # `wait_for_workers_ns` when it began
    workers_are_new: bool = False  # they were started for this epoch
    recorder: Recorder | None = None  # while the loader is profiled
    replays: list[_Replay] = field(default_factory=list)  # of profiles that replay; the last one begun counts
    _owned: dict[type, Any] = field(default_factory=dict)

    def begin_epoch(self, num_workers: int = 0, *, starts: bool = False, is_undivided: bool = False) -> None:
        """Count the time in the loop from now on; time outside of epochs does not count.

        There are ``num_workers`` now; with ``starts`` they were started for this epoch. A dataset that
        ``is_undivided`` is one that each of them has as a whole, unless it divides itself.
        """
        self.earlier_ns = self.iterating_ns
        self.began_ns = self.last_next_ns = time.perf_counter_ns()
        self.waited_before_ns = self.wait_for_workers_ns
        self.workers_are_new = starts
        self.num_workers, self.is_undivided = num_workers, is_undivided

    def note_workers(self, num_workers: int) -> None:
        """Note the number of workers, which has grown within an epoch."""
        self.num_workers = num_workers

    def note_torchs_way(self) -> None:
        """Note that torch's own iterator loads."""
        self.torchs_way = True

    def record(self, recorder: Recorder | None) -> None:
        """Have epochs from now on recorded."""
        self.recorder = recorder

    def begin_replay(self, replay: _Replay) -> None:
        """Have epochs from now on replayed by a function of an iterator and its length."""
        self.replays.append(replay)

    def end_replay(self, replay: _Replay) -> None:
        """Have epochs replayed no longer by a function, which need not be the one that began last."""
        if replay in self.replays:
            self.replays.remove(replay)

    def forget_profiles(self) -> None:
        """Have epochs from now on neither recorded nor replayed."""
        self.recorder = None
        self.replays.clear()

    @property
    def replay(self) -> _Replay | None:
        """The function that makes a replay of each new iterator; None while nothing is replayed."""
        return self.replays[-1] if self.replays else None

    def add(self, name: _Rare, count: int = 1) -> None:
        """Add to a count that few batches have."""
        self.rare[name] += count

    def note_answer(self, wait_ns: int, made_ns: int) -> None:
        """Count the times of a worker: waiting for a task, and making its batch."""
        self.workers_wait_for_slots_ns += wait_ns
        self.workers_made_ns += made_ns

    def note_wait(self, waited_ns: int) -> None:
        """Count a wait for workers."""
        self.wait_for_workers_ns += waited_ns

    def note_return(self) -> None:
        """Count a batch that ``next()`` is about to return."""
        self.batches += 1
        self.last_next_ns = time.perf_counter_ns()

    def note_made(self, began_ns: int) -> None:
        """Count a batch that ``next()`` has made itself, and the time that this took."""
        self.note_return()
        self.in_process_ns += self.last_next_ns - began_ns

    def note_size(self, batch_nbytes: int) -> None:
        """Note the size of a batch in its slot."""
        self.largest_batch_nbytes = max(self.largest_batch_nbytes, batch_nbytes)

    def warns_first(self, name: _Warned) -> bool:
        """Whether a warning is to be given now: once for each loader."""
        before = getattr(self, name)
        setattr(self, name, True)
        return not before

    def note_first_batch(self, made_ns: int) -> None:
        """Count the wait for an epoch's first batch, or one left out before; it took ``made_ns`` to make."""
        waited_ns = self.wait_for_workers_ns - self.waited_before_ns
        self.waited_before_ns = self.wait_for_workers_ns
        self.wait_for_first_batches_ns += waited_ns
        if self.workers_are_new:
            self.wait_for_starts_ns += max(0, waited_ns - made_ns)

    def of(self, kind: type[_Counts]) -> _Counts:
        """This loader's object of one owner's dataclass of counts."""
        counts: _Counts = self._owned.setdefault(kind, kind())
        return counts

    def figures(self) -> dict[str, Any]:
        """The fields of `LoaderStatistics` that are counted, all owners' together."""
        found: dict[str, Any] = {"iterating_ns": self.iterating_ns, **vars(self), **self.rare}
        for counts in list(self._owned.values()):  # another thread may be the first of an owner to count
            found |= vars(counts)
        for name in [name for name in found if name.endswith("_ns")]:
            found[name.removesuffix("_ns") + "_s"] = found[name] / 1e9
        return {one.name: found[one.name] for one in fields(LoaderStatistics) if one.name in found}

    @property
    def iterating_ns(self) -> int:
        """Nanoseconds from ``iter()`` to the last ``next()`` so far, summed over the epochs."""
        return self.earlier_ns + self.last_next_ns - self.began_ns
