"""``num_workers="auto"`` and ``prefetch_factor="auto"``: the choices, and the meaning of attributes then."""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from autotune_datasets import Draws, epochs, plain, processes
from loading import Numbered
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shmloader import DataLoader
from shmloader.memory.limits import Cores
from shmloader.settings import AutoCount

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Jitter(Draws):
    """One sample in twenty takes long, the others 4 ms."""

    slow_s = 0.08

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        time.sleep(self.slow_s if index % 20 == 10 else 0.004)
        return super().__getitem__(index)


class Busy(Dataset):
    """A dataset whose samples keep a core busy for 2 ms each, as far as the machine lets them."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> int:
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            pass
        return index


# --- the choices


def test_slow_samples_get_as_many_workers_as_there_are_cores(three_cores: None) -> None:
    """The program does nothing; a worker needs 12 ms for each batch."""
    with DataLoader(Draws(120, 0.012), num_workers="auto", persistent_workers=True) as loader:
        assert loader.num_workers == 1
        assert loader.statistics().autotune is None  # nothing was begun
        list(loader)
        chosen = loader.statistics().autotune
        assert chosen.settled, chosen
        assert chosen.num_workers == loader.num_workers == processes(loader) == 3
        assert chosen.batches <= 120
        assert chosen.prefetch_factor == loader.prefetch_factor == 2
        assert chosen.why.startswith("one worker for each of 3 usable cores; a batch takes a worker")
        pids = [process.pid for process in loader._iterator._workers]
        list(loader)
        assert loader.statistics().autotune == chosen  # for good
        assert [process.pid for process in loader._iterator._workers] == pids


def test_a_program_that_is_slower_keeps_one_worker(three_cores: None) -> None:
    """No worker is started that is not needed."""
    with DataLoader(Draws(101), num_workers="auto", persistent_workers=True) as loader:
        for _ in loader:
            time.sleep(0.01)
            assert processes(loader) == 1
        chosen = loader.statistics().autotune
        assert chosen.settled
        assert chosen.num_workers == 1
        # Beside other programs it may wait now and then for a worker that gets no core.
        assert "keep up" in chosen.why or "workers had time" in chosen.why


def test_workers_are_only_ever_added(three_cores: None) -> None:
    """A loader that begins with three, such as one built from another one's attributes, keeps them."""
    with DataLoader(Draws(220), num_workers=AutoCount(3), persistent_workers=True) as loader:
        for _ in loader:
            time.sleep(0.001)
            assert processes(loader) == 3
        chosen = loader.statistics().autotune
        assert chosen.settled
        assert chosen.num_workers == loader.num_workers == 3


def test_real_work_settles_within_the_cores_of_this_machine() -> None:
    """Other work on the machine does not matter, and the batches are those of the dataset."""
    with DataLoader(
        Busy(), batch_size=2, num_workers="auto", prefetch_factor="auto", persistent_workers=True
    ) as loader:
        found = [[int(i) for i in batch] for _ in range(2) for batch in loader]
        assert found == [[i, i + 1] for i in range(0, 320, 2)] * 2
        chosen = loader.statistics().autotune
        assert chosen.settled
        assert chosen.batches <= 200
        assert 1 <= chosen.num_workers <= len(os.sched_getaffinity(0))
        assert processes(loader) == chosen.num_workers


def test_one_slow_batch_in_twenty_makes_more_be_made_in_advance() -> None:
    """Workers take turns, like torch's: batches and draws are torch's with any choice."""
    given: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "timeout": 60}
    dataset = Jitter(200)
    dataset.slow_s = 0.4  # long also where a busy machine makes 20 ms of the program's 4
    with DataLoader(dataset, prefetch_factor="auto", **given) as loader:
        seen = []
        torch.manual_seed(7)
        for batch in loader:
            seen.append(plain(batch))
            time.sleep(0.004)
        chosen = loader.statistics().autotune
        assert chosen.settled
        assert chosen.num_workers == 2
        assert chosen.prefetch_factor == loader.prefetch_factor > 4, chosen
        assert len(loader._iterator._exchange.table.unreturned) == 0
        again = epochs(loader)[0]
    torch.manual_seed(7)
    theirs = TorchLoader(Draws(200), **given)
    assert [plain(batch) for batch in theirs] == seen
    assert len(again) == 200


def test_short_epochs_settle_together_and_later_ones_begin_with_what_was_chosen(three_cores: None) -> None:
    """Workers end with each epoch of 12 batches."""
    loader = DataLoader(Draws(12, 0.012), num_workers="auto")
    begun_with = []
    while not (loader.statistics().autotune and loader.statistics().autotune.settled):
        iterator = iter(loader)
        begun_with.append(len(iterator._workers))
        list(iterator)
        assert len(begun_with) <= 17
    assert begun_with[0] == 1
    assert loader.num_workers == 3, loader.statistics().autotune
    iterator = iter(loader)
    assert len(iterator._workers) == 3
    list(iterator)
    loader.close()


def test_a_worker_that_is_added_is_counted_and_measured(three_cores: None) -> None:
    with DataLoader(Draws(100, 0.012), num_workers="auto") as loader:
        with loader.profile() as profile:
            list(loader)
        figures, report = loader.statistics(), profile.report()
    assert (figures.num_workers, report.num_workers) == (3, 3)
    assert sum(count for count, _ in report.by_worker.values()) == 100


def test_only_the_choice_of_workers_is_said_to_be_one() -> None:
    for given, chooses in (
        ({"num_workers": "auto"}, True),
        ({"num_workers": 1, "prefetch_factor": "auto"}, False),
    ):
        with DataLoader(Numbered(1), **given) as loader:
            list(loader)
            assert loader.statistics().autotune.chooses_workers is chooses


def test_epochs_too_short_to_measure_settle_too() -> None:
    """200 epochs of one batch each settle."""
    with DataLoader(
        Numbered(1), num_workers="auto", prefetch_factor="auto", persistent_workers=True
    ) as loader:
        for _ in range(200):
            list(loader)
        chosen = loader.statistics().autotune
    assert chosen.settled
    assert chosen.batches == 200
    assert (chosen.num_workers, chosen.prefetch_factor) == (1, 2)


def test_ranks_that_share_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives the number of ranks; ranks with cores of their own keep them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for host, expected in ((Cores(8, 8, None), 2), (Cores(8, 2, None), 2), (Cores(2, 2, None), 1)):
        monkeypatch.setattr("shmloader.order.auto.cores", lambda host=host: host)
        loader = DataLoader(Info(2), num_workers="auto")
        assert {int(batch[0, 1]) for batch in loader} == {expected}


def test_a_stream_may_have_its_batches_in_advance_chosen() -> None:
    with DataLoader(Stream(), num_workers=2, prefetch_factor="auto") as loader:
        found = [int(value) for _ in range(5) for batch in loader for value in batch]
        assert sorted(found) == sorted(list(range(30)) * 10)
        assert loader.statistics().autotune.settled


def test_a_later_epoch_begins_early_with_what_was_chosen() -> None:
    """With ``prefetch_epochs`` workers take turns; the number of early tasks is the one chosen by then."""
    given: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_epochs": True}
    with DataLoader(Jitter(100), prefetch_factor="auto", **given) as loader:
        found = epochs(loader, 3)
        assert loader.statistics().epochs_prefetched == 2
        assert loader.statistics().autotune.settled
    torch.manual_seed(7)
    theirs = TorchLoader(Draws(100), num_workers=2, persistent_workers=True)
    assert [[plain(batch) for batch in theirs] for _ in range(3)] == found


# --- the attributes


def test_the_numbers_are_plain_to_read_and_mean_auto_to_a_new_loader(three_cores: None) -> None:
    """Frameworks build loaders from the attributes of others, and copy them."""
    with DataLoader(
        Draws(100, 0.012), num_workers="auto", prefetch_factor="auto", persistent_workers=True
    ) as loader:
        list(loader)
        assert isinstance(loader.num_workers, int)
        assert f"{loader.num_workers}" == "3"
        assert loader.dispatch == "dynamic"
        public = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
        for name in ("batch_size", "sampler", "drop_last"):
            del public[name]
        loader.close()  # live iterators are not pickled
        for other in (DataLoader(**public), copy.copy(loader), pickle.loads(pickle.dumps(loader))):
            assert (other.num_workers, other.prefetch_factor) == (3, loader.prefetch_factor)
            assert other.statistics().autotune is None
            next(iter(other))
            assert other.statistics().autotune.batches == 1
            assert not other.statistics().autotune.settled
            other.close()
        fixed = DataLoader(Draws(10), num_workers=int(loader.num_workers))
        next(iter(fixed))
        assert fixed.statistics().autotune is None
        assert fixed.dispatch == "static"
        fixed.close()


def test_a_number_that_the_program_sets_is_not_changed(three_cores: None) -> None:
    """torch allows setting it; it counts from the next iterator on."""
    loader = DataLoader(Draws(60, 0.003), num_workers="auto")
    iterator = iter(loader)
    next(iterator)
    loader.num_workers = 2
    list(iterator)
    assert loader.num_workers == 2
    iterator = iter(loader)
    assert len(iterator._workers) == 2
    assert len(list(iterator)) == 60
    assert loader.statistics().autotune is None
    loader.close()
    deep = DataLoader(Draws(60, 0.003), num_workers=2, prefetch_factor="auto")
    list(deep)
    deep.num_workers = 3
    assert len(list(deep)) == 60
    assert deep.statistics().autotune.num_workers == 3
    deep.close()


def test_worker_info_tells_the_most_workers_there_may_be(three_cores: None) -> None:
    """An array with a place for each worker has room for all."""
    with DataLoader(Info(100), num_workers="auto", persistent_workers=True) as loader:
        ids: set[int] = set()
        deadline = time.monotonic() + 60
        while not ids >= {0, 1} and time.monotonic() < deadline:  # a busy machine takes long to start one
            found = torch.cat(list(loader))
            assert set(found[:, 1].tolist()) == {3}
            ids.update(found[:, 0].tolist())
        assert {0, 1} <= ids <= {0, 1, 2}


class Info(Draws):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.003)
        info = get_worker_info()
        return torch.tensor([info.id, info.num_workers])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(30)


def test_arguments_are_checked() -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: DataLoader(Stream(), num_workers="auto"),
            "num_workers='auto' needs a map-style dataset: each",
        ),
        (lambda: DataLoader(Numbered(4), num_workers="auto", dispatch="static"), "needs dispatch='dynamic'"),
        (
            lambda: DataLoader(Numbered(4), prefetch_factor="auto"),
            "could only be specified in multiprocessing",
        ),
    ]
    for build, match in refused:
        with pytest.raises(ValueError, match=match):
            build()
    assert DataLoader(Numbered(4), num_workers="auto", dispatch="dynamic").dispatch == "dynamic"
