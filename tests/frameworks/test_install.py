"""``shmloader.install()``: every loader of torch's class loads from slots, until `uninstall`."""

from __future__ import annotations

import copy
import inspect
import multiprocessing.context
import os
import pickle
import queue
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import shmloader
from shmloader import errors
from shmloader.iterator import SlotIterator
from shmloader.settings import OWN_DEFAULTS


class Rows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index)) + torch.rand(3)


class Flawed(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ValueError("sample 5 is bad")
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Subclass(DataLoader):
    """A library's class: its collate_fn is a method, so that spawned workers are sent the loader."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(dataset, collate_fn=self.join, **kwargs)

    def join(self, samples: list[Any]) -> Any:
        return torch.stack(samples) * 2


class ThreadAsProcess(threading.Thread):
    pid = property(id)


class ThreadQueue(queue.Queue):
    def close(self) -> None: ...

    def cancel_join_thread(self) -> None: ...


class ThreadContext(multiprocessing.context.SpawnContext):
    """MONAI has one like this."""

    Process = ThreadAsProcess
    Queue = ThreadQueue


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    """Begin and end each test with torch's class unpatched."""
    before = dict(vars(DataLoader))
    yield
    shmloader.uninstall()
    assert dict(vars(DataLoader)) == before


def forbid_torchs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's own workers were to be started")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__init__", refuse)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__del__", lambda self: None)


def batches(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    return [batch.tolist() for batch in loader]


def indices(loader: Any) -> list[list[int]]:
    """The samples of each batch, without what they draw."""
    return [batch[:, 0].int().tolist() for batch in loader]


IN_ORDER = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def make(kind: Any = DataLoader, dataset: Any = None, **arguments: Any) -> Any:
    return kind(Rows() if dataset is None else dataset, **{"batch_size": 2, "num_workers": 2} | arguments)


def test_every_loader_loads_from_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders may be made before or after, of torch's class or of an earlier subclass."""
    early = make()
    wanted = [batches(early), batches(make(Subclass)), batches(make(shuffle=True))]
    forbid_torchs_workers(monkeypatch)
    with pytest.raises(AssertionError, match="torch's own workers"):
        iter(early)
    shmloader.install()
    assert [batches(early), batches(make(Subclass)), batches(make(shuffle=True))] == wanted
    assert early.statistics().batches == 6
    assert type(early) is DataLoader
    assert torch.utils.data.DataLoader is DataLoader


def test_a_loader_is_pickled_to_workers_that_are_not_forked(warm_helpers: None) -> None:
    """The loader's collate_fn is its method. It has loaded before; its shmloader state is not pickled."""
    shmloader.install()
    loader = make(Subclass, multiprocessing_context="forkserver")
    loader.num_workers = 1
    first = batches(loader)
    assert batches(loader) == first
    for clone in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)):
        assert clone.statistics().batches == 0
    shmloader.uninstall()
    pickle.dumps(loader)


def test_persistent_workers_stay_from_epoch_to_epoch_and_close_ends_them() -> None:
    shmloader.install()
    loader = make(persistent_workers=True)
    assert indices(loader) == IN_ORDER
    kept = loader._iterator
    assert isinstance(kept, SlotIterator)
    assert indices(loader) == IN_ORDER
    assert loader._iterator is kept
    loader.close()
    assert kept.closed
    assert indices(loader) == IN_ORDER
    loader.close()


def test_persistent_workers_that_died_are_started_anew() -> None:
    """torch's loader cannot continue then."""
    shmloader.install()
    loader = make(persistent_workers=True)
    assert indices(loader) == IN_ORDER
    os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(shmloader.WorkerDied):
        list(loader)
    assert indices(loader) == IN_ORDER
    loader.close()


def test_uninstall_gives_loaders_back_to_torch() -> None:
    """Loaders change with their next iterator; a live iterator and persistent workers continue."""
    installation = shmloader.install()
    loader, persistent = make(), make(persistent_workers=True)
    assert indices(persistent) == IN_ORDER
    live = iter(loader)
    next(live)
    shmloader.uninstall()
    shmloader.uninstall()
    assert len(list(live)) == 5
    assert isinstance(iter(loader), _MultiProcessingDataLoaderIter)
    assert indices(persistent) == IN_ORDER
    assert isinstance(persistent._iterator, SlotIterator)
    assert not hasattr(loader, "statistics")
    persistent._iterator = None
    with installation:
        pass
    assert isinstance(iter(loader), _MultiProcessingDataLoaderIter)


def test_persistent_workers_of_a_stream_continue_after_uninstall() -> None:
    with shmloader.install():
        loader = DataLoader(Stream(), num_workers=2, persistent_workers=True)
        first = [int(batch) for batch in loader]
    assert [int(batch) for batch in loader] == [int(batch) for batch in loader] == first
    assert isinstance(loader._iterator, SlotIterator)
    loader._iterator = None


def test_as_a_context_manager_it_restores_what_was_there() -> None:
    loader = make()
    with shmloader.install(on_error="skip"):
        with shmloader.install(worker_restarts=2):
            assert (loader.on_error, loader.worker_restarts) == ("raise", 2)
        assert (loader.on_error, loader.worker_restarts) == ("skip", 0)
        assert isinstance(iter(loader), SlotIterator)
    assert not hasattr(loader, "on_error")
    with pytest.raises(KeyError), shmloader.install():
        raise KeyError


def test_options_are_defaults_of_all_loaders() -> None:
    """A shmloader.DataLoader keeps its own options."""
    shmloader.install(on_error="skip", dispatch="dynamic")
    loader = make(dataset=Flawed())
    with pytest.warns(shmloader.BadSampleWarning, match="sample 5 is bad"):
        assert sum(map(len, loader)) == 11
    assert loader.dispatch == "dynamic"
    assert loader.statistics().bad_samples == 1
    ours = make(shmloader.DataLoader, dataset=Flawed())
    assert (ours.on_error, ours.dispatch) == ("raise", "static")
    with pytest.raises(ValueError, match="sample 5 is bad"):
        list(ours)
    assert not {"on_error", "dispatch", "close"} & vars(loader).keys()


def test_without_workers_bad_samples_are_skipped_too() -> None:
    shmloader.install(on_error="skip")
    loader = make(dataset=Flawed(), num_workers=0)
    with pytest.warns(shmloader.BadSampleWarning):
        assert sum(map(len, loader)) == 11


def test_a_loader_that_cannot_have_an_option_loads_without_it() -> None:
    """One warning per option gives the reason; other loaders have the option."""
    shmloader.install(worker_restarts=1, prefetch_epochs=True, on_error="skip")
    loader = make(dataset=Stream())
    with (
        pytest.warns(
            RuntimeWarning, match=r"install\(worker_restarts=1\) has no effect on a loader of Stream: "
        ),
        pytest.warns(
            RuntimeWarning, match=r"install\(prefetch_epochs=True\) has no effect .* needs persistent"
        ),
    ):
        assert len(list(loader)) == 4
    assert (loader.worker_restarts, loader.prefetch_epochs, loader.on_error) == (0, False, "skip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(make(dataset=Stream()))) == 4
    other = make(persistent_workers=True, generator=torch.Generator())
    assert (other.worker_restarts, other.prefetch_epochs) == (1, True)


def test_a_loader_without_workers_has_no_options_of_workers() -> None:
    """Frameworks build loaders again with the options that a loader shows."""
    shmloader.install(worker_restarts=1, worker_max_nbytes=1 << 40, on_error="skip")
    loader = make(num_workers=0)
    assert (loader.worker_restarts, loader.worker_max_nbytes, loader.on_error) == (0, None, "skip")
    shown = {name: getattr(loader, name) for name in OWN_DEFAULTS}
    assert len(list(make(shmloader.DataLoader, num_workers=0, **shown))) == len(loader)


def test_every_option_of_the_loader_is_known() -> None:
    ours, torchs = (
        inspect.signature(kind.__init__).parameters for kind in (shmloader.DataLoader, DataLoader)
    )
    # Not device: each loader has its own, and accelerate's loaders have an attribute of that name.
    assert OWN_DEFAULTS.keys() == ours.keys() - torchs.keys() - {"device"}
    plain = shmloader.DataLoader(Rows())
    assert {name: getattr(plain, name) for name in OWN_DEFAULTS} == OWN_DEFAULTS


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"restarts": 1},
            TypeError,
            "install\\(\\) has no option restarts: it has memory_budget_nbytes, worker_r",
        ),
        ({"worker_restarts": 1.5}, TypeError, "worker_restarts must be a whole number"),
        ({"on_error": "ignore"}, ValueError, "on_error must be one of"),
        (
            {"worker_restarts": 1, "worker_type": "thread"},
            ValueError,
            "worker_restarts=1 needs worker_type='proc",
        ),
        ({"shard": "auto"}, ValueError, "would be others than torch's"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shmloader.install(**options)
    assert not hasattr(make(), "on_error")


class Texts(Dataset):
    def __init__(self) -> None:
        self.texts: Any = [f"text {number}" for number in range(30_000)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(type(self.texts) is not list)


def test_datasets_of_torchs_loaders_are_shared_when_workers_start() -> None:
    dataset, rows = Texts(), [f"text {number}" for number in range(30_000)]
    shmloader.install(share_dataset=True)
    loader = DataLoader(dataset, num_workers=1, batch_size=12)
    assert type(dataset.texts) is list
    assert next(iter(loader)).all()
    assert loader.dataset is dataset
    store = dataset.texts
    assert next(iter(loader)).all()
    assert dataset.texts is store
    plain = DataLoader(rows, num_workers=1, batch_size=12)
    assert next(iter(plain)) == rows[:12]
    assert type(plain.dataset) is not list
    without = Texts()
    assert not next(iter(DataLoader(without, batch_size=12))).any()


def test_threads_that_pose_as_processes_are_left_to_torch_and_refused_without_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MONAI's ThreadDataLoader has such workers; there is one warning."""
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)  # torch's worker leaves its own
    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match=r"ThreadContext: .*ThreadAsProcess\), which cannot write to slots"):
        make(shmloader.DataLoader, multiprocessing_context=ThreadContext())
    late = make(shmloader.DataLoader)
    late.multiprocessing_context = ThreadContext()
    with pytest.raises(ValueError, match="which cannot write to slots"):
        iter(late)
    shmloader.install()
    loader = make(multiprocessing_context=ThreadContext(), num_workers=1)
    with pytest.warns(RuntimeWarning, match=r"leaves DataLoader to torch: .* \(ThreadAsProcess\)"):
        iterator = iter(loader)
    assert isinstance(iterator, _MultiProcessingDataLoaderIter)
    assert len(list(iterator)) == 6
    torch.set_num_threads(threads)  # its worker has set 1


def test_iterators_of_a_librarys_own_stay() -> None:
    """A subclass that makes its iterator itself, as torchdata's does."""

    class Own(DataLoader):
        def _get_iterator(self) -> Any:
            return iter(["its own"])

    shmloader.install()
    assert list(make(Own)) == ["its own"]


def test_a_torch_that_has_changed_is_named_and_loads_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["shmloader.frameworks.install"], "WHY_NOT_INSTALLED", "it has moved")
    monkeypatch.setattr(errors, "_said", set())
    with pytest.warns(
        RuntimeWarning, match=r"shmloader.install\(\) is not available .* because it has moved"
    ):
        shmloader.install()
    loader = make()
    assert isinstance(iter(loader), _MultiProcessingDataLoaderIter)
    assert len(list(make(shmloader.DataLoader))) == 6


def test_accelerate_is_told_of_or_patched_when_it_looks_at_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate reads ``_is_accelerate_prepared`` first; a module without its names stands for it here."""
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    monkeypatch.delitem(sys.modules, "accelerate.data_loader", raising=False)
    loader = make(shmloader.DataLoader, worker_restarts=2)
    ours = dict(vars(shmloader.DataLoader))
    with pytest.warns(RuntimeWarning, match=r"without its options \(worker_restarts=2\)") as said:
        assert loader._is_accelerate_prepared is False
        assert loader._is_accelerate_prepared is False
    assert len(said) == 1
    shmloader.install()
    for one in (loader, make()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert one._is_accelerate_prepared is False
    module = types.ModuleType("accelerate.data_loader")
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", module)
    with pytest.warns(RuntimeWarning, match="cannot patch this version of accelerate"):
        assert loader._is_accelerate_prepared is False
    shmloader.uninstall()
    assert dict(vars(shmloader.DataLoader)) == ours


def test_what_is_imported_meanwhile_is_found_without_a_look_at_every_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program of thousands of modules pays for it at each `iter()`."""

    class Name(str):
        __slots__ = ()

        def startswith(self, *_: Any) -> bool:
            raise AssertionError("looked at a module that is not Lightning's")

    with shmloader.install():
        monkeypatch.setitem(sys.modules, Name("of_somebody_else"), types.ModuleType("of_somebody_else"))
        assert len(list(DataLoader(Rows()))) == 12


def test_what_somebody_else_replaces_later_stays() -> None:
    """Another library's patch over ours stays; through ours, it calls torch's method."""
    torchs = DataLoader._get_iterator
    shmloader.install()
    over_torchs = DataLoader._get_iterator

    def over_ours(loader: Any) -> Any:
        return over_torchs(loader)

    DataLoader._get_iterator = over_ours
    try:
        shmloader.uninstall()
        assert DataLoader._get_iterator is over_ours
        assert isinstance(iter(make()), _MultiProcessingDataLoaderIter)
        shmloader.install()
        assert isinstance(iter(make()), SlotIterator)
        shmloader.uninstall()
        assert DataLoader._get_iterator is over_ours
    finally:
        DataLoader._get_iterator = torchs


def test_states_are_added_only_if_the_program_asks() -> None:
    """Each install() says anew whether loaders of torch's class have states; ours always have."""
    loader, ours = make(), make(shmloader.DataLoader)
    with shmloader.install():
        assert not hasattr(loader, "state_dict")
        assert not hasattr(loader, "load_state_dict")
        with shmloader.install(stateful=True):
            assert loader.state_dict()["batches"] == 0
            with shmloader.install():
                assert not hasattr(loader, "state_dict")
            assert loader.state_dict()["batches"] == 0
        assert not hasattr(loader, "state_dict")
        assert ours.state_dict()["batches"] == 0


def test_loaders_of_torchs_class_have_states() -> None:
    """The rest of a shuffled epoch, in another loader; an impossible state is empty, with a warning."""
    shmloader.install(stateful=True)
    loader = make(shuffle=True)
    whole = batches(loader)
    torch.manual_seed(3)
    iterator = iter(loader)
    taken = [next(iterator).tolist() for _ in range(2)]
    state = loader.state_dict()
    again = make(shuffle=True)
    again.load_state_dict(state)
    rest = indices(again)
    assert taken == whole[:2]
    assert rest == [[int(row[0]) for row in batch] for batch in whole[2:]]
    cannot = make(multiprocessing_context=ThreadContext())
    with pytest.warns(RuntimeWarning, match="the state of a loader of .* is empty"):
        assert cannot.state_dict() == {}
    cannot.load_state_dict({})


@pytest.mark.filterwarnings("ignore:to resume, 1 samples")
def test_loaders_of_streams_have_states_too() -> None:
    """One sample was taken from a loader with one worker; the other three come from another such loader."""
    shmloader.install(stateful=True)
    loader = make(dataset=Stream(), batch_size=1, num_workers=1)
    next(iter(loader))
    state = loader.state_dict()
    again = make(dataset=Stream(), batch_size=1, num_workers=1)
    again.load_state_dict(state)
    assert [int(batch[0]) for batch in again] == [1, 2, 3]
    with pytest.raises(shmloader.ResumeError, match="made with 1 worker"):
        make(dataset=Stream(), batch_size=1, num_workers=2).load_state_dict(state)
