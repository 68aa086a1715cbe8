"""Loaders treated as by Lightning, accelerate, ignite, timm and Ultralytics, without these."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from parity.compare import assert_same
from parity.datasets import Draws, Repeat, Rows, Stream, WorkerFacts, note_worker
from parity.run import Build, assert_plays, builder, descriptors_for_torch, take
from shmloader import DataLoader

WORKERS = {"num_workers": 2, "persistent_workers": True}
forked = builder(DataLoader)


def _batches(loader: Any) -> list[Any]:
    return list(loader)


def _public(loader: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


def _processes(iterator: Any) -> list[psutil.Process]:
    return [psutil.Process(worker.pid) for worker in iterator._workers]


def _gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def test_lightning_rebuilds_a_loader_from_its_attributes() -> None:
    """vars() that match the constructor, with another sampler in the place of the old one."""
    loader = forked(Rows(12), 4, True, drop_last=True, **WORKERS)
    attributes = _public(loader)
    names = inspect.signature(loader.__init__).parameters
    given = {name: attributes[name] for name in names if name in attributes}
    given |= {
        "multiprocessing_context": loader.multiprocessing_context,
        "sampler": SequentialSampler(loader.dataset),
        "batch_sampler": None,
        "shuffle": False,
    }
    rebuilt = type(loader)(**given)
    assert_same(_batches(rebuilt), _batches(TorchLoader(Rows(12), 4, drop_last=True)))


def test_lightning_rebuilds_for_prediction_with_a_batch_sampler() -> None:
    """A wrapped batch sampler, and the arguments it excludes set to their defaults."""
    loader = forked(Rows(12), 5, num_workers=1)
    given = {k: v for k, v in _public(loader).items() if k in inspect.signature(DataLoader).parameters}
    given |= {"sampler": None, "batch_size": 1, "drop_last": False, "shuffle": False}
    given["batch_sampler"] = BatchSampler(SequentialSampler(range(12)), 5, False)
    given["multiprocessing_context"] = loader.multiprocessing_context
    assert_same(_batches(DataLoader(**given)), _batches(TorchLoader(Rows(12), 5)))


def test_ignite_rebuilds_a_loader_from_every_public_attribute() -> None:
    """type(loader)(**public attributes), less what a batch sampler excludes."""
    loader = forked(Rows(12), 5, num_workers=1)
    given = _public(loader)
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler", "shuffle"):
        given.pop(name, None)
    rebuilt = type(loader)(**given, batch_sampler=loader.batch_sampler)
    assert_same(_batches(rebuilt), _batches(TorchLoader(Rows(12), 5)))


def test_accelerate_builds_a_torch_loader_from_a_fixed_list_of_arguments() -> None:
    """Every torch argument is readable as an attribute and good for torch's own constructor."""
    loader = forked(Rows(12), 5, num_workers=1)
    names = set(inspect.signature(TorchLoader).parameters) - {"dataset", "shuffle", "batch_sampler"}
    given = {name: getattr(loader, name) for name in names}
    assert_same(_batches(TorchLoader(loader.dataset, **given)), _batches(loader))


def test_accelerate_puts_a_shard_class_over_the_loader() -> None:
    """A subclass that overrides __iter__ with a one-batch lookahead over super().__iter__()."""

    class Shard(DataLoader):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            current = next(iterator)
            for following in iterator:
                yield current
                current = following
            yield current

    loader = Shard(Rows(40, 2000), 2, num_workers=2, multiprocessing_context="fork")
    assert_same(_batches(loader), _batches(TorchLoader(Rows(40, 2000), 2)))


def test_a_copied_loader_is_a_loader_of_its_own() -> None:
    """copy.copy and an update of __dict__ during a persistent epoch; deepcopy; pickle."""
    loader = forked(Rows(12), 2, **WORKERS)
    fresh = pickle.loads(pickle.dumps(forked(Rows(12), 2, num_workers=1)))
    assert_same(_batches(fresh), _batches(TorchLoader(Rows(12), 2)))
    clone = copy.copy(loader)
    again = object.__new__(DataLoader)
    again.__dict__.update(loader.__dict__)
    first = iter(loader)
    next(first)
    assert clone._iterator is None
    for other in (clone, again, copy.deepcopy(fresh)):
        assert_same(_batches(other), _batches(TorchLoader(Rows(12), 2)))
        other.close()  # three with persistent workers at once would not do with 64 descriptors
    assert_same(_batches(first), _batches(TorchLoader(Rows(12), 2))[1:])


def test_a_live_iterator_refuses_to_be_pickled_as_torchs_does() -> None:
    """Lightning looks for torch's base class, and torch's NotImplementedError is what it knows."""
    for workers in (0, 1):
        iterator = iter(forked(Rows(4), num_workers=workers))
        assert isinstance(iterator, _BaseDataLoaderIter)
        with pytest.raises(NotImplementedError):
            pickle.dumps(iterator)
        list(iterator)


def test_worker_init_fn_and_generator_set_late_take_effect() -> None:
    """Lightning sets worker_init_fn after construction; both are read at iter()."""

    def play(build: Build) -> list[Any]:
        loader = build(WorkerFacts(4), None, num_workers=2)
        before = list(loader)
        loader.worker_init_fn = note_worker
        loader.generator = torch.Generator().manual_seed(3)
        return [before, list(loader), loader.generator.get_state()]

    before, after, _ = assert_plays(play)
    assert {fact["note"] for fact in before} == {"unset"}
    assert "unset" not in {fact["note"] for fact in after}


def test_other_attributes_set_late_take_effect_at_the_next_iteration() -> None:
    """collate_fn, num_workers, prefetch_factor, timeout, in_order, pin_memory are plain attributes."""

    def play(build: Build) -> list[Any]:
        loader = build(Draws(8), 2, num_workers=1)
        loader.collate_fn = len
        first = list(loader)
        loader.collate_fn = torch.utils.data.default_collate
        loader.num_workers, loader.prefetch_factor, loader.timeout = 3, 1, 20
        return [first, list(loader)]

    assert assert_plays(play)[0] == [2, 2, 2, 2]


def test_dropping_the_iterator_stops_persistent_workers() -> None:
    """`loader._iterator = None` is how Lightning ends them; the next epoch starts others."""
    loader = forked(Rows(12), 2, **WORKERS)
    list(loader)
    assert isinstance(loader._iterator, _BaseDataLoaderIter)
    assert iter(loader) is loader._iterator
    old = _processes(loader._iterator)
    assert len(old) == 2
    assert all(process.is_running() for process in old)
    loader._iterator = None
    gc.collect()
    assert _gone(old)
    assert_same(_batches(loader), _batches(TorchLoader(Rows(12), 2)))


def test_shutdown_workers_ends_them_and_may_be_called_again() -> None:
    """Lightning and Ultralytics call _shutdown_workers() of a live iterator."""
    loader = forked(Rows(40), 2, num_workers=2)
    iterator = iter(loader)
    held = take(iterator, 2)
    processes = _processes(iterator)
    iterator._shutdown_workers()
    iterator._shutdown_workers()
    assert _gone(processes)
    assert_same(held, _batches(TorchLoader(Rows(40), 2))[:2])
    assert_same(_batches(loader), _batches(TorchLoader(Rows(40), 2)))


def test_the_private_names_that_frameworks_read_exist() -> None:
    """The loader and its iterators have them, with torch's types."""

    def play(build: Build) -> list[Any]:
        seen = []
        for dataset in (Rows(12), Stream((4, 4))):
            loader = build(dataset, 2, num_workers=2)
            iterator = loader._get_iterator()
            seen.append([loader._dataset_kind, loader._auto_collation, loader._IterableDataset_len_called])
            seen.append([iterator._num_workers, iterator._dataset is dataset, len(iterator._workers)])
            seen.append([worker.is_alive() for worker in iterator._workers])
            seen.append([iterator._index_sampler is loader._index_sampler, list(iterator)])
            seen.append([iterator._num_yielded, iterator._base_seed])
        return seen

    assert_plays(play)


class EndlessEpochs:
    """The part that timm's and Ultralytics' loaders share; mixed into either loader class."""

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class OursLikeTimm(EndlessEpochs, DataLoader):
    """timm: unlocks the attributes by the private flag, and iterates in its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = DataLoader.__iter__(self)


class OursLikeUltralytics(EndlessEpochs, DataLoader):
    """Ultralytics: goes past __setattr__, and terminates the workers when it dies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = DataLoader.__iter__(self)

    def reset(self) -> None:
        self.iterator = self._get_iterator()

    def stop(self) -> list[psutil.Process]:
        assert hasattr(self.iterator, "_workers")
        processes = _processes(self.iterator)
        for worker in self.iterator._workers:
            if worker.is_alive():
                worker.terminate()
        self.iterator._shutdown_workers()
        return processes


class _TheirsLikeTimm(EndlessEpochs, TorchLoader):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = TorchLoader.__iter__(self)


@pytest.mark.parametrize("ours", [OursLikeTimm, OursLikeUltralytics])
def test_loaders_that_never_end_their_epoch_keep_their_workers(ours: type) -> None:
    """An endless sampler, iterated in the constructor: epochs are cut from one iteration."""
    actual = outcome_of(ours)
    with descriptors_for_torch():
        expected = outcome_of(_TheirsLikeTimm)
    assert_same(actual, expected)


def outcome_of(loader_class: type) -> Any:
    """Two and a half epochs of an endless loader, with draws."""
    torch.manual_seed(5)
    loader = builder(loader_class)(Draws(12), 2, True, num_workers=2)
    pids = [worker.pid for worker in loader.iterator._workers]
    epochs = [list(loader) for _ in range(3)]
    assert [worker.pid for worker in loader.iterator._workers] == pids
    return epochs, torch.get_rng_state()


def test_ultralytics_ends_and_resets_its_loader() -> None:
    """Workers terminated from outside, then _shutdown_workers(); then a new iterator."""
    loader = builder(OursLikeUltralytics)(Rows(8), 2, num_workers=2)
    next(iter(loader))
    assert _gone(loader.stop())
    loader.reset()
    assert_same(next(iter(loader)), _batches(TorchLoader(Rows(8), 2))[0])
    assert _gone(loader.stop())


def test_a_subclass_may_have_any_constructor() -> None:
    """Lightning re-creates such loaders by wrapping __init__; plain use must work too."""

    class Mine(DataLoader):
        def __init__(self, rows: int, extra: str = "x", **kwargs: Any) -> None:
            self.extra = extra
            super().__init__(Rows(rows), **kwargs)

    loader = Mine(6, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert loader.extra == "x"
    assert_same(_batches(loader), _batches(TorchLoader(Rows(6), 4)))
    with pytest.raises(ValueError, match="should not be set after Mine is initialized"):
        loader.batch_size = 3
