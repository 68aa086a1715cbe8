"""Progress of one epoch of an iterable-style dataset: how it is divided, and what was returned of it.

Main process only.
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from typing import Any

from shmloader.diagnostics.stack_level import level_of_the_program
from shmloader.errors import ResumeError
from shmloader.ranks import check_equal_ends, rank_and_ranks
from shmloader.resume import Progress
from shmloader.resume.user_states import pack_user_state, unpack_user_state
from shmloader.worker.streams import OWN, STRIDE, Place, StreamReport, StreamRules

_MOST_NOTES = 100

_log = logging.getLogger("shmloader")
_told: set[str] = set()  # classes of datasets that divide themselves


class StreamProgress:
    """Progress of one epoch, part by part. The loader keeps it when the iterator dies.

    Args:
        loader: The loader.
        place: To go on from: the text that `state` has returned; empty for a fresh epoch.

    Attributes:
        rules: How the workers are to divide the stream, and where they begin.
        first_worker: The worker whose turn it is first.
    """

    def __init__(self, loader: Any, place: str = "") -> None:
        self.rules = rules = rules_for(loader, place)
        workers = max(int(loader.num_workers), 1)
        loaded = json.loads(place) if place else {"batches": 0, "last": -1}
        self._batches, self._last = loaded["batches"], loaded["last"]  # the latter is a part
        goes_round = rules.layout != STRIDE and len(rules.places) == workers
        self.first_worker = (self._last + 1) % workers if goes_round else 0
        self._dataset_name = type(loader.dataset).__name__
        self._out_of_order = not loader.in_order and workers > 1
        self._timeout_s = float(loader.timeout)
        self._layout = rules.layout or OWN
        self._places = list(rules.places) or [Place()] * workers  # by part
        self._playing = list(range(workers))  # the part that each worker is at
        self._notes: dict[
            int, tuple[int, StreamReport | None]
        ] = {}  # by number in the epoch, of the latest ones
        self._compared = False
        again = sum(place.drawn for place in rules.places if not place.state)
        if again:
            warnings.warn(
                f"to go on, {again:,} samples of the stream are drawn once more and dropped, because "
                f"{self._dataset_name} and its iterator have no state_dict() and load_state_dict()",
                RuntimeWarning,
                stacklevel=level_of_the_program(),
            )

    def take(self, progress: Progress, worker_id: int, report: StreamReport | None) -> None:
        """Note that the program has the next batch, or what came in its place.

        Args:
            progress: The epoch's. An iterator that is interrupted sets it back to before the batch.
            worker_id: The worker that made it.
            report: What came with it.
        """
        taken = progress.taken
        self._notes[taken] = worker_id, report
        if len(self._notes) > _MOST_NOTES:
            self._count(progress)
        progress.place = taken + 1

    def _count(self, progress: Progress) -> None:
        for number in [number for number in self._notes if number < progress.taken]:
            worker_id, report = self._notes.pop(number)
            self._batches += 1
            if report is not None:
                self._layout, self._playing[worker_id] = report.layout, report.part
                if self.rules.shard and report.layout == OWN:
                    self._tell_of_own_division()
            stride = self._layout == STRIDE
            part = 0 if stride else self._playing[worker_id]
            self._last = part
            place = self._places[part]
            if report is None:
                samples = self.rules.batch_size * (self.rules.ranks if stride else 1)
                place = place._replace(drawn=place.drawn + samples)
            elif report.place.state:
                place = report.place
            else:
                place = place._replace(drawn=report.place.drawn, ended=report.place.ended)
            self._places[part] = place

    def _tell_of_own_division(self) -> None:
        if self._dataset_name in _told:
            return
        _told.add(self._dataset_name)
        _log.warning(
            "%s reads get_worker_info().num_workers, and so divides its stream itself: shard='auto' leaves "
            "that to it",
            self._dataset_name,
        )

    def state(self, progress: Progress) -> dict[str, Any]:
        """The keys of a state that tell the place in the stream; as text, empty at its beginning.

        Raises:
            ResumeError: If it is not known, or a state of the dataset cannot be saved.
        """
        self._count(progress)
        if not self._batches:
            return {"batches": 0, "stream": ""}
        places = self._places
        if self._layout == STRIDE:
            places = places[:1]
            if self._out_of_order:
                raise ResumeError(
                    "there is no state with in_order=False where shard='auto' deals samples out to several "
                    "workers: what was returned is no beginning of the stream. Leave in_order=True"
                )
        parts = [
            (
                drawn,
                pack_user_state(pickle.loads(state), self._dataset_name) if state else "",
                state_drawn,
                ended,
            )
            for drawn, state, state_drawn, ended in places
        ]
        rules = self.rules
        named = {"layout": self._layout, "parts": parts, "last": self._last, "batches": self._batches}
        named |= {"rank": rules.rank, "ranks": rules.ranks}
        return {"batches": self._batches, "stream": json.dumps(named)}

    def end_epoch(self, progress: Progress) -> None:
        """Compare the epoch's length with that of other ranks, where ranks may have others.

        Raises:
            LoaderError: If it differs.
        """
        if not self.rules.shard or self._compared:
            return
        self._compared = True
        self._count(progress)
        if self._layout != STRIDE:
            check_equal_ends(self._batches, self._timeout_s)


def rules_for(loader: Any, place: str) -> StreamRules:
    """The rules for a loader's workers.

    Args:
        loader: The loader.
        place: To go on from, as for `StreamProgress`.

    Raises:
        ResumeError: If the state cannot be resumed by this loader on this rank.
    """
    rank, ranks = rank_and_ranks()
    every = loader.snapshot_every_n_steps
    rules = StreamRules(loader.shard is not None, rank, ranks, loader.batch_size or 1, every)
    if not place:
        return rules
    loaded = json.loads(place)
    layout, parts, workers = loaded["layout"], loaded["parts"], max(int(loader.num_workers), 1)
    if layout != OWN and loader.shard is None:
        raise ResumeError("the state was made with shard='auto', and this loader has no shard")
    if layout != STRIDE and (loaded["rank"], loaded["ranks"]) != (rank, ranks):
        raise ResumeError(
            f"the state is that of rank {loaded['rank']} of {loaded['ranks']}, and this is rank {rank} of "
            f"{ranks}: save and load it on each rank. The number of ranks may change only where shard='auto' "
            "deals samples out, or with a map-style dataset and a ShardedSampler"
        )
    if layout == OWN and len(parts) != workers:
        raise ResumeError(
            f"the state was made with {len(parts)} worker(s), and this loader has {workers}: each had a "
            "stream of its own, which only as many workers can go on with. With shard='auto' the number may "
            "change"
        )
    places = [
        Place(drawn, pickle.dumps(unpack_user_state(state)) if state else b"", state_drawn, ended)
        for drawn, state, state_drawn, ended in parts
    ]
    return rules._replace(layout=layout, places=tuple(places))
