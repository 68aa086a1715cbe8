"""The states of one loader: making them, loading them, and beginning epochs with them."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shmloader.errors import ResumeError, warn_once
from shmloader.indices.compact_states import CompactStates, digest_of, generator_at
from shmloader.indices.samplers import (
    GENERATOR_IS_LOADED,
    GeneratorStates,
    draw_seed,
    draws_one_seed,
    generator_of,
    generator_states,
    has_place,
    mixture_sampler,
    sampler_with_epoch,
    sampler_with_state,
    sharded_sampler,
)
from shmloader.indices.tracked_batches import state_of
from shmloader.resume.compatibility import (
    ADDED_BY_OTHERS,
    AT_THE_BEGINNING,
    State,
    check_fit,
    checksum_of,
    described,
    listed,
    signed,
    with_batches,
)
from shmloader.resume.passes import Pass
from shmloader.resume.progress import Progress
from shmloader.resume.stream_progress import rules_for
from shmloader.resume.user_states import pack_user_state
from shmloader.settings import Settings


class States:
    """One loader's states. Main process only.

    Attributes:
        begun: Whether the loader has begun an epoch.
    """

    def __init__(self) -> None:
        self.begun = False
        self._asked = False  # by the program; before, its own samplers' states are read once an epoch
        self._set_epoch: int | None = None
        self._pass: Pass | None = None  # while iter() runs: another thread may want a state
        self._progress: Progress | None = None
        self._settings: Any = None  # of the same epoch
        self._constant: State | None = None  # the part of a state that stays the same in this epoch
        self._counted: Progress | None = None  # the epoch, if nothing but `done` changes in its states
        self._checksum = 0  # of the constant part
        # Epochs of iterators that live on, with `done` when the next one began.
        self._older: weakref.WeakKeyDictionary[Progress, Any] = weakref.WeakKeyDictionary()
        self._of_sampler, self._of_loader = CompactStates(), CompactStates()

    @property
    def set_epoch(self) -> int | None:
        """The argument of the last ``loader.set_epoch()``, or None."""
        return self._set_epoch

    def note_set_epoch(self, epoch: int) -> None:
        """Note a call of ``loader.set_epoch()``."""
        self._set_epoch = epoch

    # --- making a state

    def counted(self) -> State | None:
        """The state now, if nothing but a number has changed since the last one: takes a microsecond."""
        progress = self._counted
        if progress is None or progress.finished or type(done := progress.done) is not int:
            return None
        state: State = self._constant.copy()  # type: ignore[union-attr]
        state["batches"], state["checksum"] = done, with_batches(self._checksum, done)
        return state

    def state(self, read: Callable[[], Settings], loaded: State | None) -> State:
        """The state of a loader, now. Takes microseconds; longer at the first call in an epoch.

        Args:
            read: Reads the loader's settings as they are now; in an epoch those of its beginning count.
            loaded: The state that was loaded, or None.

        Raises:
            ResumeError: If two iterators are in use at once, or a sampler's own state cannot be saved.
        """
        progress = self._progress
        if not self._asked and not (now := read()).is_iterable and has_place(now.dataset):
            name = type(now.dataset).__qualname__
            warn_once(f"a loader's state leaves out the state_dict() of its map-style dataset, {name}")
        self._asked = True
        if loaded is not None:
            return loaded.copy()
        if progress is None or progress.finished:
            return self._between_epochs(read(), progress)
        if any(older.done != done for older, done in self._older.items()):
            raise ResumeError(
                "two iterators over this loader are in use at once: the older one has given batches since "
                "the newer one began, and a state would hold for one of them only. Make a loader for each."
            )
        settings = self._settings
        state = (self._constant or self._constant_of(settings, progress)).copy()
        state["batches"], state["batches_behind"] = progress.taken, listed(progress.behind)
        stream = progress.stream
        others: State = _sampler_keys(settings, progress) if stream is None else stream.state(progress)
        if not others and self._constant is not None and not self._older:
            self._counted, self._checksum = progress, checksum_of(state)
        return signed(state | others)

    def _constant_of(self, settings: Settings, progress: Progress) -> State:
        """The part of a state that stays the same in an epoch."""
        before = progress.before
        if before is None or progress.stream is not None:
            # Without workers, the order is drawn with the first batch.
            generators = self._own_generators(settings, before)
        else:
            if isinstance(before.sampler, torch.Tensor) and draws_one_seed(settings.index_sampler):
                seed = draw_seed(generator_at(before.sampler))
                before = before._replace(sampler=torch.Generator().manual_seed(seed).get_state())
            generators = self._compact(before)
        constant = self._described(settings, progress, generators) | {
            "set_epoch": progress.set_epoch,
            "sampler_epoch": progress.sampler_epoch,
            "in_order": progress.in_order and settings.comes_in_order,
            "global_generator": digest_of(progress.global_before),
        }
        if before is not None:
            self._constant = constant
        return constant

    def _between_epochs(self, settings: Settings, progress: Progress | None) -> State:
        """The state before the first epoch, or after one: generators are as the next epoch needs them."""
        early = None if progress is None else progress.before_next
        before = early or (None if self._pass is None else self._pass.before)
        state = self._described(settings, progress, self._own_generators(settings, before))
        if (mixed := mixture_sampler(settings.index_sampler)) is not None:
            state["sampler_state"] = json.dumps(mixed.state_after(0, 1))
        stateful = sampler_with_state(settings.index_sampler)
        if progress is not None:
            state["batches"], state["finished"] = progress.taken, True
            if stateful is not None:
                state |= _sampler_keys(settings, progress)
        elif stateful is not None:
            state["sampler_state"] = pack_user_state(state_of(stateful), type(stateful).__name__)
        return signed(state)

    def seeds_of(self, epoch: int, loaded: State | None) -> tuple[int, int] | None:
        """The base seed of an epoch, and its number in its iterator; None if they are not known.

        They are known of the epoch in progress, or of a state that was loaded. With persistent workers they
        are known of others, too.
        """
        progress = self._progress
        if loaded is None and progress is not None:
            persistent, number = bool(self._settings.persistent_workers), progress.iterator_epoch
            base_seed, of_sampler, told = progress.base_seed, progress.sampler_epoch, progress.set_epoch
        elif loaded is not None and loaded["base_seed"] is not None:
            persistent, number = loaded["persistent_workers"], loaded["iterator_epoch"]
            base_seed, of_sampler, told = loaded["base_seed"], loaded["sampler_epoch"], loaded["set_epoch"]
        else:
            return None
        known = told if of_sampler is None else of_sampler
        if known is None or (loaded is not None and loaded["finished"]):
            return None
        number += epoch - known
        return (base_seed, number) if epoch == known or (persistent and number >= 0) else None

    def state_after_epoch(self, read: Callable[[], Settings], loaded: State | None, epoch: int) -> State:
        """The state for a program that leaves the epoch here, and sets ``epoch`` before the next one."""
        progress = self._progress
        if loaded is not None or progress is None or not progress.taken:
            return self.state(read, loaded)
        state = self._between_epochs(read(), progress)
        return signed(
            state | {name: epoch for name in ("set_epoch", "sampler_epoch") if state[name] is not None}
        )

    def _described(self, settings: Settings, progress: Progress | None, generators: tuple[str, str]) -> State:
        return described(settings) | {
            "set_epoch": self._set_epoch,
            "sampler_epoch": getattr(sampler_with_epoch(settings.index_sampler), "epoch", None),
            "base_seed": None if progress is None else progress.base_seed,
            "iterator_epoch": 0 if progress is None else progress.iterator_epoch,
            "persistent_workers": bool(settings.persistent_workers),
            "in_order": settings.comes_in_order,
            "sampler_generator": generators[0],
            "loader_generator": generators[1],
            **AT_THE_BEGINNING,
        }

    def _own_generators(self, settings: Settings, states: GeneratorStates | None) -> tuple[str, str]:
        """Compact states of the sampler's and the loader's generators, without torch's global one."""
        if states is None:
            states = generator_states(settings.index_sampler, settings.generator)
        if generator_of(settings.index_sampler) is torch.default_generator:
            states = states._replace(sampler=None)
        return self._compact(states)

    def _compact(self, states: GeneratorStates) -> tuple[str, str]:
        return self._of_sampler.of(states.sampler), self._of_loader.of(states.loader)

    # --- continuing from one

    def load(self, settings: Settings, state: Mapping[str, Any], set_epoch: Callable[[int], None]) -> State:
        """Check a state, and call ``set_epoch`` with its number; returns what the next pass begins with.

        Raises:
            ResumeError: If it does not fit the loader.
        """
        check_fit(state, settings)
        if state["stream"]:
            rules_for(settings, dict(state))  # raises where it does not fit
        self._counted = None
        if state["set_epoch"] is not None:
            set_epoch(state["set_epoch"])
        sampler = sampler_with_epoch(settings.index_sampler)
        if sampler is not None and state["sampler_epoch"] is not None:
            sampler.set_epoch(state["sampler_epoch"])
        return {name: value for name, value in state.items() if name not in ADDED_BY_OTHERS}

    @contextlib.contextmanager
    def begin(self, settings: Settings, loaded: State | None = None) -> Iterator[Pass]:
        """Make the `Pass` of an epoch, for an iterator; once that has begun it, states are of this epoch.

        Afterwards torch's global generator is as in a program that was never interrupted.
        """
        self._asked |= loaded is not None or settings.snapshot_every_n_steps is not None
        looks = 0 if self.begun else 2
        self._pass = one_pass = Pass(settings, loaded, self._set_epoch, lambda: self._asked, looks)
        GENERATOR_IS_LOADED.set(False)
        try:
            yield one_pass
        finally:
            self._pass = None
            if one_pass.progress is not None:
                self._go_on(settings, one_pass.progress)
            if not (one_pass.keeps_draws or GENERATOR_IS_LOADED.get()):
                torch.set_rng_state(one_pass.global_before)

    def _go_on(self, settings: Settings, progress: Progress) -> None:
        if self._progress is not None and not self._progress.finished:
            self._older[self._progress] = self._progress.done
        self._settings, self._progress, self.begun = settings, progress, True
        self._constant = self._counted = None


def _sampler_keys(settings: Settings, progress: Progress) -> State:
    """The keys of a state about a sampler that is not torch's, after the batches that were taken."""
    index_sampler, taken, tracked = settings.index_sampler, progress.taken, progress.tracked
    sharded, stateful = sharded_sampler(index_sampler), sampler_with_state(index_sampler)
    if sharded is not None:
        state: Any = sharded.state_after(taken, getattr(index_sampler, "batch_size", 1))
        return {"sampler_state": json.dumps(state)}
    if tracked is None:
        return {}
    if stateful is None:
        return {"sampler_checksum": tracked.checksum(taken)}
    begin, own, checksum = tracked.own_state(taken)
    text = pack_user_state(own, type(stateful).__name__)
    return {"sampler_state": text, "sampler_batches": begin, "sampler_checksum": checksum}
