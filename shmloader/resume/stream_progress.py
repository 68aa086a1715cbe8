"""Progress of one epoch of an iterable-style dataset: its division, and the samples that were returned."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from typing import Any, NamedTuple

from shmloader.distributed import check_equal_ends, rank_and_ranks
from shmloader.errors import ResumeError, warn
from shmloader.indices.samplers import attribute_of, ranks_share
from shmloader.indices.tracked_batches import HISTORY
from shmloader.resume.compatibility import State, is_of_one_rank
from shmloader.resume.progress import Progress
from shmloader.resume.user_states import pack_user_state, unpack_user_state
from shmloader.settings import Settings
from shmloader.wire.stream_records import NOTHING_DRAWN, OWN, SHARD, STRIDE, Cursor, StreamReport, StreamRules


class _Before(NamedTuple):
    """The part that a batch is of; and, before the batch, the place of that part and the latest part."""

    part: int
    cursor: Cursor
    last: int


class StreamProgress:
    """Progress of one epoch, part by part, from its beginning or from a state in mid-epoch on.

    The loader keeps it when the iterator dies. One thread may take batches while another asks for a state.
    ``rules`` say how the workers divide the stream, and where they begin. ``first_worker`` begins.
    """

    def __init__(self, settings: Settings, loaded: State | None = None) -> None:
        workers = max(settings.num_workers, 1)
        self._last = -1  # the part that the latest batch was of
        if loaded is None or not loaded["stream"]:
            self.rules = rules = _fresh_rules(settings)
        else:
            self.rules = rules = rules_for(settings, loaded)
            self._last = _read(loaded)["last"]
        if rules.layout == STRIDE and settings.on_error != "raise":
            raise ValueError(
                f"on_error={settings.on_error!r} is not possible if shard='auto' deals out the samples of a "
                "stream: ranks would have batches of different sizes. Give the dataset a method "
                "shard(num_shards, index), or leave on_error='raise'"
            )
        goes_round = rules.layout != STRIDE and len(rules.cursors) == workers
        self.first_worker = (self._last + 1) % workers if goes_round else 0
        self._dataset_name = type(settings.dataset).__name__
        self._ranks_share = ranks_share(settings) and settings.in_order
        self._out_of_order = not settings.in_order and workers > 1
        self._timeout_s = float(settings.timeout)
        self._cursors = list(rules.cursors) or [Cursor()] * workers  # by part
        self._playing = list(range(workers))  # the part that each worker is at
        # The latest batch, not counted yet: its number in the epoch, the worker, and what that reported.
        self._latest: tuple[int, int, StreamReport | None] | None = None
        # What the batches that were counted have changed, by their numbers. Of those below `_oldest`, states
        # of the dataset are a part's first one.
        self._before: dict[int, _Before] = {}
        self._begun = self._oldest = 0 if loaded is None else loaded["batches"]
        self._at_first = tuple(self._cursors), self._last
        self._first = {part: cursor for part, cursor in enumerate(self._cursors) if cursor.state}
        self._lock = threading.RLock()
        self._compared = False
        again = sum(cursor.drawn for cursor in rules.cursors if not cursor.state)
        if again:
            warn(
                f"to resume, {again:,} samples of the stream are drawn again and dropped, because "
                f"{self._dataset_name} and its iterator have no own state_dict() and load_state_dict()"
            )

    def take(
        self, progress: Progress, worker_id: int, report: StreamReport | None, *, returned: bool
    ) -> None:
        """Note that the program has the next batch, or has none in its place, with its report.

        An iterator that is interrupted sets the epoch's progress back to before the batch.
        """
        with self._lock:
            self._count(progress)
            self._latest = progress.taken, worker_id, report
            progress.take(progress.taken, returned=returned)

    def _count(self, progress: Progress) -> None:
        """Count the latest batch, unless it was taken back."""
        if self._latest is None or self._latest[0] >= progress.taken:
            return
        number, worker_id, report = self._latest
        part, cursor = self._last, Cursor()
        if report != NOTHING_DRAWN:
            if report is not None:
                self._playing[worker_id] = report.part
            part = 0 if self.rules.layout == STRIDE else self._playing[worker_id]
        before = _Before(part, self._cursors[part], self._last)
        if report == NOTHING_DRAWN:
            cursor = before.cursor
        elif report is None:
            cursor = before.cursor._replace(drawn=before.cursor.drawn + self.rules.of_a_batch)
        elif report.cursor.state:
            cursor = report.cursor
            self._first.setdefault(part, cursor)
        else:
            behind = report.cursor
            cursor = before.cursor._replace(drawn=behind.drawn, ended=behind.ended, raised=behind.raised)
        # Without a call between these, so that no interrupt comes there: it is counted once.
        self._before[number] = before
        self._last, self._cursors[part] = part, cursor
        self._latest = None
        self._forget(progress.oldest)

    def _forget(self, oldest: int) -> None:
        """Drop the dataset's states between a part's first one and those that a follower may ask for."""
        while self._oldest < oldest and self._oldest in self._before:
            entry = self._before[self._oldest]
            if entry.cursor.state:
                first = self._first[entry.part]
                cursor = entry.cursor._replace(
                    state=first.state, state_drawn=first.state_drawn, state_raised=first.state_raised
                )
                self._before[self._oldest] = entry._replace(cursor=cursor)
            self._before.pop(self._oldest - HISTORY, None)
            self._oldest += 1

    def state(self, progress: Progress, taken: int) -> State:
        """The keys of a state after so many batches, as text; `ResumeError` if they are not known."""
        with self._lock:
            self._count(progress)
            cursors, last = self._at(progress, taken)
        if not taken:
            return {"stream": ""}
        if self.rules.layout == STRIDE:
            cursors = cursors[:1]
            if self._out_of_order:
                raise ResumeError(
                    "there is no state with in_order=False if shard='auto' deals samples out to several "
                    "workers: the samples returned are not the beginning of the stream. Leave in_order=True"
                )
        parts = [(drawn, self._packed(own) if own else "", *others) for drawn, own, *others in cursors]
        stream = {"layout": self.rules.layout, "parts": parts, "last": last}
        stream |= {"rank": 0 if self._ranks_share else self.rules.rank, "ranks": self.rules.ranks}
        return {"stream": json.dumps(stream)}

    def _at(self, progress: Progress, taken: int) -> tuple[list[Cursor], int]:
        """The places of all parts after so many batches, and the part of the last one."""
        if taken == self._begun:
            return list(self._at_first[0]), self._at_first[1]
        cursors, last = self._cursors.copy(), self._last
        for number in range(progress.taken - 1, taken - 1, -1):
            if number not in self._before:
                raise ResumeError(
                    f"there is no state after {taken:,} of {progress.taken:,} batches of a stream any more: "
                    f"the last {HISTORY:,} are kept, and the one before the first batch"
                )
            part, cursors[part], last = self._before[number]
        return cursors, last

    def _packed(self, pickled: bytes) -> str:
        states, name = pickle.loads(pickled), self._dataset_name
        if "failed" in states:
            why = states["failed"]
            raise ResumeError(f"the state_dict() of {name} cannot be called or sent from a worker: {why}")
        return pack_user_state(states, name)

    def end_epoch(self, progress: Progress) -> None:
        """Compare the epoch's length with other ranks', which may differ: then it is a `LoaderError`."""
        if self.rules.layout == SHARD and not self._compared:
            self._compared = True
            check_equal_ends(progress.taken, self._timeout_s)


def _fresh_rules(settings: Settings) -> StreamRules:
    wanted = settings.snapshot_every_n_steps
    every = 1 if wanted is None else wanted or sys.maxsize
    rank, ranks = rank_and_ranks()
    layout = OWN
    if settings.shard is not None:
        layout = SHARD if _makes_shards(settings.dataset, ranks, max(settings.num_workers, 1)) else STRIDE
    return StreamRules(rank, ranks, settings.batch_size or 1, every, layout, layout)


def _makes_shards(dataset: Any, ranks: int, parts: int) -> bool:
    """Whether a dataset can make a shard for each of so many parts of each rank.

    One with a number of files, ``num_shards``, as Hugging Face's have, is not asked for more shards than
    files, nor, with several ranks, for shards of unequally many files.
    """
    if not callable(attribute_of(dataset, "shard")):
        return False
    files, shards = getattr(dataset, "num_shards", None), ranks * parts
    return not isinstance(files, int) or (files >= shards and (ranks == 1 or files % shards == 0))


def rules_for(settings: Settings, loaded: State) -> StreamRules:
    """The rules for workers to continue from a state in mid-epoch; `ResumeError` if this loader cannot."""
    rules, stream, workers = _fresh_rules(settings), _read(loaded), max(settings.num_workers, 1)
    layout, cursors, written = stream["layout"], stream["parts"], (stream["rank"], stream["ranks"])
    rank = rules.rank if is_of_one_rank(settings, loaded) else written[0]
    if (layout == OWN) != (rules.layout == OWN):
        with_shard = "with shard='auto', and this loader has no shard"
        without = (
            "with a stream that nothing divides, or the dataset itself: leave out shard='auto' to resume it"
        )
        raise ResumeError(f"the state was made {without if layout == OWN else with_shard}")
    if layout != STRIDE and written != (rank, rules.ranks):
        raise ResumeError(
            f"the state is that of rank {written[0]} of {written[1]}, and this is rank {rules.rank} of "
            f"{rules.ranks}: save and load it on each rank. The number of ranks may change only if "
            "shard='auto' deals samples out, or with a map-style dataset and a ShardedSampler"
        )
    if layout == SHARD and not _makes_shards(settings.dataset, rules.ranks, len(cursors)):
        raise ResumeError(
            f"the state was made with {len(cursors)} shard(s) of the dataset on each of {rules.ranks} "
            "rank(s), and it does not make so many now: resume with the same dataset"
        )
    if layout == OWN and len(cursors) != workers:
        raise ResumeError(
            f"the state was made with {len(cursors)} worker(s), and this loader has {workers}: each had a "
            "stream of its own, so only the same number of workers can resume. With shard='auto' the number "
            "may change"
        )
    return rules._replace(layout=layout, cursors=tuple(cursors))


def _read(loaded: State) -> dict[str, Any]:
    """The value of a state's key ``stream``, each part a `Cursor`."""
    stream: dict[str, Any] = json.loads(loaded["stream"])
    parts = [
        Cursor(drawn, pickle.dumps(unpack_user_state(state)) if state else b"", *others)
        for drawn, state, *others in stream["parts"]
    ]
    return stream | {"parts": parts}
