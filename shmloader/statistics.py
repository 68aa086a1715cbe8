"""What a loader tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BadSample:
    """A sample that raised and that a loader went on without (``on_error="skip"`` or ``"replace"``).

    Attributes:
        index: Its index, as the sampler gave it. Of an iterable-style dataset: its position in its worker's
            stream, counted from 0 in every epoch.
        error: Name of the exception's type.
        message: The exception's text, cut at 500 characters.
        of_stream: Whether the dataset is iterable-style.
        worker_id: Whose stream it is; None for a map-style dataset and for ``num_workers=0``.
    """

    index: object
    error: str
    message: str
    of_stream: bool = False
    worker_id: int | None = None

    def __str__(self) -> str:
        whose = "the" if self.worker_id is None else f"worker {self.worker_id}'s"
        where = f"sample {self.index!r} of {whose} stream" if self.of_stream else f"dataset[{self.index!r}]"
        return f"{where}: {self.error}: {self.message}"


@dataclass(frozen=True)
class AutotuneReport:
    """What a loader with ``num_workers="auto"`` or ``prefetch_factor="auto"`` has chosen.

    Attributes:
        num_workers: Workers now: those that are at work or are being started.
        prefetch_factor: Batches made in advance per worker now.
        settled: Whether the choice is made: from then on it changes only if batches become so large that the
            memory budget asks for fewer.
        batches: Batches that were returned until it was made, or so far; at most 200.
        why: The reasons, with what was measured, for people.
    """

    num_workers: int
    prefetch_factor: int
    settled: bool
    batches: int
    why: str


@dataclass(frozen=True)
class LoaderStatistics:
    """A snapshot of one loader, from ``loader.statistics()``.

    Counters run from the loader's creation over all its epochs; slots and bytes are those of its live
    iterators at the moment of the call. With ``num_workers=0`` there are no slots and nobody waits.

    Attributes:
        slots_free: Slots that hold nothing.
        slots_granted: Slots that a worker is writing or is about to write.
        slots_published: Slots with a batch that ``next()`` has not returned yet.
        slots_leased: Slots with a batch that the program still holds, in whatever form.
        reserved_nbytes: Bytes of shared memory reserved for slots.
        used_nbytes: Bytes of the batches in published and leased slots.
        largest_batch_nbytes: Bytes of the largest batch so far, header included.
        batches: Batches returned.
        failures: Exceptions of workers that were raised in place of a batch.
        spills: Batches moved to private memory: larger than a slot may be, or kept by the program beyond
            the memory budget or the number of slots.
        spilled_nbytes: Their bytes.
        detached: Batches whose memory a worker went on viewing (a ``collate_fn`` that keeps its results,
            say), which costs the worker a private copy.
        pin_copies: Batches copied into pinned memory.
        bad_samples: Samples that raised and were left out or replaced (``on_error``), in batches that were
            returned, left out, or raised something else.
        bad_sample_list: The first 1,000 of them, in the order of their batches.
        batches_left_out: Batches that had no good sample.
        batches_one_by_one: Batches whose samples were fetched one by one because ``__getitems__`` raised.
        oldest_leases: With ``SHMLOADER_DEBUG=1``, the batches that the program has held for longest: number,
            slot, seconds, and the type, shape and dtype of their leaves.
        worker_restarts: Workers that died or did not answer and were replaced.
        tasks_ahead: Tasks that were sent beyond ``prefetch_factor * num_workers`` outstanding ones, because a
            slow batch held the other workers up (``dispatch="dynamic"``).
        epochs_prefetched: Epochs that began with batches that were made early (``prefetch_epochs``).
        epochs_in_vain: Epochs for which batches had been made early and were made anew.
        wait_for_workers_s: Seconds that ``next()`` waited for a batch.
        workers_wait_for_slots_s: Seconds that workers, summed, waited for a slot to work on: large where
            the program is the slower side.
        autotune: What was chosen with ``num_workers="auto"`` or ``prefetch_factor="auto"``; else None.
    """

    slots_free: int = 0
    slots_granted: int = 0
    slots_published: int = 0
    slots_leased: int = 0
    reserved_nbytes: int = 0
    used_nbytes: int = 0
    largest_batch_nbytes: int = 0
    batches: int = 0
    failures: int = 0
    spills: int = 0
    spilled_nbytes: int = 0
    detached: int = 0
    pin_copies: int = 0
    bad_samples: int = 0
    bad_sample_list: tuple[BadSample, ...] = ()
    batches_left_out: int = 0
    batches_one_by_one: int = 0
    oldest_leases: tuple[str, ...] = ()
    worker_restarts: int = 0
    tasks_ahead: int = 0
    epochs_prefetched: int = 0
    epochs_in_vain: int = 0
    wait_for_workers_s: float = 0.0
    workers_wait_for_slots_s: float = 0.0
    autotune: AutotuneReport | None = None


@dataclass
class Counters:
    """The counters of one loader, shared by its iterators; main process only. See `LoaderStatistics`."""

    batches: int = 0
    failures: int = 0
    spills: int = 0
    spilled_nbytes: int = 0
    detached: int = 0
    pin_copies: int = 0
    bad_samples: int = 0
    bad_sample_list: list[BadSample] = field(default_factory=list)
    batches_left_out: int = 0
    batches_one_by_one: int = 0
    worker_restarts: int = 0
    tasks_ahead: int = 0
    epochs_prefetched: int = 0
    epochs_in_vain: int = 0
    largest_batch_nbytes: int = 0
    wait_for_workers_ns: int = 0
    workers_wait_for_slots_ns: int = 0
    warned_of_spills: bool = False
    warned_of_bad_samples: bool = False
    left_out_in_a_row: int = 0
    left_out_after: int = 0  # `batches` when that row began
