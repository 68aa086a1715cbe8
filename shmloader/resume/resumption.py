"""A loader's side of resuming: the progress of its present epoch, and a state that it is to go on from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shmloader.errors import ResumeError
from shmloader.resume.fit import ADDED_BY_OTHERS, check_fit, described
from shmloader.resume.progress import Progress
from shmloader.resume.user_states import pack_user_state, unpack_user_state
from shmloader.sampling.generator_places import Places, digest_of, seed_of, seed_place
from shmloader.sampling.replay import (
    GeneratorStates,
    Place,
    TrackedBatches,
    draws_one_seed,
    end_epoch,
    generator_of,
    generator_states,
    go_on_from,
    index_sampler_of,
    sampler_by_count,
    sampler_with_epoch,
    sampler_with_state,
    set_generator,
    track,
)

State = dict[str, Any]


class Resumption:
    """One loader's states: made, loaded, applied. Main process only.

    Attributes:
        loaded: The state that the next iterator begins with, or None.
        set_epoch: The argument of the last ``loader.set_epoch()``, or None.
    """

    def __init__(self) -> None:
        self.loaded: State | None = None
        self.set_epoch: int | None = None
        self._progress: Progress | None = None
        self._older: list[tuple[weakref.ref[Progress], Any]] = []  # with the place when the next one began
        self._sampler_places, self._loader_places = Places(), Places()
        self._global_before = torch.empty(0)  # state of torch's global generator before the last iter()
        self._repeats_iter = True  # whether what the last iter() draws belongs to the program

    # --- making a state

    @property
    def begun(self) -> bool:
        """Whether the loader has begun an epoch."""
        return self._progress is not None

    def state(self, loader: Any) -> State:
        """The state of a loader, now. Takes microseconds; longer at the first call in an epoch.

        Raises:
            ResumeError: If two iterators are in use at once, or a sampler's own state cannot be saved.
        """
        if self.loaded is not None:
            return self.loaded.copy()
        progress = self._progress
        if progress is None or progress.finished:
            return self._between_epochs(loader, progress)
        if self._older:
            self._refuse_two_iterators()
        constant = progress.constant
        if constant is None:
            constant = self._constant(loader, progress)
        state = constant.copy()
        place = progress.place
        if isinstance(place, int):
            state["batches"] = place
        else:
            state["batches"], state["batches_behind"] = place[0], ",".join(map(str, place[1:]))
        if progress.stream is not None:
            state |= progress.stream.state(progress)
        elif state["sampler_state"] is not None or progress.tracked is not None:
            state |= _of_sampler(loader, progress)
        return state

    def _constant(self, loader: Any, progress: Progress) -> State:
        """All of a state that stays the same in an epoch."""
        index_sampler, before = index_sampler_of(loader), progress.before
        if before is None or progress.stream is not None:
            # Without workers, the order is drawn with the first batch.
            places = self._own_places(loader, before)
        elif before.sampler is not None and draws_one_seed(index_sampler):
            generator = torch.Generator()
            generator.set_state(before.sampler)
            seed = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
            places = seed_place(int(seed)), _place(self._loader_places, before.loader)
        else:
            places = self._places(before)
        constant = self._state(loader, progress, places)
        constant["sampler_epoch"] = progress.sampler_epoch
        constant["global_generator"] = progress.global_digest or digest_of(progress.global_before)
        if sampler_by_count(index_sampler) is not None:
            constant["sampler_state"] = ""
        if before is not None:
            progress.constant = constant
        return constant

    def _between_epochs(self, loader: Any, progress: Progress | None) -> State:
        """The state before the first epoch, or after one: generators are where the next one begins."""
        places = self._own_places(loader, None if progress is None else progress.before_next)
        state = self._state(loader, progress, places)
        stateful = sampler_with_state(index_sampler_of(loader))
        if progress is not None:
            state["batches"], state["finished"] = progress.taken, True
            if stateful is not None:
                state |= _of_sampler(loader, progress)
        elif stateful is not None:
            state["sampler_state"] = pack_user_state(stateful.state_dict(), type(stateful).__name__)
        return state

    def _state(self, loader: Any, progress: Progress | None, places: tuple[str, str]) -> State:
        return (
            described(loader)
            | {
                "set_epoch": self.set_epoch,
                "sampler_epoch": getattr(sampler_with_epoch(index_sampler_of(loader)), "epoch", None),
                "base_seed": None if progress is None else progress.base_seed,
                "iterator_epoch": 0 if progress is None else progress.iterator_epoch,
                "persistent_workers": bool(loader.persistent_workers),
                "sampler_generator": places[0],
                "loader_generator": places[1],
                "global_generator": "",
                "batches": 0,
                "batches_behind": "",
                "finished": False,
                "sampler_checksum": None,
                "sampler_state": None,
                "sampler_ended": False,
            }
            | ({"stream": ""} if isinstance(loader.dataset, IterableDataset) else {})
        )

    @property
    def stream_place(self) -> str:
        """The place in a stream that the next iterator goes on from; empty for its beginning."""
        loaded = self.loaded
        return "" if loaded is None or loaded["finished"] else loaded["stream"]

    def _own_places(self, loader: Any, states: GeneratorStates | None) -> tuple[str, str]:
        """The places of the sampler's and the loader's generators, without torch's global one."""
        if states is None:
            states = generator_states(index_sampler_of(loader), loader.generator)
        if generator_of(index_sampler_of(loader)) is torch.default_generator:
            states = states._replace(sampler=None)
        return self._places(states)

    def _places(self, states: GeneratorStates) -> tuple[str, str]:
        sampler = _place(self._sampler_places, states.sampler)
        return sampler, _place(self._loader_places, states.loader)

    def _refuse_two_iterators(self) -> None:
        for reference, place in self._older:
            older = reference()
            if older is not None and older.place != place:
                raise ResumeError(
                    "two iterators over this loader are in use at once: the older one has given batches "
                    "since the newer one began, and a state would hold for one of them only. Make a loader "
                    "for each."
                )

    # --- going on from one

    def load(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Check a state and keep it for the next iterator; an empty one does nothing.

        Raises:
            ResumeError: If it does not fit the loader.
        """
        if not state:
            return
        check_fit(state, loader, self._state(loader, None, ("", "")).keys())
        self.loaded = {name: value for name, value in state.items() if name not in ADDED_BY_OTHERS}
        if state["set_epoch"] is not None:
            loader.set_epoch(state["set_epoch"])
        sampler = sampler_with_epoch(index_sampler_of(loader))
        if sampler is not None and state["sampler_epoch"] is not None:
            sampler.set_epoch(state["sampler_epoch"])

    def iterate(self, loader: Any, make_iterator: Callable[[], Any]) -> Any:
        """Make an iterator, and leave torch's global generator as the uninterrupted program has it.

        In mid-epoch that program did not begin an iterator, so what this draws is taken back; unless the
        generator is where it was when the epoch began: then the program has come to the same line again.
        """
        self._global_before = before = torch.get_rng_state()
        loaded = self.loaded
        if loaded is None or _is_between_epochs(loaded):
            self._repeats_iter = True
            if loaded is not None:
                _set_generators(loader, loaded)
            return make_iterator()
        self._repeats_iter = digest_of(before) == loaded["global_generator"]
        draws_now = not loaded["batches"] and not loaded["sampler_generator"] and "stream" not in loaded
        try:
            return make_iterator()
        finally:
            if not self._repeats_iter and not draws_now:
                torch.set_rng_state(before)

    def seeds(self, loader: Any, base_seed: int) -> tuple[int, int]:
        """The base seed of a new iterator, and the number of epochs in its life before the first.

        Args:
            loader: The loader.
            base_seed: The one that was drawn.
        """
        loaded = self.loaded
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
        """Begin an epoch, or go on in that of the loaded state.

        Args:
            loader: The loader.
            sampler_iter: Iterates over the index batches, from the epoch's beginning.
            before: States of the generators before it draws; None if it draws only with the first batch.
            seeds: The iterator's base seed, and the number of its epochs before this one.

        Returns:
            The iterator over the index batches, and the epoch's progress.

        Raises:
            ResumeError: If the state cannot be resumed from.
        """
        index_sampler = index_sampler_of(loader)
        sampler_epoch = getattr(sampler_with_epoch(index_sampler), "epoch", None)
        progress = Progress(*seeds, sampler_epoch, self._global_before)
        progress.before = before
        loaded = self.loaded
        if isinstance(loader.dataset, IterableDataset):
            batches = sampler_iter
        elif loaded is None:
            batches = track(index_sampler, sampler_iter)
        else:
            batches = self._go_on(loader, loaded, sampler_iter, progress)
        if isinstance(batches, TrackedBatches):
            progress.tracked = batches
        if progress.tracked is not None:
            progress.tracked.taken = lambda: progress.taken
        older = [(reference, place) for reference, place in self._older if reference() is not None]
        if self._progress is not None and not self._progress.finished:
            older.append((weakref.ref(self._progress), self._progress.place))
        self._older, self._progress, self.loaded = older, progress, None
        return batches, progress

    def _go_on(
        self, loader: Any, loaded: State, sampler_iter: Iterator[Any], progress: Progress
    ) -> Iterator[Any]:
        index_sampler, packed = index_sampler_of(loader), loaded["sampler_state"]
        sampler_state = None if packed is None else unpack_user_state(packed)
        place = Place(
            loaded["batches"], loaded["sampler_generator"], loaded["sampler_checksum"], sampler_state
        )
        if loaded["finished"]:
            if sampler_state is not None:
                end_epoch(index_sampler, sampler_state)
                sampler_iter = iter(index_sampler)
            return track(index_sampler, sampler_iter)
        if loaded["base_seed"] is None:  # before the first epoch
            if sampler_state is None:
                return track(index_sampler, sampler_iter)
            return go_on_from(index_sampler, place._replace(generator=""))[0]
        if progress.sampler_epoch != loaded["sampler_epoch"]:
            raise ResumeError(
                f"the state was taken in mid-epoch, with the sampler's epoch {loaded['sampler_epoch']}, and "
                f"the sampler is set to epoch {progress.sampler_epoch} now. Let the program's loop begin "
                f"with epoch {loaded['sampler_epoch']}."
            )
        if loaded["loader_generator"]:
            set_generator(loader.generator, loaded["loader_generator"])
        progress.global_digest = loaded["global_generator"]
        if progress.before is not None:  # it was read before the generators were set
            progress.before = generator_states(index_sampler, loader.generator)
        if seed_of(place.generator) is not None:  # which the sampler would have drawn
            torch.empty((), dtype=torch.int64).random_()
        if loaded["sampler_ended"]:
            end_epoch(index_sampler, sampler_state)
            progress.tracked = TrackedBatches(index_sampler, iter(()), place.taken)
            batches: Iterator[Any] = progress.tracked
        else:
            batches, progress.tracked = go_on_from(index_sampler, place)
        behind = tuple(map(int, filter(None, loaded["batches_behind"].split(","))))
        progress.place = (place.taken, *behind) if behind else place.taken
        if place.taken or place.generator:
            progress.constant = loaded | described(loader)
            progress.constant |= {
                "persistent_workers": bool(loader.persistent_workers),
                "batches_behind": "",
                "sampler_checksum": None,
                "sampler_ended": False,
            }
        return batches


def _of_sampler(loader: Any, progress: Progress) -> State:
    """The keys of a state about a sampler that is not torch's, at the present place."""
    counting = sampler_by_count(index_sampler_of(loader))
    if counting is not None:
        batch_size = getattr(loader.batch_sampler, "batch_size", 1)
        state = counting.state_after(progress.taken, batch_size)
        return {"sampler_state": pack_user_state(state, type(counting).__name__)}
    if progress.tracked is None:
        return {}
    tracked, taken = progress.tracked, progress.taken
    stateful = sampler_with_state(index_sampler_of(loader))
    if stateful is None:
        tracked.check()
        return {"sampler_checksum": tracked.after(taken)}
    ended = tracked.ends_after(taken)
    state = tracked.end if ended else tracked.after(taken)
    return {"sampler_state": pack_user_state(state, type(stateful).__name__), "sampler_ended": ended}


def _place(places: Places, state: torch.Tensor | None) -> str:
    return "" if state is None else places.place_of(state)


def _is_between_epochs(loaded: State) -> bool:
    return loaded["finished"] or loaded["base_seed"] is None


def _set_generators(loader: Any, loaded: State) -> None:
    """Set the loader's and the sampler's own generators to where a state has them."""
    sampler, place = generator_of(index_sampler_of(loader)), loaded["sampler_generator"]
    if sampler is not None and place and seed_of(place) is None and sampler is not torch.default_generator:
        set_generator(sampler, place)
    if loader.generator is not None and loaded["loader_generator"]:
        set_generator(loader.generator, loaded["loader_generator"])
