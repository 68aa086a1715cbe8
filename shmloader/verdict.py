"""The verdict: the one cause that holds a loader up, its evidence, and what to change. Arithmetic only.

Statistics and profiles both ask `judge`. What is not known, because the loader was not profiled, is None or 0
in the `Evidence`, and then no cause is named that would need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_LEAST_WAIT = 0.1  # share of the time; what takes less is not what holds the program up
_LEAST_BATCHES, _LEAST_S, _ENOUGH_S = 10, 0.2, 1.0
_HELD = 64  # batches; from here on they are copied to private memory
_SPILLED = 0.2  # of all batches
_THROTTLED = 0.2  # of the scheduler's periods
_FULL = 0.8  # of the usable cores: more workers would only share them
_DELAYED = 0.3  # of the workers' time
_FOREIGN = 0.3  # of the usable cores
_SLOWER = 2.0  # times as long as the other workers need
_SAMPLE = 0.3  # of the workers' time
_WRITING = 0.35  # of a worker's time for a batch
_BUSY = 0.75  # of the time: such workers have no more to give
_AS_QUICK = 20  # bytes are copied in the time in which one is pickled
_MOST_PER_CORE = 4  # workers that wait for a disk or a network


class Cause(StrEnum):
    """Causes that hold a loader up."""

    TOO_LITTLE = "too little seen"
    NO_WORKERS = "no workers"
    PROGRAM = "slow program"
    HELD = "held batches"
    SAMPLER = "slow sampler"
    NEXT = "slow next()"
    START = "start of the workers"
    FIRST_BATCH = "first batches"
    THROTTLED = "throttled cores"
    FOREIGN = "other programs"
    TOO_MANY = "too many workers"
    TOO_FEW = "too few workers"
    SLOW_WORKER = "one slow worker"
    SLOW_SAMPLE = "one slow sample"
    PICKLED = "pickled objects"
    COPIED = "large leaves copied"
    COLLATE = "slow collate"
    FETCH = "slow fetch"
    WORKERS = "slow workers"
    UNEVEN = "uneven batches"


@dataclass(frozen=True)
class Verdict:
    """One cause, with the figures that show it and the change that mends it."""

    cause: Cause
    text: str

    def __str__(self) -> str:
        return self.text


_Found = tuple[Cause, str]


@dataclass(frozen=True)
class Profiled:
    """Figures that only a profile has; seconds are sums over all batches, and over the workers.

    What workers made of an epoch that was begun early, before the profile, was not measured: take shares of
    `made_s`, and the time for which workers were busy from `Evidence`.
    """

    step_s: float  # of the program, between two calls of ``next()``
    sampler_s: float
    next_s: float  # of ``next()`` besides waiting and the sampler
    fetch_s: float  # this and the next two: of the workers
    collate_s: float
    write_s: float
    cpu_s: float  # processor time of the workers
    delay_s: float  # time in which workers were ready to run and had no core
    copied_nbytes: float = 0.0  # copied into slots, per batch
    header_nbytes: float = 0.0  # pickled, per batch
    slow_worker: tuple[int, float] | None = None  # slower than the others, and how many times
    slow_sample: str = ""  # the slowest sample, in words; empty if all are alike
    excess_s: float = 0.0  # what samples much slower than others of their batch took beyond these
    steps: int = 0  # of the program

    @property
    def made_s(self) -> float:
        """The time that workers took to make the batches that they have measured."""
        return self.fetch_s + self.collate_s + self.write_s

    @property
    def bound_batches_per_s(self) -> float:
        """Batches per second if loading took no time; 0 if unknown."""
        return self.steps / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class Evidence:
    """The figures that a verdict rests on; with names as in `LoaderStatistics`, some shorter."""

    batches: int
    total_s: float  # in the loop
    wait_s: float = 0.0  # this and the next two: ``next()`` waited; for first batches; until workers started
    first_s: float = 0.0
    start_s: float = 0.0
    in_process_s: float = 0.0
    num_workers: int = 0
    is_undivided: bool = False  # each worker has the whole stream, unless the dataset divides itself
    usable_cores: int = 0  # by this process, or this rank; 0 if unknown
    made_s: float = 0.0  # that all workers together took to make batches
    own_cores: float | None = None  # None if unknown
    foreign_cores: float = 0.0  # of the usable ones; 0 if unknown
    throttled_share: float = 0.0
    held: int = 0  # batches that the program holds
    slots: int = 0  # that there are
    spills: int = 0
    replays: bool = False  # one batch came again and again, so the loader took no time
    autotune: str = ""  # why ``num_workers="auto"`` chose as it did, or what it has measured so far
    is_settled: bool = True  # it has chosen
    profiled: Profiled | None = None

    @property
    def waited(self) -> str:
        """The time that ``next()`` waited, in words."""
        return f"next() waited {share_of(self.wait_s, self.total_s)}"

    @property
    def is_full(self) -> bool:
        """Whether there is no core for a further worker, whoever has them."""
        own_cores = self.own_cores
        return own_cores is not None and own_cores + self.foreign_cores >= _FULL * self.usable_cores > 0


def judge(evidence: Evidence) -> Verdict:
    """Name the one cause that holds a loader up. The first rule that applies decides."""
    for rule in _RULES:
        found = rule(evidence)
        if found is not None:
            return Verdict(*found)
    raise AssertionError("the last rule always applies")


def _too_little(e: Evidence) -> _Found | None:
    if not e.batches or not e.total_s:
        return Cause.TOO_LITTLE, "No batch has been returned yet."
    if e.total_s >= _LEAST_S and (e.batches >= _LEAST_BATCHES or e.total_s >= _ENOUGH_S):
        return None
    return Cause.TOO_LITTLE, (
        f"Too little was seen to say what the bottleneck is: {e.batches} batches in {time_of(e.total_s)}; "
        f"{e.waited}."
    )


def _replayed(e: Evidence) -> _Found | None:
    if not e.replays or e.profiled is None or not e.profiled.steps:
        return None
    return Cause.PROGRAM, (
        f"One batch was replayed, so loading took no time: no loader makes this program faster than "
        f"{e.profiled.bound_batches_per_s:,.1f} batches/s."
    )


def _no_workers(e: Evidence) -> _Found | None:
    if not e.in_process_s:
        return None
    made = f"next() made the batches itself, in {share_of(e.in_process_s, e.total_s)}"
    if e.in_process_s < _LEAST_WAIT * e.total_s:
        return Cause.PROGRAM, f"Your loop is the bottleneck: {made}; workers would save only that."
    number = "num_workers=1" if e.is_undivided else "num_workers=1 or more"
    return Cause.NO_WORKERS, f"There are no workers: {made}; {number} would save that."


def _main_process(e: Evidence) -> _Found | None:
    """The cause in the main process, if that is not waiting for workers."""
    p = e.profiled
    sampler_s, next_s = (0.0, 0.0) if p is None else (p.sampler_s, p.next_s)
    if e.held >= _HELD or (e.spills >= _SPILLED * e.batches and e.held > e.slots // 2):
        copied = f", and {e.spills:,} batches were copied to private memory" if e.spills else ""
        return Cause.HELD, (
            f"The program holds {e.held} batches{f' in {e.slots} slots' if e.slots else ''}{copied}: a slot "
            "is not used again until the last view of its batch is gone. Keep what you need of a batch as a "
            "copy (tensor.clone(), .item()), and del the rest."
        )
    most_s = max(e.wait_s, sampler_s, next_s)
    if most_s < _LEAST_WAIT * e.total_s:
        return Cause.PROGRAM, f"Your loop is the bottleneck: {e.waited}; more workers would not help."
    if p is None or most_s == e.wait_s:
        return None
    if most_s == sampler_s:
        return Cause.SAMPLER, (
            f"The sampler is the bottleneck: it took {share_of(sampler_s, e.total_s)}, in the main process. "
            "Make index batches ahead (one call of torch.randperm(...).tolist(), say), not one by one."
        )
    if p.header_nbytes * _AS_QUICK > p.copied_nbytes and p.header_nbytes > 1 << 14:
        return _pickled(p, f"next() took {share_of(next_s, e.total_s)} to read batches")
    return Cause.NEXT, (
        f"next() itself is the bottleneck: it took {share_of(next_s, e.total_s)} besides waiting. Batches "
        "are small for their number: a larger batch_size saves that."
    )


def _pickled(p: Profiled, evidence: str) -> _Found:
    return Cause.PICKLED, (
        f"Pickled objects are the bottleneck: {evidence}, of which {p.header_nbytes:,.0f} bytes each are "
        "Python objects. Return tensors or arrays (collate_fn) in place of lists of numbers and objects."
    )


def _starts(e: Evidence) -> _Found | None:
    work_s = e.wait_s - e.start_s
    if work_s < e.start_s:
        return Cause.START, (
            f"The start of the workers is the bottleneck: next() waited {share_of(e.start_s, e.total_s)} "
            "until they had started; without persistent_workers=True they start in each epoch."
        )
    if e.first_s - e.start_s > work_s / 2:
        later_s = e.total_s - e.first_s
        kept_up = later_s > e.first_s and e.wait_s - e.first_s < _LEAST_WAIT * later_s
        then = "; after them your loop is" if kept_up else ""
        return Cause.FIRST_BATCH, (
            f"The first batches of epochs are the bottleneck: {e.waited}, {time_of(e.first_s)} of it for "
            f"them{then}. Longer epochs would help, or quicker samples, and prefetch_epochs=True may."
        )
    return None


def _lack_of_cores(e: Evidence) -> _Found | None:
    p = e.profiled
    delayed = p is not None and p.delay_s >= _DELAYED * p.made_s > 0
    if e.throttled_share >= _THROTTLED:
        return Cause.THROTTLED, (
            f"The cgroup's processor quota is the bottleneck: it was used up in {e.throttled_share:.0%} of "
            f"the scheduler's periods; {e.waited}. Raise the quota (cpu.max; --cpus in Docker); until then "
            f"num_workers={min(e.num_workers, e.usable_cores) or 1} is enough."
        )
    if p is not None and delayed and e.foreign_cores >= _FOREIGN * e.usable_cores:
        # Would these workers keep up if they had had a core whenever they were ready?
        alone_s = max(p.cpu_s, p.made_s - p.delay_s) / p.made_s * e.made_s / e.num_workers
        if alone_s <= p.step_s + p.sampler_s + p.next_s:
            return Cause.FOREIGN, (
                f"Other programs are the bottleneck: they kept {e.foreign_cores:.1f} of {e.usable_cores} "
                f"cores busy, and workers had no core for {share_of(p.delay_s, p.made_s)} of their time. "
                "Stop them, or ask for cores of your own."
            )
    if e.num_workers > e.usable_cores > 0 and (delayed if p else e.is_full) and not e.autotune:
        why = f"; they had no core for {share_of(p.delay_s, p.made_s)} of their time" if p else ""
        return Cause.TOO_MANY, (
            f"The workers are the bottleneck: {e.waited}, and there are too many: {e.num_workers} of them "
            f"share {e.usable_cores} cores{why}. num_workers={e.usable_cores} loads as fast; beyond that "
            "only quicker samples help."
        )
    return None


def _one_slow(e: Evidence) -> _Found | None:
    p = e.profiled
    if p is not None and p.excess_s >= _SAMPLE * p.made_s > 0:
        return Cause.SLOW_SAMPLE, (
            f"One slow sample is the bottleneck: {p.slow_sample}, and such samples took "
            f"{share_of(p.excess_s, p.made_s)} of the workers' time; {e.waited}. Look at that sample; "
            'dispatch="dynamic" lets the other workers go on meanwhile.'
        )
    if p is not None and p.slow_worker is not None and p.slow_worker[1] >= _SLOWER:
        number, times = p.slow_worker
        return Cause.SLOW_WORKER, (
            f"One slow worker is the bottleneck: worker {number} takes {times:.1f} times as long for a batch "
            f"as the others; {e.waited}. See what it does otherwise (worker_init_fn, get_worker_info()); "
            'dispatch="dynamic" gives it fewer batches.'
        )
    return None


def _writing(e: Evidence) -> _Found | None:
    p = e.profiled
    if p is None or not p.made_s or p.write_s < _WRITING * p.made_s:
        return None
    wrote = f"workers took {share_of(p.write_s, p.made_s)} to write batches"
    if p.header_nbytes * _AS_QUICK > p.copied_nbytes:
        return _pickled(p, wrote)
    return Cause.COPIED, (
        f"Copies are the bottleneck: {wrote}, {p.copied_nbytes:,.0f} bytes each that were made elsewhere. "
        "Make them in the slot: shmloader.empty() in collate_fn, or default_collate."
    )


def _number_of_workers(e: Evidence) -> _Found | None:
    p, cores = e.profiled, e.usable_cores
    busy = e.made_s / (e.num_workers * e.total_s) if e.num_workers else 0.0
    waits = p is not None and 0 < p.cpu_s < (p.made_s - p.delay_s) / 2
    if e.autotune or (e.is_full and not waits) or (e.made_s and busy < _BUSY):
        return None
    most = _MOST_PER_CORE * cores if waits else cores
    if e.num_workers >= most:
        return None
    needed = e.num_workers + 1
    if p is not None:
        own_s = max(p.step_s + p.sampler_s + p.next_s, 1e-9)
        needed = min(most, max(needed, math.ceil(e.made_s / own_s)))
    why = (
        "they wait for a disk, a network or a lock most of the time" if waits else f"there are {cores} cores"
    )
    divided = (
        ', if the dataset divides itself among workers; shard="auto" does that' if e.is_undivided else ""
    )
    return Cause.TOO_FEW, (
        f"The workers are the bottleneck: {e.waited}, and there are too few: {e.num_workers} busy worker(s), "
        f"and {why}; num_workers={needed} would help{divided}."
    )


def _work(e: Evidence) -> _Found:
    p = e.profiled
    the = f"The workers are the bottleneck: {e.waited}"
    if e.autotune and not e.is_settled:
        return Cause.WORKERS, f"{the}; num_workers='auto' has {e.num_workers} so far ({e.autotune})."
    if e.autotune:
        chosen = f"num_workers='auto' chose {e.num_workers} ({e.autotune})"
        return Cause.WORKERS, f"{the}; {chosen}, so only quicker samples would help."
    busy = e.made_s / max(e.num_workers * e.total_s, 1e-9)
    if 0 < busy < _BUSY and e.num_workers > 1:
        return Cause.UNEVEN, (
            f"{the}, although workers were busy for only {busy:.0%} of the time: "
            'batches take different times. dispatch="dynamic" or a larger prefetch_factor evens that out.'
        )
    if p is None or not p.made_s:
        more = "" if e.usable_cores else "more workers or "
        how = "loader.profile()" if p is None else "A profile of more epochs"
        return (
            Cause.WORKERS,
            f"{the}; {more}quicker samples would help. {how} says what takes the workers' time.",
        )
    if p.collate_s > p.fetch_s:
        return Cause.COLLATE, (
            f"{the}, and collate_fn takes {share_of(p.collate_s, p.made_s)} of a worker's time; let it make "
            "fewer and larger calls, or leave it to default_collate."
        )
    return Cause.FETCH, (
        f"{the}, and fetching samples takes {share_of(p.fetch_s, p.made_s)} of a worker's time; quicker "
        "samples (dataset[i]) would help."
    )


_RULES: tuple[Callable[[Evidence], _Found | None], ...] = (
    _too_little,
    _replayed,
    _no_workers,
    _main_process,
    _starts,
    _lack_of_cores,
    _one_slow,
    _writing,
    _number_of_workers,
    _work,
)


def share_of(part_s: float, total_s: float) -> str:
    """A part of a time, in words: ``31.2 s of 40.0 s (78%)``."""
    return f"{time_of(part_s)} of {time_of(total_s)} ({part_s / max(total_s, 1e-9):.0%})"


def time_of(seconds: float) -> str:
    """A time with three digits or so and its unit."""
    if not seconds or seconds >= 0.9995:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
