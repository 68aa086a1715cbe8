"""`Pass`: one epoch's order, seeds, and the place where it begins. Main process only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from shmloader.errors import ResumeError
from shmloader.indices import samplers
from shmloader.indices.compact_states import digest_of
from shmloader.indices.sharded_sampler import WHOLE_EPOCH
from shmloader.indices.tracked_batches import TrackedBatches, track
from shmloader.resume.compatibility import State, behind, described, is_between_epochs
from shmloader.resume.progress import Done, Progress
from shmloader.resume.replay import batches_by_own_state, batches_from, set_generator
from shmloader.resume.stream_progress import StreamProgress
from shmloader.resume.user_states import unpack_user_state
from shmloader.settings import THREAD, Settings


class Pass:
    """One epoch, from before anything is drawn for it: a new one, or the rest of that of a loaded state.

    An iterator takes its seeds, then begins its order. Until then a state that was loaded stays. ``is_asked``
    tells whether the program wants states. At ``looks`` first batches a sampler is checked for draws from
    global generators.
    """

    def __init__(
        self,
        settings: Settings,
        loaded: State | None,
        set_epoch: int | None,
        is_asked: Callable[[], bool],
        looks: int,
    ) -> None:
        self.settings = settings
        self._loaded, self._set_epoch, self._is_asked, self._looks = loaded, set_epoch, is_asked, looks
        self.global_before = torch.get_rng_state()  # of torch's global generator before ``iter()``
        self.before: samplers.GeneratorStates | None = None  # before ``iter()``; None in mid-epoch
        self.progress: Progress | None = None  # once it has begun
        self._goes_on = None if loaded is None or is_between_epochs(loaded) else loaded
        self._repeats_iter = True
        # Draws of ``iter()`` from torch's global generator stay, but not in mid-epoch, where a program that
        # was never interrupted made none; unless this ``iter()`` repeats the epoch's own.
        self.keeps_draws = True
        if self._goes_on is not None:
            self._repeats_iter = digest_of(self.global_before) == self._goes_on["global_generator"]
            at_first = not self._goes_on["batches"] and not self._goes_on["sampler_generator"]
            self.keeps_draws = self._repeats_iter or (at_first and not settings.is_iterable)
        else:
            if loaded is not None:
                self._set_generators(loaded)
            self.before = samplers.generator_states(settings.index_sampler, settings.generator)
        # The progress of an iterable-style dataset, with the rules for its workers.
        self.stream = StreamProgress(settings, self._goes_on) if settings.is_iterable else None

    def seeds(self, drawn: int) -> tuple[int, int]:
        """The base seed for a new iterator, which has drawn one, and the number of its epochs before."""
        loaded = self._loaded
        if loaded is None or loaded["base_seed"] is None:
            return drawn, 0
        epoch: int = loaded["iterator_epoch"]
        if loaded["finished"]:
            if not (loaded["persistent_workers"] and self.settings.persistent_workers):
                return drawn, 0
            epoch += 1
        if epoch or not self._repeats_iter:  # the program that wrote the state drew no base seed here
            torch.set_rng_state(self.global_before)
            self._set_generators(loaded)
        return loaded["base_seed"], epoch

    def begin(
        self, sampler_iter: Iterator[Any], before: samplers.GeneratorStates | None, seeds: tuple[int, int]
    ) -> tuple[Iterator[Any], Progress]:
        """Begin the epoch: returns its index batches, from its place on, and its progress.

        ``before`` are the states of the generators before the sampler draws; None if it draws only with the
        first batch. Raises `ResumeError` if the state cannot be resumed from.
        """
        settings, goes_on = self.settings, self._goes_on
        sampler_epoch = samplers.epoch_of(settings.index_sampler)
        done: Done = (0,)
        in_order, global_before, sampler_begin = True, self.global_before, WHOLE_EPOCH
        if goes_on is not None:
            self._check_epoch(goes_on, sampler_epoch)
            set_generator(settings.generator, goes_on, "loader_generator")
            done = (goes_on["batches"], *behind(goes_on))
            in_order = settings.is_iterable or goes_on["in_order"]
            global_before = goes_on["global_generator"]
            if goes_on["sampler_state"] and samplers.sharded_sampler(settings.index_sampler) is not None:
                sampler_begin = unpack_user_state(goes_on["sampler_state"])
        was_drawn = False  # the order, in an earlier program
        if (
            goes_on is not None
            and not settings.is_iterable
            and (done != (0,) or goes_on["sampler_generator"])
        ):
            was_drawn = True
            before = samplers.GeneratorStates(goes_on["sampler_generator"], goes_on["loader_generator"])
        elif settings.is_iterable or (goes_on is not None and before is not None):
            before = samplers.generator_states(settings.index_sampler, settings.generator)  # drawn, or set
        batches = self._batches(sampler_iter)
        tracked = batches if isinstance(batches, TrackedBatches) else None
        progress = Progress(
            *seeds,
            sampler_epoch,
            global_before,
            before,
            done,
            self._set_epoch,
            in_order,
            self.stream,
            tracked,
            by_arrival=not (settings.comes_in_order or settings.is_iterable),
            sampler_begin=sampler_begin,
        )
        if tracked is not None:
            tracked.follow(lambda: progress.oldest, self._is_asked, self._looks)
        if was_drawn and samplers.mixture_sampler(settings.index_sampler) is None:
            # Again now, while the generator and the sampler's epoch are as they were then. A mixture goes on
            # from a place, and its weights may change before that.
            batches = _first_drawn(batches)
        self.progress = progress
        return batches, progress

    def _check_epoch(self, goes_on: State, sampler_epoch: int | None) -> None:
        if sampler_epoch != goes_on["sampler_epoch"]:
            raise ResumeError(
                f"the state was taken in mid-epoch, with the sampler's epoch {goes_on['sampler_epoch']}, and "
                f"the sampler is set to epoch {sampler_epoch} now. Let the program's loop begin with epoch "
                f"{goes_on['sampler_epoch']}."
            )

    def _batches(self, sampler_iter: Iterator[Any]) -> Iterator[Any]:
        """The index batches from the epoch's place on."""
        settings, loaded, index_sampler = self.settings, self._loaded, self.settings.index_sampler
        if settings.is_iterable:
            return map(self._asking, sampler_iter)  # Ctrl-C inside a generator would end it
        if self._goes_on is not None:
            return self._rest(self._goes_on)
        if loaded is not None and samplers.sampler_with_state(index_sampler) is not None:
            unchanged = described(settings).items() <= loaded.items()
            return batches_by_own_state(index_sampler, loaded, settings.generator, unchanged=unchanged)
        if loaded is not None and (mixed := samplers.mixture_sampler(index_sampler)) is not None:
            mixed.load_state_dict(unpack_user_state(loaded["sampler_state"]))  # it has drawn nothing yet
        if samplers.repeats_its_order(index_sampler):
            return sampler_iter
        return track(index_sampler, sampler_iter, threads=settings.worker_type == THREAD)

    def _asking(self, batch: Any) -> Any:
        """A stream's index batch, None or a list of it; True in its place asks for its state."""
        return batch if not self._is_asked() else True if batch is None else [True] * len(batch)

    def _rest(self, goes_on: State) -> Iterator[Any]:
        """The index batches of an epoch of a map-style dataset, from the place of a state on."""
        index_sampler, generator = self.settings.index_sampler, self.settings.generator
        if samplers.draws_one_seed(index_sampler) and goes_on["sampler_generator"]:
            samplers.draw_seed()  # as the sampler would have done
        threads = self.settings.worker_type == THREAD
        batches = batches_from(index_sampler, goes_on, generator, threads=threads)
        if samplers.generator_of(index_sampler) is generator:
            # If the order was drawn before the base seed, the two differ, and the generator continues after
            # the seed.
            set_generator(generator, goes_on, "loader_generator")
        return batches

    def _set_generators(self, loaded: State) -> None:
        """Set the loader's and the sampler's own generators to their states in a state."""
        generator = samplers.generator_of(self.settings.index_sampler)
        if generator is not torch.default_generator:
            set_generator(generator, loaded, "sampler_generator")
        set_generator(self.settings.generator, loaded, "loader_generator")


def _first_drawn(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, the first of which is drawn now; what it raises comes in its turn."""
    first: Iterator[Any]
    try:
        first = iter(list(itertools.islice(batches, 1)))
    except Exception as error:  # noqa: BLE001 - the sampler's own
        first = map(_raise, [error])
    return itertools.chain(first, batches)


def _raise(error: Exception) -> NoReturn:
    raise error
