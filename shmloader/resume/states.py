"""The states of one loader: making them, loading them, and beginning epochs with them."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shmloader.errors import ResumeError, warn_once
from shmloader.indices import samplers
from shmloader.indices.compact_states import CompactStates, digest_of, generator_at
from shmloader.indices.tracked_batches import state_of
from shmloader.resume import compatibility
from shmloader.resume.compatibility import OF_EPOCH_BEFORE, State, with_batches
from shmloader.resume.passes import Pass
from shmloader.resume.progress import Done, Progress
from shmloader.resume.readers import Epoch, Readers
from shmloader.resume.stream_progress import rules_for
from shmloader.resume.user_states import pack_user_state, unpack_user_state
from shmloader.settings import Settings

_MOST_SEEDS = 1000  # epochs whose seeds are known


class _LastState(NamedTuple):
    """The parts of the state that was made last which the next one may have too."""

    epoch: Epoch
    constant: State  # stays the same in the epoch
    checksum: int | None  # of the state, if nothing but the count of batches changes in it


class States:
    """One loader's states. Main process only.

    A state is of the epoch that the loader is in. If something reads ahead in another thread, it may be in a
    later one than the program: then a state is of the epoch that a follower reads.
    """

    def __init__(self) -> None:
        self.begun = False  # whether the loader has begun an epoch
        self._asked = False  # by the program; before, its own samplers' states are read once an epoch
        self.last_set_epoch: int | None = None  # the argument of the last ``loader.set_epoch()``
        self._pass: Pass | None = None  # while iter() runs: another thread may want a state
        self.readers = Readers()
        self._last: _LastState | None = None
        # Epochs of iterators that live on, with `done` when the latest one began.
        self._older: weakref.WeakKeyDictionary[Progress, Any] = weakref.WeakKeyDictionary()
        self._of_sampler, self._of_loader = CompactStates(), CompactStates()
        # Of epochs that were begun, by the program's numbers: base seed, and number in the iterator.
        self._seeds: dict[int, tuple[int, int]] = {}

    def note_set_epoch(self, epoch: int) -> None:
        """Note a call of ``loader.set_epoch()``."""
        self.last_set_epoch = epoch
        if self.readers.latest is not None:
            self.readers.latest.progress.note_set_epoch(epoch)

    # --- making a state

    def state(self, read: Callable[[], Settings], loaded: State | None, taken: int | None = None) -> State:
        """The state of a loader. Takes a microsecond if only the count of batches has changed since the last.

        In an epoch the settings of its beginning count, else those that ``read`` gives. ``taken`` is for the
        place after so many of the batches returned since ``iter()``. Raises `ResumeError` if there is none.
        """
        epoch = self.readers.shown
        goes_on = epoch is not None and not (taken is None and epoch.progress.is_over)
        if loaded is None and goes_on and (counted := self._counted(epoch, taken)) is not None:
            return counted
        if not self._asked and not (now := read()).is_iterable and samplers.has_place(now.dataset):
            name = type(now.dataset).__qualname__
            warn_once(f"a loader's state leaves out the state_dict() of its map-style dataset, {name}")
        self._asked = True
        if taken and (loaded is not None or epoch is None):
            raise ResumeError(f"there is no state after {taken:,} batches: iter() was not called yet")
        if loaded is not None:
            return loaded.copy()
        if epoch is None:
            return self._between_epochs(read(), None)
        older = [one for one, done in self._older.items() if one.done != done]
        if older and (goes_on or not all(one.finished for one in older)):
            raise ResumeError(
                "two iterators over this loader are in use at once: the older one has given batches since "
                "the newer one began, and a state would hold for one of them only. Make a loader for each."
            )
        if not goes_on:
            return self._between_epochs(read() if epoch.next is None else epoch.settings, epoch)
        return self._within(epoch, epoch.progress.done_after(taken))

    def _counted(self, epoch: Epoch | None, taken: int | None) -> State | None:
        """The state in an epoch, if nothing but the count of batches has changed since the last one."""
        made = self._last  # which another thread may set
        if made is None or made.epoch is not epoch or made.checksum is None:
            return None
        done, *behind = made.epoch.progress.done_after(taken)
        if behind:
            return None
        return made.constant | {"batches": done, "checksum": with_batches(made.checksum, done)}

    def _within(self, epoch: Epoch, done: Done) -> State:
        """The state in an epoch, when so much of it was done."""
        progress, made = epoch.progress, self._last
        is_begun = progress.before is not None  # now: another thread may draw the first batch
        constant = made.constant if made is not None and made.epoch is epoch else self._constant_of(epoch)
        state = constant.copy()
        batches, *behind = done
        state["batches"], state["batches_behind"] = batches, compatibility.listed(behind)
        stream = progress.stream
        others: State = _sampler_keys(epoch, batches) if stream is None else stream.state(progress, batches)
        if is_begun and epoch.next is None:  # one that is kept would keep all later ones
            is_counted = not (others or behind or self._older)
            self._last = _LastState(epoch, constant, compatibility.checksum_of(state) if is_counted else None)
        return compatibility.signed(state | others)

    def _constant_of(self, epoch: Epoch) -> State:
        """The part of a state that stays the same in an epoch."""
        settings, progress = epoch.settings, epoch.progress
        before = progress.before
        if before is None or progress.stream is not None:
            # Without workers, the order is drawn with the first batch.
            generators = self._own_generators(settings, before)
        else:
            if isinstance(before.sampler, torch.Tensor) and samplers.draws_one_seed(settings.index_sampler):
                seed = samplers.draw_seed(generator_at(before.sampler))
                before = before._replace(sampler=torch.Generator().manual_seed(seed).get_state())
            generators = self._compact(before)
        return self._described(settings, progress, generators) | {
            "set_epoch": progress.set_epoch,
            "sampler_epoch": progress.sampler_epoch,
            "in_order": progress.in_order and settings.comes_in_order,
            "global_generator": digest_of(progress.global_before),
        }

    def _between_epochs(self, settings: Settings, epoch: Epoch | None) -> State:
        """The state before the first epoch, or after one: generators are as the next epoch needs them."""
        progress = None if epoch is None else epoch.progress
        early = None if progress is None else progress.before_next
        before = early or (None if self._pass is None else self._pass.before)
        state = self._described(settings, progress, self._own_generators(settings, before))
        if (mixed := samplers.mixture_sampler(settings.index_sampler)) is not None:
            state["sampler_state"] = json.dumps(mixed.state_after(0, 1))
        stateful = samplers.sampler_with_state(settings.index_sampler)
        if epoch is not None:
            taken = epoch.progress.taken
            state["batches"], state["finished"] = taken, True
            if stateful is not None:
                state |= _sampler_keys(epoch, taken)
        elif stateful is not None:
            state["sampler_state"] = pack_user_state(state_of(stateful), type(stateful).__name__)
        return compatibility.signed(state)

    def seeds_of(self, epoch: int, loaded: State | None) -> tuple[int, int] | None:
        """The base seed of an epoch, and its number in its iterator; None if they are not known.

        They are known of epochs that were begun here, or of a state that was loaded. With persistent workers
        they are known of others, too, as long as the program's numbers go up by 1.
        """
        if loaded is not None:
            if loaded["base_seed"] is None or loaded["finished"]:
                return None
            persistent, seeds = loaded["persistent_workers"], (loaded["base_seed"], loaded["iterator_epoch"])
            known = loaded["set_epoch"] if loaded["sampler_epoch"] is None else loaded["sampler_epoch"]
            begun = {} if known is None else {known: seeds}
        else:
            latest, begun = self.readers.latest, self._seeds
            persistent = latest is not None and bool(latest.settings.persistent_workers)
        if epoch in begun or not (begun and persistent):
            return begun.get(epoch)
        known, (base_seed, number) = next(reversed(begun.items()))
        for other, (base, its_number) in begun.items():
            if base == base_seed and known - other != number - its_number:
                return None
        number += epoch - known
        return (base_seed, number) if number >= 0 else None

    def begin_of(self, loaded: State | None) -> tuple[int | None, Mapping[str, Any] | None]:
        """The sampler's epoch in progress, or of a loaded state, and the sampler's state at its beginning.

        The latter for samplers that divide a global order; None for an epoch's first batch.
        """
        if loaded is not None:
            text = loaded["sampler_state"]
            return loaded["sampler_epoch"], unpack_user_state(text) if text else None
        if self.readers.latest is None:
            return None, None
        progress = self.readers.latest.progress
        return progress.sampler_epoch, progress.sampler_begin

    def state_after_epoch(self, read: Callable[[], Settings], loaded: State | None, epoch: int) -> State:
        """The state for a program that leaves the epoch here, and sets ``epoch`` before the next one."""
        latest = self.readers.latest
        if loaded is not None or latest is None or not latest.progress.taken:
            return self.state(read, loaded)
        state = self._between_epochs(read(), latest)
        return compatibility.signed(
            state | {name: epoch for name in ("set_epoch", "sampler_epoch") if state[name] is not None}
        )

    def _described(self, settings: Settings, progress: Progress | None, generators: tuple[str, str]) -> State:
        return compatibility.described(settings) | {
            "set_epoch": self.last_set_epoch,
            "sampler_epoch": samplers.epoch_of(settings.index_sampler),
            "base_seed": None if progress is None else progress.base_seed,
            "iterator_epoch": 0 if progress is None else progress.iterator_epoch,
            "persistent_workers": bool(settings.persistent_workers),
            "in_order": settings.comes_in_order,
            "sampler_generator": generators[0],
            "loader_generator": generators[1],
            **compatibility.AT_THE_BEGINNING,
        }

    def _own_generators(self, settings: Settings, states: samplers.GeneratorStates | None) -> tuple[str, str]:
        """Compact states of the sampler's and the loader's generators, without torch's global one."""
        if states is None:
            states = samplers.generator_states(settings.index_sampler, settings.generator)
        if samplers.generator_of(settings.index_sampler) is torch.default_generator:
            states = states._replace(sampler=None)
        return self._compact(states)

    def _compact(self, states: samplers.GeneratorStates) -> tuple[str, str]:
        return self._of_sampler.of(states.sampler), self._of_loader.of(states.loader)

    # --- continuing from one

    def load(self, settings: Settings, state: Mapping[str, Any], set_epoch: Callable[[int], None]) -> State:
        """Check a state, and call ``set_epoch`` with its number; what the next pass begins with."""
        compatibility.check_fit(state, settings)
        if state["stream"]:
            rules_for(settings, dict(state))  # raises where it does not fit
        self.readers.forget()
        if state["set_epoch"] is not None:
            set_epoch(state["set_epoch"])
        sampler = samplers.sampler_with_epoch(settings.index_sampler)
        if sampler is not None and state["sampler_epoch"] is not None:
            sampler.set_epoch(state["sampler_epoch"])
        if (mixed := samplers.mixture_sampler(settings.index_sampler)) is not None:
            mixed.go_back(unpack_user_state(state["sampler_state"])["consumed"])  # its weights may change now
        return {name: value for name, value in state.items() if name not in compatibility.ADDED_BY_OTHERS}

    @contextlib.contextmanager
    def begin(self, settings: Settings, loaded: State | None = None) -> Iterator[Pass]:
        """Make the `Pass` of an epoch, for an iterator; once that has begun it, states are of this epoch.

        Afterwards torch's global generator is as in a program that was never interrupted.
        """
        self._asked |= loaded is not None or settings.snapshot_every_n_steps is not None
        looks = 0 if self.begun else 2
        self._pass = one_pass = Pass(settings, loaded, self.last_set_epoch, lambda: self._asked, looks)
        samplers.GENERATOR_IS_LOADED.set(False)
        try:
            yield one_pass
        finally:
            if one_pass.progress is not None:
                self._go_on(one_pass, one_pass.progress)
            self._pass = None  # only now: a state in another thread needs the generators before the pass
            if not (one_pass.keeps_draws or samplers.GENERATOR_IS_LOADED.get()):
                torch.set_rng_state(one_pass.global_before)

    def _go_on(self, one_pass: Pass, progress: Progress) -> None:
        if self.readers.latest is not None:
            before = self.readers.latest.progress
            before.note_next(one_pass.before)
            progress.follow_on(before)
            older = [one for one in (*self._older, before) if not one.finished]
            self._older = weakref.WeakKeyDictionary({one: one.done for one in older})
        self.readers.go_on(Epoch(one_pass.settings, progress))
        self._last = None  # whether the epoch before was over is looked at again
        self.begun = True
        known = progress.set_epoch if progress.sampler_epoch is None else progress.sampler_epoch
        if known is not None:
            self._seeds.pop(known, None)
            self._seeds[known] = progress.base_seed, progress.iterator_epoch
            if len(self._seeds) > _MOST_SEEDS:
                del self._seeds[next(iter(self._seeds))]


def _sampler_keys(epoch: Epoch, taken: int) -> State:
    """The keys of a state about a sampler that is not torch's, after so many batches."""
    index_sampler, progress = epoch.settings.index_sampler, epoch.progress
    tracked = progress.tracked
    sharded, stateful = samplers.sharded_sampler(index_sampler), samplers.sampler_with_state(index_sampler)
    if sharded is not None:
        # The sampler itself may have begun the next epoch, early even (`prefetch_epochs`).
        begun = progress.sampler_begin
        state: Any = sharded.state_after(taken, getattr(index_sampler, "batch_size", 1), begun)
        return {"sampler_state": json.dumps(state)}
    if tracked is None:
        return {}
    if stateful is None:
        return {"sampler_checksum": tracked.checksum(taken)}
    begin, own, checksum = tracked.own_state(taken)
    text = pack_user_state(own, type(stateful).__name__)
    if not begin and progress.follows_left:  # this state of the sampler's is of the epoch that was left
        begin = OF_EPOCH_BEFORE
    return {"sampler_state": text, "sampler_batches": begin, "sampler_checksum": checksum}
