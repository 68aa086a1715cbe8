"""The states of one loader: making them, loading them, and continuing from them."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shmloader.errors import ResumeError, warn, warn_once
from shmloader.indices.compact_states import CompactStates, digest_of, generator_at
from shmloader.indices.samplers import (
    GENERATOR_IS_LOADED,
    GeneratorStates,
    draw_seed,
    draws_one_seed,
    generator_of,
    generator_states,
    has_place,
    index_sampler_of,
    sampler_with_epoch,
    sampler_with_state,
    sharded_sampler,
)
from shmloader.indices.tracked_batches import TrackedBatches, state_of, track
from shmloader.resume.compatibility import (
    ADDED_BY_OTHERS,
    AT_THE_BEGINNING,
    State,
    behind,
    check_fit,
    described,
    is_between_epochs,
)
from shmloader.resume.progress import Progress
from shmloader.resume.replay import batches_by_own_state, batches_from, set_generator
from shmloader.resume.stream_progress import rules_for
from shmloader.resume.user_states import pack_user_state

_LOADED = "_shmloader_loaded_state"
"""The attribute for a loaded state, from which the loader will continue. A copy of the loader has it, too."""

_waiting: weakref.WeakSet[Any] = weakref.WeakSet()
"""Loaders that were given a state."""


def loaded_state(loader: Any) -> State | None:
    """The state that the next ``iter(loader)`` continues from, or None."""
    state: State | None = vars(loader).get(_LOADED)
    return state


class States:
    """One loader's states. Main process only.

    Attributes:
        set_epoch: The argument of the last ``loader.set_epoch()``, or None.
        begun: Whether the loader has begun an epoch.
        asked: Whether the program wants states. If not, those of its own samplers are read once an epoch.
    """

    def __init__(self) -> None:
        self.set_epoch: int | None = None
        self.begun = self.asked = False
        self._progress: Progress | None = None
        self._counted: Progress | None = None  # the same, if nothing but `done` changes in its states
        # Epochs of iterators that live on, with `done` when the next one began.
        self._older: weakref.WeakKeyDictionary[Progress, Any] = weakref.WeakKeyDictionary()
        self._of_sampler, self._of_loader = CompactStates(), CompactStates()
        self._global_before = torch.empty(
            0, device="cpu"
        )  # state of torch's global generator before the last iter()
        self._repeats_iter = True  # whether the program itself would make the draws of the last iter()
        self._before_iter: GeneratorStates | None = None  # while iter() runs: another thread may want a state

    # --- making a state

    def state(self, loader: Any) -> State:
        """The state of a loader, now. Takes microseconds; longer at the first call in an epoch.

        Raises:
            ResumeError: If two iterators are in use at once, or a sampler's own state cannot be saved.
        """
        counted = self._counted
        if counted is not None and type(done := counted.done) is int and not counted.finished:
            state: State = counted.constant.copy()  # type: ignore[union-attr]
            state["batches"] = done
            return state
        return self._state_now(loader)

    def _state_now(self, loader: Any) -> State:
        loaded, progress = loaded_state(loader), self._progress
        if not self.asked and not isinstance(loader.dataset, IterableDataset) and has_place(loader.dataset):
            name = type(loader.dataset).__qualname__
            warn_once(f"a loader's state leaves out the state_dict() of its map-style dataset, {name}")
        self.asked = True
        if loaded is not None:
            return loaded.copy()
        if progress is None or progress.finished:
            return self._between_epochs(loader, progress)
        if self._older and any(older.done != done for older, done in self._older.items()):
            raise ResumeError(
                "two iterators over this loader are in use at once: the older one has given batches since "
                "the newer one began, and a state would hold for one of them only. Make a loader for each."
            )
        state = (progress.constant or self._constant(loader, progress)).copy()
        state["batches"], state["batches_behind"] = progress.taken, ",".join(map(str, progress.behind))
        stream = progress.stream
        others: State = _sampler_keys(loader, progress) if stream is None else stream.state(progress)
        if not others and progress.constant is not None and not self._older:
            self._counted = progress
        state |= others
        return state

    def _constant(self, loader: Any, progress: Progress) -> State:
        """The part of a state that stays the same in an epoch."""
        index_sampler, before = index_sampler_of(loader), progress.before
        if before is None or progress.stream is not None:
            # Without workers, the order is drawn with the first batch.
            generators = self._own_generators(loader, before)
        else:
            if isinstance(before.sampler, torch.Tensor) and draws_one_seed(index_sampler):
                seed = draw_seed(generator_at(before.sampler))
                before = before._replace(sampler=torch.Generator().manual_seed(seed).get_state())
            generators = self._compact(before)
        constant = self._state(loader, progress, generators)
        constant["set_epoch"], constant["sampler_epoch"] = progress.set_epoch, progress.sampler_epoch
        constant["in_order"] = progress.in_order and _in_order(loader)
        constant["global_generator"] = digest_of(progress.global_before)
        if before is not None:
            progress.constant = constant
        return constant

    def _between_epochs(self, loader: Any, progress: Progress | None) -> State:
        """The state before the first epoch, or after one: generators are as the next epoch needs them."""
        early = None if progress is None else progress.before_next
        state = self._state(loader, progress, self._own_generators(loader, early or self._before_iter))
        stateful = sampler_with_state(index_sampler_of(loader))
        if progress is not None:
            state["batches"], state["finished"] = progress.taken, True
            if stateful is not None:
                state |= _sampler_keys(loader, progress)
        elif stateful is not None:
            state["sampler_state"] = pack_user_state(state_of(stateful), type(stateful).__name__)
        return state

    def state_after_epoch(self, loader: Any, epoch: int) -> State:
        """The state for a program that leaves the epoch here, and sets ``epoch`` before the next one."""
        progress = self._progress
        if loaded_state(loader) is not None or progress is None or not progress.taken:
            return self.state(loader)
        state = self._between_epochs(loader, progress)
        return state | {name: epoch for name in ("set_epoch", "sampler_epoch") if state[name] is not None}

    def _state(self, loader: Any, progress: Progress | None, generators: tuple[str, str]) -> State:
        return described(loader) | {
            "set_epoch": self.set_epoch,
            "sampler_epoch": getattr(sampler_with_epoch(index_sampler_of(loader)), "epoch", None),
            "base_seed": None if progress is None else progress.base_seed,
            "iterator_epoch": 0 if progress is None else progress.iterator_epoch,
            "persistent_workers": bool(loader.persistent_workers),
            "in_order": _in_order(loader),
            "sampler_generator": generators[0],
            "loader_generator": generators[1],
            **AT_THE_BEGINNING,
        }

    def _own_generators(self, loader: Any, states: GeneratorStates | None) -> tuple[str, str]:
        """Compact states of the sampler's and the loader's generators, without torch's global one."""
        if states is None:
            states = generator_states(index_sampler_of(loader), loader.generator)
        if generator_of(index_sampler_of(loader)) is torch.default_generator:
            states = states._replace(sampler=None)
        return self._compact(states)

    def _compact(self, states: GeneratorStates) -> tuple[str, str]:
        return self._of_sampler.of(states.sampler), self._of_loader.of(states.loader)

    # --- continuing from one

    def load(self, loader: Any, state: Mapping[str, Any], set_epoch: Callable[[int], None]) -> None:
        """Check a state and keep it for the next iterator; ``set_epoch`` is called with its number.

        Raises:
            ResumeError: If it does not fit the loader.
        """
        check_fit(state, loader)
        self._counted = None
        if state["stream"]:
            rules_for(loader, dict(state))  # raises where it does not fit
        vars(loader)[_LOADED] = {name: value for name, value in state.items() if name not in ADDED_BY_OTHERS}
        _waiting.add(loader)
        if state["set_epoch"] is not None:
            set_epoch(state["set_epoch"])
        sampler = sampler_with_epoch(index_sampler_of(loader))
        if sampler is not None and state["sampler_epoch"] is not None:
            sampler.set_epoch(state["sampler_epoch"])

    def iterate(self, loader: Any, make_iterator: Callable[[], Any]) -> Any:
        """Make an iterator; torch's global generator is then as in a program that was never interrupted.

        That program made no iterator in mid-epoch, so for a state of mid-epoch the new iterator's draws are
        undone. They are kept if the generator is in the state that it had when the epoch began, as then this
        ``iter()`` repeats the epoch's own, and if the dataset's or sampler's own state sets it.
        """
        self._global_before = before = torch.get_rng_state()
        loaded, draws = loaded_state(loader), True
        self._repeats_iter = True
        if loaded is not None and not is_between_epochs(loaded):
            self._repeats_iter = digest_of(before) == loaded["global_generator"]
            is_map_style = not isinstance(loader.dataset, IterableDataset)
            draws_order = is_map_style and not loaded["batches"] and not loaded["sampler_generator"]
            draws = self._repeats_iter or draws_order
        else:
            if loaded is not None:
                _set_generators(loader, loaded)
            elif self._progress is None:
                _warn_of_another(loader)
            self._before_iter = generator_states(index_sampler_of(loader), loader.generator)
        GENERATOR_IS_LOADED.set(False)
        try:
            return make_iterator()
        finally:
            self._before_iter = None
            if not draws and not GENERATOR_IS_LOADED.get():
                torch.set_rng_state(before)

    def seeds(self, loader: Any, base_seed: int) -> tuple[int, int]:
        """The base seed for a new iterator, and the number of its epochs before this one."""
        loaded = loaded_state(loader)
        if loaded is None or loaded["base_seed"] is None:
            return base_seed, 0
        epoch: int = loaded["iterator_epoch"]
        if loaded["finished"]:
            if not (loaded["persistent_workers"] and loader.persistent_workers):
                return base_seed, 0
            epoch += 1
        if epoch or not self._repeats_iter:  # the program that wrote the state drew no base seed here
            torch.set_rng_state(self._global_before)
            _set_generators(loader, loaded)
        return loaded["base_seed"], epoch

    def begin_epoch(
        self, loader: Any, sampler_iter: Iterator[Any], before: GeneratorStates | None, seeds: tuple[int, int]
    ) -> tuple[Iterator[Any], Progress]:
        """Begin an epoch, or continue that of the loaded state: returns its index batches and its progress.

        Args:
            loader: The loader.
            sampler_iter: Iterates over the index batches, from the epoch's beginning.
            before: States of the generators before it draws; None if it draws only with the first batch.
            seeds: The iterator's base seed, and the number of its epochs before this one.

        Raises:
            ResumeError: If the state cannot be resumed from.
        """
        index_sampler = index_sampler_of(loader)
        sampler_epoch = getattr(sampler_with_epoch(index_sampler), "epoch", None)
        loaded, batches = loaded_state(loader), sampler_iter
        every = getattr(loader, "snapshot_every_n_steps", None)  # missing after uninstall()
        self.asked |= loaded is not None or every is not None
        goes_on = None if loaded is None or is_between_epochs(loaded) else loaded
        global_before = self._global_before if goes_on is None else goes_on["global_generator"]
        progress = Progress(*seeds, sampler_epoch, global_before, before, set_epoch=self.set_epoch)
        if isinstance(loader.dataset, IterableDataset):
            if goes_on is not None:
                progress.done = goes_on["batches"]
                set_generator(loader.generator, goes_on, "loader_generator")
            progress.before = generator_states(index_sampler, loader.generator)  # all of the epoch is drawn
            # A stream's index batches are None, or lists of it; True in its place asks for its state.
            batches = (
                batch if not self.asked else True if batch is None else [True] * len(batch)
                for batch in sampler_iter
            )
        elif goes_on is not None:
            batches = self._go_on(loader, goes_on, progress)
        elif loaded is not None and sampler_with_state(index_sampler) is not None:
            unchanged = described(loader).items() <= loaded.items()
            batches = batches_by_own_state(index_sampler, loaded, loader.generator, unchanged=unchanged)
        else:
            batches = track(index_sampler, sampler_iter)
        if isinstance(batches, TrackedBatches):
            progress.tracked = batches
            batches.taken = lambda: progress.taken
            batches.reads_each, batches.looks = lambda: self.asked, 0 if self.begun else 2
        if goes_on is not None and goes_on["sampler_generator"] and not goes_on["batches"]:
            # The order is drawn with the first batch: now, while the generator is where it was.
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
        if self._progress is not None and not self._progress.finished:
            self._older[self._progress] = self._progress.done
        self._progress, self._counted, self.begun = progress, None, True
        vars(loader).pop(_LOADED, None)
        return batches, progress

    def _go_on(self, loader: Any, loaded: State, progress: Progress) -> Iterator[Any]:
        """The index batches and the progress from the place of a state in mid-epoch."""
        index_sampler = index_sampler_of(loader)
        if progress.sampler_epoch != loaded["sampler_epoch"]:
            raise ResumeError(
                f"the state was taken in mid-epoch, with the sampler's epoch {loaded['sampler_epoch']}, and "
                f"the sampler is set to epoch {progress.sampler_epoch} now. Let the program's loop begin "
                f"with epoch {loaded['sampler_epoch']}."
            )
        set_generator(loader.generator, loaded, "loader_generator")
        taken, early = loaded["batches"], behind(loaded)
        if taken or early or loaded["sampler_generator"]:
            progress.before = GeneratorStates(loaded["sampler_generator"], loaded["loader_generator"])
        elif progress.before is not None:  # it was read before the generators were set
            progress.before = generator_states(index_sampler, loader.generator)
        if draws_one_seed(index_sampler) and loaded["sampler_generator"]:
            draw_seed()  # as the sampler would have done
        batches = batches_from(index_sampler, loaded, loader.generator)
        if generator_of(index_sampler) is loader.generator:
            # If the order was drawn before the base seed, the two differ, and the generator continues after
            # the seed.
            set_generator(loader.generator, loaded, "loader_generator")
        progress.done = (taken, *early) if early else taken
        progress.in_order = loaded["in_order"]
        return batches


def _in_order(loader: Any) -> bool:
    return bool(loader.in_order) or int(loader.num_workers) < 2


def _sampler_keys(loader: Any, progress: Progress) -> State:
    """The keys of a state about a sampler that is not torch's, after the batches that were taken."""
    index_sampler, taken, tracked = index_sampler_of(loader), progress.taken, progress.tracked
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


def _set_generators(loader: Any, loaded: State) -> None:
    """Set the loader's and the sampler's own generators to their states in a state."""
    generator = generator_of(index_sampler_of(loader))
    if generator is not torch.default_generator:
        set_generator(generator, loaded, "sampler_generator")
    set_generator(loader.generator, loaded, "loader_generator")


def _warn_of_another(loader: Any) -> None:
    """Warn if a loader begins its first epoch while a state waits in another loader of the same dataset."""
    for other in list(_waiting):
        if other.dataset is loader.dataset and loaded_state(other) is not None:
            warn(
                "load_state_dict() was called on another loader of this dataset, which was not iterated over "
                "since; this loader begins its epoch at the beginning. If it was made from that one (by "
                "Lightning or accelerate, say), call load_state_dict() on this one."
            )
