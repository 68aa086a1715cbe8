"""Loading through slots for any loader of torch's class: its iterators, their end, their statistics.

`DataLoader` and, after ``install()``, torch's own class call this. Main process only.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from shmloader.errors import LoaderClosed, ResumeError, warn, warn_once
from shmloader.failures.bad_samples import ReportCounts
from shmloader.in_process import InProcessIterator
from shmloader.indices.samplers import length_of, with_inner
from shmloader.iterator import SlotIterator
from shmloader.memory import why_unavailable
from shmloader.memory.limits import ProcessorUse, processor_use
from shmloader.order.auto import Auto, auto_for
from shmloader.resume.compatibility import State, is_between_epochs
from shmloader.resume.readers import Followed
from shmloader.resume.states import States
from shmloader.settings import AUTO, THREAD, AutoCount, Settings, option_of, options_asked_for
from shmloader.slots import figures
from shmloader.statistics import Counters, LoaderStatistics
from shmloader.torch_private import (
    DATAPIPES,
    BaseIterator,
    drop_iterator,
    iterator_of,
    unavailable,
    why_missing,
    worker_pids,
)
from shmloader.without_waiting import WithoutWaiting
from shmloader.worker.dataset_setup import setup_methods_of
from shmloader.worker.epoch_settings import EpochCall, datasets_in, has_set_epoch, owners_in
from shmloader.worker.random_state import global_states

if TYPE_CHECKING:
    from shmloader.profiling import Profile

_LOADED = "_shmloader_loaded_state"
"""The attribute for a loaded state, from which the loader will continue. A copy of the loader has it, too."""

_SLOTS = "loading through shared-memory slots"

_waiting: weakref.WeakSet[Loading] = weakref.WeakSet()
"""Those of loaders that were given a state: loaders themselves may have no hash."""


@dataclass(eq=False)
class Loading:
    """The state of one loader, which copies of the loader do not share.

    Attributes:
        loader: Returns the loader.
        iterators: Those that live.
        persistent: Returns the iterator that was made last of those that loaders keep from epoch to epoch.
        auto: Decides for ``num_workers="auto"`` and ``prefetch_factor="auto"``; None without either.
        closes: How often the loader was closed.
    """

    loader: Callable[[], Any]
    counters: Counters = field(default_factory=Counters)
    iterators: weakref.WeakSet[SlotIterator | InProcessIterator] = field(default_factory=weakref.WeakSet)
    auto: Auto | None = None
    persistent: Callable[[], SlotIterator | None] = lambda: None
    closes: int = 0
    states: States = field(default_factory=States)
    owners: list[Any] | None = None  # datasets to be told of epochs; None before they are looked for
    told: EpochCall | None = None  # the last call of their ``set_epoch()``
    advised: bool = False  # whether it was looked for datasets that are not told of epochs
    has_shared: bool = False  # whether its dataset was shared, under `install`
    processor_before: ProcessorUse | None = None  # used before its first workers started

    def __post_init__(self) -> None:
        if _profile_each is not None:
            _profile_each(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: a loader that is pickled, or copied deeply, arrives without it."""
        return types.NoneType, ()

    def iterate(self, torchs_iter: Callable[[], Any]) -> Any:
        """The iterator of a new pass over a loader; first warns of bad samples in an epoch that was left."""
        loader = self.loader()
        kept, loaded = self._kept(), _loaded_state(loader)
        if kept is not None and (kept.closed or loaded is not None):
            kept.close("load_state_dict() was called, and a new iterator goes on from there")
            drop_iterator(loader)
        elif kept is not None and not self.advised:
            self._warn_of_set_epoch()
        self.counters.of(ReportCounts).warn(option_of(loader, "on_error"))
        self._check_epoch(loaded)
        closes, iterator, replay = self.closes, None, self.counters.replay
        try:
            iterator = torchs_iter()
        except AttributeError as error:  # of the persistent iterator, which torch looks up again
            if self.closes == closes or error.obj is not None or error.name != "_reset":
                raise
        if iterator is None and self.closes != closes:
            raise LoaderClosed("the loader was closed while iter() began an epoch. Call iter(loader) again")
        iterator = _delivered(loader, iterator)
        return iterator if replay is None else replay(iterator, length_of(loader))

    def iterate_async(self, iterator: Any) -> AsyncIterator[Any]:
        """The batches of an iterator for ``async for``; `NotImplementedError` for one that is not ours."""
        if isinstance(iterator, WithoutWaiting):
            return aiter(iterator)
        loader = self.loader()
        why = _why_as_torch(loader.dataset, loader.num_workers) or f"{type(loader).__qualname__} has its own."
        raise NotImplementedError(
            f"'async for' needs shmloader's iterator, which can be asked without waiting; iter() of this "
            f"loader gives a {type(iterator).__qualname__}. {why} Use 'for', in a thread of its own."
        )

    def _check_epoch(self, loaded: State | None) -> None:
        """Refuse to go on in an epoch while the dataset is told of another one."""
        then, now = None if loaded is None else loaded["set_epoch"], self.states.last_set_epoch
        if loaded is not None and self.owners and then not in (None, now) and not is_between_epochs(loaded):
            raise ResumeError(
                f"the state was taken in mid-epoch, after set_epoch({then}), and the dataset was told of "
                f"epoch {now} since. Let the program's loop begin with epoch {then}."
            )

    def make_iterator(self) -> SlotIterator | InProcessIterator | None:
        """An iterator over a loader; None, with a warning, if torch's own has to be used."""
        self.owners, loader = None, self.loader()
        if _must_load_as_torch(loader):
            self.counters.note_torchs_way()
            return None
        closes, loaded = self.closes, _loaded_state(loader)
        if loader.num_workers:
            loader.check_worker_number_rationality()
            self.processor_before = self.processor_before or processor_use()
            counts = loader.num_workers, loader.prefetch_factor
            is_auto = any(isinstance(count, AutoCount) for count in counts) and loader.prefetch_factor > 0
            self.auto = auto_for(loader, self.auto) if is_auto else None
        settings = Settings.of(loader)
        if loaded is None and not self.states.begun:
            _warn_of_another(loader)
        with self.states.begin(settings, loaded) as one_pass:
            iterator: SlotIterator | InProcessIterator
            if settings.num_workers:
                iterator = SlotIterator(loader, one_pass, self.counters, self.states, self.auto)
            else:
                iterator = InProcessIterator(loader, one_pass, self.counters)
            vars(loader).pop(_LOADED, None)  # if that has failed, the next attempt begins there again
        self.iterators.add(iterator)
        if settings.persistent_workers and isinstance(iterator, SlotIterator):
            self.persistent = weakref.ref(iterator)
        if self.closes != closes:  # by another thread, or by the sampler
            iterator.close("loader.close() was called")
            raise LoaderClosed("the loader was closed while this iterator was being made")
        return iterator

    def live(self) -> list[SlotIterator]:
        """The iterators with workers that live now."""
        return [iterator for iterator in _members(self.iterators) if isinstance(iterator, SlotIterator)]

    def _kept(self) -> SlotIterator | None:
        """Our iterator among those that loaders keep; a subclass may have wrapped it, as PyG's do."""
        kept = iterator_of(self.loader())
        if kept is None or isinstance(kept, BaseIterator):
            return kept if isinstance(kept, SlotIterator) else None
        return self.persistent()

    def close(self, *, warn: bool = True) -> None:
        """End all passes over a loader, stop its workers and free its slots; warn of bad samples."""
        loader = self.loader()
        self.closes += 1
        for iterator in _members(self.iterators):
            iterator.close("loader.close() was called")
        if self._kept() is not None or isinstance(iterator_of(loader), BaseIterator):
            drop_iterator(loader)  # torch's own ends its workers when it dies
        if warn:
            self.counters.of(ReportCounts).warn(option_of(loader, "on_error"))

    def set_epoch(self, epoch: int) -> None:
        """Tell the number of the next epoch to the sampler or batch sampler, and to the dataset."""
        epoch = operator.index(epoch)  # states hold plain ints, and torch's generators take no others
        for sampler in with_inner(Settings.of(self.loader()).index_sampler):
            if has_set_epoch(sampler):
                sampler.set_epoch(epoch)
                break
        self.set_dataset_epoch(epoch)

    def set_dataset_epoch(self, epoch: int) -> None:
        """Tell it to the dataset, here and in persistent workers."""
        loader = self.loader()
        if self.owners is None:
            self.owners = owners_in(loader.dataset)
        for iterator in self.live() if self.owners else ():
            iterator.await_replacements()
        call = epoch, global_states()
        for dataset in self.owners:
            dataset.set_epoch(epoch)
        self.states.note_set_epoch(epoch)
        if not self.owners:
            return
        for iterator in self.live():
            iterator.set_epoch(call, self.told)
        self.told = call
        if loader.persistent_workers and iterator_of(loader) is not None and self._kept() is None:
            warn("set_epoch() does not reach these persistent workers: they are torch's own", UserWarning)

    def _warn_of_set_epoch(self) -> None:
        """Warn, once, if persistent workers' datasets were never told of an epoch. Runs no code of theirs."""
        self.advised, loader = True, self.loader()
        found = datasets_in(loader.dataset) if self.states.last_set_epoch is None else []
        kinds = [kind for kind in map(type, found) if hasattr(kind, "set_epoch")]
        if option_of(loader, "worker_type") == THREAD:  # which share one object of another class
            kinds = [kind for kind in kinds if issubclass(kind, Dataset) and not hasattr(kind, "__copy__")]
        for kind in kinds[:1]:
            warn(
                f"{kind.__qualname__} has set_epoch(), and persistent workers have copies of it from their "
                "start, which calls by your program do not reach, as with torch. Before each epoch call "
                "loader.set_epoch(epoch), or shmloader.set_epoch(loader, epoch) for torch's class.",
                UserWarning,
            )

    def state_dict(self, taken: int | None = None) -> State:
        """The program's place in the epoch; see `DataLoader.state_dict`."""
        loader = self.loader()
        if not (self.states.begun or has_states(loader)):
            return {}
        taken = None if taken is None else operator.index(taken)
        return self.states.state(lambda: Settings.of(loader), _loaded_state(loader), taken)

    def follow(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The items of a look-ahead, followed by the loader's state: see `DataLoader.follow`."""
        return Followed(self.states.readers, batches, self.explain_reader)

    def explain_reader(self) -> None:
        """Raise the error for a reader that has got no batch of this loader; torch's way has no states."""
        if not self.counters.torchs_way:
            dataset = type(self.loader().dataset).__qualname__
            raise ResumeError(
                f"follow() was given batches of another loader than this one of {dataset}, which has begun "
                "no epoch. If a framework has built another loader from it, call follow() of that one."
            )

    def state_after_epoch(self, epoch: int) -> State:
        """See `States.state_after_epoch`."""
        loader = self.loader()
        return self.states.state_after_epoch(lambda: Settings.of(loader), _loaded_state(loader), epoch)

    def batch(self, epoch: int, number: int) -> Any:
        """A batch by its number; see `DataLoader.batch`."""
        from shmloader.one_batch import Begin, batch_of

        loader, epoch, number = self.loader(), operator.index(epoch), operator.index(number)
        loaded = _loaded_state(loader)
        seeds = self.states.seeds_of(epoch, loaded)
        begin = Begin(*self.states.begin_of(loaded), is_loaded=loaded is not None)
        return batch_of(Settings.of(loader), epoch, number, seeds, self.states.last_set_epoch, begin)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iterator continue from a state; see `DataLoader.load_state_dict`."""
        loader = self.loader()
        if state != {}:  # None is refused, {} is an empty state
            _check_resumable(loader.dataset, loader.num_workers)
            its_own = getattr(loader, "set_epoch", self.set_epoch)
            vars(loader)[_LOADED] = self.states.load(Settings.of(loader), state, its_own)
            _waiting.add(self)

    def go_on_for(self, copy: Any) -> bool:
        """Go on for a copy of the loader, if that is gone and has left an iterator; returns whether it does.

        While the loader lives, epochs of its iterator are its own: a copy starts workers for itself.
        """
        if not self.iterators:
            return False
        if self.loader() is None:
            self.loader = weakref.ref(copy)
            return True
        drop_iterator(copy)
        return False

    def begin_to_share(self) -> bool:
        """Whether `install` is to share the dataset now: once."""
        before, self.has_shared = self.has_shared, True
        return not before

    def statistics(self) -> LoaderStatistics:
        """Counters of the loader's life so far, and the slots that it holds now."""
        iterators = self.live()
        # A copy that is only read: another thread may be iterating.
        places = [place for iterator in iterators for place in list(iterator.table.places)]
        of_cores: dict[str, Any] = {}
        if self.processor_before is not None:
            use = processor_use(self.pids())
            of_cores = {"usable_cores": use.cores.usable, **use.shares_since(self.processor_before)}
        return LoaderStatistics(
            **figures(places),
            oldest_leases=tuple(text for iterator in iterators for text in iterator.table.oldest_leases()),
            autotune=None if self.auto is None else self.auto.report(),
            **of_cores,
            **self.counters.figures(),
        )

    def pids(self) -> list[int | None]:
        """The ids of its live iterators' worker processes."""
        return [pid for iterator in self.live() for pid in worker_pids(iterator)]

    def profile(
        self, every_s: float, tell: Callable[[Any], object] | None, *, replay: bool = False
    ) -> Profile:
        """A profile of the epochs that begin while it is entered."""
        from shmloader.profiling import Profile

        return Profile(self.counters, self.statistics, self.pids, every_s, tell, replay=replay)


def _why_as_torch(dataset: object, num_workers: int) -> str:
    """The sentence that tells why a loader has to load as torch's own does; "" if it need not."""
    if isinstance(dataset, DATAPIPES):
        return (
            f"shmloader: {_SLOTS} is not available for DataPipes, which torch's own iterator seeds and "
            "shards. For slots, write the pipe as an IterableDataset, which shard='auto' divides, or as a "
            "map-style dataset."
        )
    if (lack := why_missing()) is not None:
        return unavailable(_SLOTS, lack)
    if num_workers and (lack := why_unavailable()) is not None:
        return f"shmloader: {_SLOTS} is not available on this platform: {lack}."
    return ""


def _must_load_as_torch(loader: Any) -> bool:
    """Whether torch's own iterator has to load; warns once of what is lost by it.

    Raises:
        NotImplementedError: If it would divide a stream otherwise than ``shard=`` asks for.
    """
    why = _why_as_torch(loader.dataset, loader.num_workers)
    if not why:
        return False
    text = f"{why} The loader loads as torch's DataLoader does, and the batches are the same."
    if option_of(loader, "shard") == AUTO:
        raise NotImplementedError(f"{text} It does not divide streams as shard={AUTO!r} asks for.")
    if ignored := options_asked_for(loader) + setup_methods_of(loader.dataset):
        text += f" Without effect: {', '.join(ignored)}."
    warn_once(text)
    return True


def has_states(loader: Any) -> bool:
    """Whether a loader has states. One of a DataPipe has none, with a warning: frameworks ask every loader.

    Raises:
        ResumeError: If a loader of another dataset has none.
    """
    try:
        _check_resumable(loader.dataset, loader.num_workers)
    except ResumeError as error:
        if not isinstance(loader.dataset, DATAPIPES):
            raise
        warn_once(f"the state of a loader of a DataPipe is empty, and cannot be resumed: {error}")
        return False
    return True


def _check_resumable(dataset: object, num_workers: int) -> None:
    if why := _why_as_torch(dataset, num_workers):
        hint = " With num_workers=0 there is a state." if not _why_as_torch(dataset, 0) else ""
        raise ResumeError(
            "torch's own iterator loads here, which does not record how far the program has come. "
            f"{why}{hint}"
        )


def _delivered(loader: Any, iterator: Any) -> Any:
    """An iterator's batches on the loader's device, where torch's own iterator loads."""
    ours = isinstance(iterator, (SlotIterator, InProcessIterator))
    device = None if ours else Settings.of(loader).target
    if device is None:
        return iterator
    from shmloader.device import numbered, to_device

    device = numbered(device)
    return (to_device(batch, device) for batch in iterator)


def _loaded_state(loader: Any) -> State | None:
    state: State | None = vars(loader).get(_LOADED)
    return state


def _members(weak: weakref.WeakSet[Any]) -> list[Any]:
    while True:
        try:
            return list(weak)
        except RuntimeError:  # another thread has added one in this moment
            continue


def _warn_of_another(loader: Any) -> None:
    """Warn if a loader begins its first epoch while a state waits in another loader of the same dataset."""
    for other in [loading.loader() for loading in _members(_waiting)]:
        if other is not None and other.dataset is loader.dataset and _loaded_state(other) is not None:
            warn(
                "load_state_dict() was called on another loader of this dataset, which was not iterated over "
                "since; this loader begins its epoch at the beginning. If it was made from that one (by "
                "Lightning or accelerate, say), call load_state_dict() on this one."
            )


imported_when_used: dict[str, Callable[[Any], Any]] = {}
"""Makers of a `Loading`, by ``shared_by``; `shmloader` enters those that the loader may not import."""


def _new_loading(loader: Any) -> Loading:
    kind = imported_when_used.get(option_of(loader, "shared_by"), Loading)
    loading: Loading = kind(weakref.ref(loader))
    return loading


_profile_each: Callable[[Loading], None] | None = None


def profile_each(profile: Callable[[Loading], None]) -> None:
    """Have a function called with the `Loading` of each loader from now on, to profile it."""
    global _profile_each  # noqa: PLW0603 - for the process
    _profile_each = profile


def loading_of(loader: Any) -> Loading:
    """The `Loading` of a loader, made when it is first asked for: subclasses iterate inside ``__init__``.

    Frameworks copy ``__dict__`` from loader to loader. A copy must not close the original's iterators.
    """
    try:
        loading: Loading | None = loader._shmloader_loading  # noqa: SLF001 - faster than vars() and getattr()
    except AttributeError:
        loading = None
    if loading is None:  # in one step: two threads may be here
        loading = vars(loader).setdefault("_shmloader_loading", _new_loading(loader))
    # It was pickled (see `__reduce__`), or copied.
    if loading is None or (loading.loader() is not loader and not loading.go_on_for(loader)):
        loading = loader._shmloader_loading = _new_loading(loader)  # noqa: SLF001
    return loading
