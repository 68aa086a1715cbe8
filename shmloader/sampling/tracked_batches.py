"""Index batches of samplers that are not torch's, with what is needed to come to the same place again."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shmloader.diagnostics.exceptions import forget_frames
from shmloader.errors import ResumeError
from shmloader.sampling.packed_indices import PackedInts, pack_index_batch, with_packed_ints
from shmloader.sampling.samplers import is_torchs, sampler_of_indices, sampler_with_state, sharded_sampler

ADVICE = (
    "A sampler must draw the same order again: from a torch.Generator of its own, as its attribute "
    "`generator`, or from a seed and set_epoch(); or give it state_dict() and load_state_dict()."
)

_PLAIN = {int, float, bool, str, bytes, type(None)}
_LOOKS = 64  # first batches that are looked at: a sampler may draw for some dozens of them at once

_log = logging.getLogger("shmloader")


def track(index_sampler: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """The same iterator, or `TrackedBatches` of it where a number of batches does not tell how to go on."""
    known = isinstance(iterator, TrackedBatches) or is_torchs(index_sampler) or sharded_sampler(index_sampler)
    return iterator if known else TrackedBatches(index_sampler, iterator)


class TrackedBatches(Iterator[Any]):
    """Index batches of one epoch, from batch ``begin`` on.

    Where the sampler's own state there was loaded, it is to be given: some samplers tell it only when
    iterated over.

    Attributes:
        taken: Tells how many of them the program has had; what belongs to earlier ones is forgotten.
        resumed: Whether to raise where the sampler is seen to draw from a global generator among the program.
    """

    def __init__(
        self, index_sampler: Any, iterator: Iterator[Any], begin: int = 0, state: Any = None
    ) -> None:
        self.taken: Callable[[], int] = lambda: begin
        self.resumed = False
        self._name = type(sampler_of_indices(index_sampler)).__name__
        self._iterator = iterator
        self._stateful = stateful = sampler_with_state(index_sampler)
        self._oldest = self._drawn = begin
        self._length = 0  # as the sampler tells it, if it does
        if stateful is not None:
            with contextlib.suppress(Exception):  # torch need not ask for it
                self._length = len(index_sampler)
        self._checksum = 0
        self._told = False
        self._warning = ""  # why a state is of no use, until it is said
        # After each number of batches: the sampler's state, the error in its place, or their checksum.
        if state is None:
            state = 0 if stateful is None else _state_or_error(stateful)
        self._after: dict[int, Any] = {begin: state}

    def __next__(self) -> Any:
        stateful, drawn = self._stateful, self._drawn
        # Not at all of its batches, since it takes as long as a small sampler does.
        looks = stateful is None and drawn and (drawn < _LOOKS or not drawn & (drawn - 1))
        states = _global_states() if looks else None
        try:
            index_batch = next(self._iterator)
        except StopIteration:
            self._length = 0  # it was another
            raise
        if states is not None and states != _global_states():
            self._warning = (
                f"the sampler ({self._name}) draws from a global generator (torch's, NumPy's, random's) "
                "batch by batch, among what the program draws, so it cannot come to the same place again. "
                f"{ADVICE}"
            )
            if self.resumed:
                raise ResumeError(self._warning)
        self._drawn += 1
        if stateful is None:
            index_batch = with_packed_ints(index_batch)  # they are needed packed anyway
            self._after[self._drawn] = self._checksum = _add(self._checksum, index_batch)
        else:
            self._after[self._drawn] = _state_or_error(stateful)
        while self._oldest < min(self.taken(), self._drawn) - 1:
            self._after.pop(self._oldest, None)
            self._oldest += 1
        return index_batch

    def own_state(self, taken: int) -> tuple[int, Any]:
        """The sampler's own state where the program has had ``taken`` batches, and how many are before it.

        It is the one before the last of them if that may be the epoch's last: the state behind it need not
        tell that, since with it the sampler may have begun anew. Else it is the one behind: what the sampler
        has drawn for a batch, from a global generator, say, need not be in the state before.

        Raises:
            ResumeError: If the sampler could not tell it.
        """
        begin = taken if taken < max(self._drawn, self._length) else max(taken - 1, 0)
        if begin not in self._after:  # it was gone on from behind this batch, so there was another
            begin = taken
        state = self._after[begin]
        if isinstance(state, ResumeError):
            raise ResumeError(*state.args) from state.__cause__  # a new one: it gets a traceback
        return begin, state

    def checksum(self, taken: int) -> int:
        """The checksum of so many batches.

        Logs a warning, once, where the sampler is seen not to give the same batches again. That is an error
        only when the state is resumed from: a program that saves states in vain is not to be stopped by it.
        """
        if self._warning and not self._told:
            self._told = True
            _log.warning("a state in mid-epoch cannot be resumed from: %s", self._warning)
        checksum: int = self._after[taken]
        return checksum


def state_of(sampler: Any) -> Any:
    """A copy of a sampler's own state.

    Raises:
        ResumeError: If it cannot be had.
    """
    try:
        return copy_state(sampler.state_dict())
    except Exception as error:
        name = type(sampler).__name__
        raise ResumeError(f"the state_dict() of {name} cannot be called or copied: {error!r:.500}") from error


def pass_over_end(index_sampler: Any, make_state: Callable[[], Any]) -> None:
    """Have a sampler that was set to its own state from an epoch's end begin the next epoch.

    There some samplers have begun anew already, and others give nothing once. A sampler may keep the state
    that it is given, and change it: so ``make_state`` is to make a new one at each call.
    """
    if list(itertools.islice(iter(index_sampler), 1)):
        sampler_with_state(index_sampler).load_state_dict(make_state())


def _state_or_error(sampler: Any) -> Any:
    """A sampler's state, or the error to raise if it is asked for: a program may never want it."""
    try:
        return state_of(sampler)
    except ResumeError as error:
        forget_frames(error)  # they hold the iterator, whose workers are to end with it
        return error


def copy_state(state: Any) -> Any:
    """A copy of what a ``state_dict()`` has returned."""
    if type(state) is dict:
        return {name: copy_state(value) for name, value in state.items()}
    if type(state) is list and _PLAIN.issuperset(map(type, state)):
        return state.copy()  # in a sixth of the time: an order of all indices may be in it
    return copy.deepcopy(state)


def _global_states() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002 - the program's
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), *rest


def _add(checksum: int, index_batch: Any) -> int:
    if type(index_batch) is PackedInts:
        return zlib.crc32(index_batch.to_bytes(), checksum)
    try:
        payload = pack_index_batch(index_batch)
    except Exception:  # noqa: BLE001 - without workers, indices may be anything
        payload = repr(index_batch).encode()
    return zlib.crc32(payload, checksum)
