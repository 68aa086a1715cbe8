"""Index batches of samplers that are not torch's, with the states or checksums that resuming needs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import pickle
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shmloader.errors import ResumeError
from shmloader.failures.exceptions import forget_frames
from shmloader.indices import samplers
from shmloader.indices.packed_indices import pack_index_batch, with_packed_ints

ADVICE = (
    "A sampler must draw the same order again: from a torch.Generator of its own, as its attribute "
    "`generator`, or from a seed and set_epoch(); or give it state_dict() and load_state_dict(), and call "
    "loader.state_dict() before the first epoch: then its state is read with each batch."
)

HISTORY = 1024
"""Batches that were returned and whose checksums are kept, for a state after fewer batches than all."""

_PLAIN = {int, float, bool, str, bytes, type(None)}
_LOOKS = 64  # first batches of a resumed epoch that are checked: a sampler may draw for some dozens at once
_SURE = 3  # looks that show a draw, after which it is none of another thread's
_MOST_UNSURE = 8  # looks in a row that tell nothing, after which no more are made
_PAUSE_S = 0.02  # in which another thread that draws all the time does so

_log = logging.getLogger("shmloader")


def track(
    index_sampler: Any, iterator: Iterator[Any], *, resumed: bool = False, threads: bool = False
) -> Iterator[Any]:
    """The same iterator, or `TrackedBatches` of it if the number of batches alone is not enough to resume."""
    known = isinstance(iterator, TrackedBatches) or samplers.repeats_its_order(index_sampler)
    if known or samplers.sharded_sampler(index_sampler) is not None:
        return iterator
    return TrackedBatches(index_sampler, iterator, resumed=resumed, threads=threads)


class TrackedBatches(Iterator[Any]):
    """Index batches of one epoch, from batch ``begin`` on, where the sampler's own ``state`` was loaded.

    In a ``resumed`` epoch it is an error if the sampler draws from a global generator batch by batch. Where
    another thread may draw in step with it, it is a warning: a worker, if those are ``threads``, or the main
    thread, if batches are taken in this one.
    """

    def __init__(
        self,
        index_sampler: Any,
        iterator: Iterator[Any],
        begin: int = 0,
        state: Any = None,
        *,
        resumed: bool = False,
        threads: bool = False,
    ) -> None:
        self.follow(lambda: begin)
        self._resumed, self._threads, self._told = resumed, threads, False
        self._draws = self._unsure = 0  # looks that have shown a draw; in a row, of another thread perhaps
        self._name = type(samplers.sampler_of_indices(index_sampler)).__name__
        self._iterator = iterator
        self._stateful = stateful = samplers.sampler_with_state(index_sampler)
        self._begin = self._oldest = self._drawn = begin
        self._length, self._ended = 0, False  # the sampler's own length, if it has one
        if stateful is not None:
            with contextlib.suppress(Exception):  # torch need not ask for it
                self._length = len(index_sampler)
        self._warning = ""  # why a state cannot be resumed from, or ""
        if state is None and stateful is not None:
            state = _state_or_error(stateful)
        self._first, self._checksum = (begin, state), 0  # the checksum is of the batches since
        # After each number of batches: when the sampler's state was read, it or its error; the checksum.
        self._after: dict[int, tuple[int, Any, int]] = {begin: (begin, state, 0)}

    def follow(
        self, taken: Callable[[], int], reads_each: Callable[[], bool] = lambda: False, looks: int = 0
    ) -> None:
        """Follow the program, which has had ``taken()`` batches; of earlier ones only checksums are kept.

        The sampler's state is read after each batch if ``reads_each()``, else before and after the first one:
        with that, some samplers draw a seed. In an epoch that is not resumed the first ``looks`` batches are
        checked, of which `checksum` then warns.
        """
        self._taken, self._reads_each, self._looks = taken, reads_each, looks

    def __next__(self) -> Any:
        stateful, drawn = self._stateful, self._drawn
        # Not for each batch, since the check takes longer than a small one.
        looks = drawn < _LOOKS or not drawn & (drawn - 1) if self._resumed else drawn <= self._looks
        states = _global_states() if looks and drawn and stateful is None else None
        try:
            index_batch = next(self._iterator)
        except StopIteration:
            self._length, self._ended = 0, True  # it was another
            raise
        if states is not None and states != (now := _global_states()):
            self._note_draw(states, now)
        self._drawn = drawn = drawn + 1
        index_batch = with_packed_ints(index_batch)  # they are needed packed anyway
        self._checksum = _add(self._checksum, index_batch)
        latest = self._first
        if stateful is not None and (drawn == 1 or self._reads_each()):
            latest = drawn, _state_or_error(stateful, self._after[drawn - 1][1])
            if drawn == 1:
                self._first, self._checksum = latest, 0
        self._after[drawn] = *latest, self._checksum
        while self._oldest < min(self._taken(), self._drawn) - 1:
            self._forget(self._oldest)
            self._oldest += 1
        return index_batch

    def _note_draw(self, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
        """Note that a global generator was drawn from while the sampler gave a batch."""
        in_step = self._threads or threading.current_thread() is not threading.main_thread()
        if threading.active_count() > 1 and not in_step:
            time.sleep(_PAUSE_S)
            later = _global_states()
            # Of a generator from which another thread draws all the time, nothing can be told.
            if all(old == new or new != last for old, new, last in zip(before, now, later, strict=True)):
                self._unsure += 1
                if self._unsure >= _MOST_UNSURE:
                    self._tell_of_draws(" or another thread", resumed=self._resumed)
                    self._resumed, self._looks = False, 0
                return
        self._unsure, self._draws = 0, self._draws + 1
        self._tell_of_draws(" or another thread" if in_step else "", resumed=self._resumed and in_step)
        if self._resumed and not in_step and self._draws >= (1 if threading.active_count() == 1 else _SURE):
            raise ResumeError(self._warning)

    def _tell_of_draws(self, other: str, *, resumed: bool) -> None:
        """Keep a warning for the next state; log it now if batches of a ``resumed`` epoch may be others."""
        self._warning = (
            f"the sampler ({self._name}){other} draws from a global generator (torch's, NumPy's, random's) "
            "batch by batch, among what the program draws. A sampler that does cannot come to the same place "
            f"again. {ADVICE}"
        )
        if resumed and not self._told:
            self._told = True
            _log.warning("the batches of a resumed epoch may be others: %s", self._warning)

    def _forget(self, drawn: int) -> None:
        """Keep only the checksum of batches: a state after them is the first one, and a count."""
        if drawn > self._begin:  # that before the first batch stays
            self._after[drawn] = *self._first, self._checksum_at(drawn) or 0
        if drawn - HISTORY > self._begin:
            self._after.pop(drawn - HISTORY, None)

    @property
    def is_left(self) -> bool:
        """Whether the sampler is in the middle of its epoch: it has given some batches, and not its last."""
        return bool(self._drawn) and not self._ended and self._drawn != self._length

    def own_state(self, taken: int) -> tuple[int, Any, int | None]:
        """The sampler's own state for a program that has had ``taken`` batches, and the batches before it.

        Also a checksum, if more than one of them is to be drawn again.

        Normally that is the state after the last of them: a state before it may lack what the sampler draws
        for the batch, from a global generator, say. If the batch may be the epoch's last, it is the state
        before it: with the one after it the sampler may have begun anew. If later batches came early to an
        earlier program and are not drawn again yet, it is the state after the last that is drawn.
        """
        wanted = taken if taken < max(self._drawn, self._length) else max(taken - 1, 0)
        if wanted not in self._after:  # the epoch was resumed after this batch, so there was another
            wanted = min(taken, self._drawn)
        begin, state, _ = self._after.get(wanted) or (*self._first, None)
        if isinstance(state, ResumeError):
            raise ResumeError(*state.args) from state.__cause__  # a new one: it gets a traceback
        return begin, state, self._checksum_at(taken) if begin < wanted else None

    def checksum(self, taken: int) -> int | None:
        """The checksum of the first ``taken`` batches, or of those after the sampler's own state.

        None if some of them are not drawn again yet, since an earlier program had them out of order.

        Logs a warning, once, if the sampler cannot give the same batches again; resuming is the error.
        """
        if self._warning and not self._told:
            self._told = True
            _log.warning("a state in mid-epoch cannot be resumed from: %s", self._warning)
        return self._checksum_at(taken)

    def _checksum_at(self, taken: int) -> int | None:
        return self._after[taken][2] if taken in self._after else None


def state_of(sampler: Any, before: Any = None) -> Any:
    """A copy of a sampler's state, which shares what has not changed with ``before``; or a `ResumeError`."""
    try:
        return _copy(sampler.state_dict(), before)
    except Exception as error:
        name = type(sampler).__name__
        raise ResumeError(f"the state_dict() of {name} cannot be called or copied: {error!r:.500}") from error


def pass_over_end(index_sampler: Any, make_state: Callable[[], Any]) -> None:
    """Have a sampler that was set to its own state from an epoch's end begin the next epoch.

    There some samplers have begun anew already, and others give nothing once. A sampler may change the state
    that it is given: so ``make_state`` makes a new one. What it draws from torch's global generator meanwhile
    is not drawn.
    """
    before = torch.get_rng_state()
    if list(itertools.islice(iter(index_sampler), 1)):
        samplers.sampler_with_state(index_sampler).load_state_dict(make_state())
        torch.set_rng_state(before)


def _state_or_error(sampler: Any, before: Any = None) -> Any:
    """A sampler's state, or the error to raise if it is asked for: a program may never want it."""
    try:
        return state_of(sampler, before)
    except ResumeError as error:
        forget_frames(error)  # they hold the iterator, whose workers are to end with it
        return error


def _copy(state: Any, before: Any) -> Any:
    """A copy of what a ``state_dict()`` has returned; tensors are compared with those of the copy before."""
    if type(state) is dict:
        before = before if type(before) is dict else {}
        return {name: _copy(value, before.get(name)) for name, value in state.items()}
    if type(state) is torch.Tensor and _same(state, before):
        return before
    if type(state) is list and _PLAIN.issuperset(map(type, state)):
        return state.copy()  # in a sixth of the time: an order of all indices may be in it
    return copy.deepcopy(state)


def _same(tensor: torch.Tensor, before: Any) -> bool:
    """Whether a tensor is, byte for byte, one that was copied before: in less time than a copy takes."""
    if type(before) is not torch.Tensor or tensor.requires_grad or tensor.is_complex() or not tensor.dim():
        return False
    plain = tensor.layout is torch.strided and tensor.is_contiguous()
    alike = (tensor.dtype, tensor.shape, tensor.device) == (before.dtype, before.shape, before.device)
    return plain and alike and torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


def _global_states() -> tuple[Any, ...]:
    of_numpy = pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002 - the program's, of any kind
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy


def _add(checksum: int, index_batch: Any) -> int:
    try:
        payload = pack_index_batch(index_batch)
    except Exception:  # noqa: BLE001 - without workers, indices may be anything
        payload = repr(index_batch).encode()
    return zlib.crc32(payload, checksum)
