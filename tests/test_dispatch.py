"""``dispatch="dynamic"``: free workers go on while a batch is slow, and nothing depends on who made what."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loading import Numbered
from robustness.processes import assert_dies_with_its_last_reference
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from shmloader import DataLoader, WorkerDied, WorkerTimeout
from shmloader.dispatch import Balance
from shmloader.seeding import sample_seeds

# A failing example is not made smaller: each try starts processes.
SMALL: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Draws(Dataset):
    """Sample ``i`` is what it draws from each global generator; ``slow`` ones take 20 ms."""

    def __init__(self, length: int, slow: frozenset[int] = frozenset()) -> None:
        self.length, self.slow = length, slow

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.slow:
            time.sleep(0.02)
        return {
            "index": index,
            "torch": torch.rand(2),
            "normal": torch.randn(1),
            "numpy": np.random.standard_normal(3),
            "random": random.gauss(0, 1),
        }


class DrawsInBatches(Draws):
    """Fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class DrawsAndDies(Draws):
    """The first worker that comes to each of ``deadly`` is killed, after it has drawn."""

    def __init__(self, length: int, folder: Path, deadly: tuple[int, ...]) -> None:
        super().__init__(length)
        self.folder, self.deadly = folder, deadly

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        mark = self.folder / str(index)
        if index in self.deadly and get_worker_info() is not None and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


def draws_when_collated(samples: list[Any]) -> Any:
    return default_collate(samples), torch.rand(1), random.random()


def play(dataset: Any, epochs: int = 1, seed: int = 5, **given: Any) -> list[Any]:
    """All batches of some epochs, begun from one state of the generators."""
    torch.manual_seed(seed)
    given.setdefault("dispatch", "dynamic")
    with DataLoader(dataset, persistent_workers=True, **given) as loader:
        return [[plain(batch) for batch in loader] for _ in range(epochs)]


def plain(batch: Any) -> Any:
    """What can be compared with ``==``."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, (torch.Tensor, np.ndarray)) else batch


# --- what comes, and in which order


def as_documented(
    dataset: Draws, batches: list[list[int]], base_seed: int, epoch: int, by_batch: bool
) -> list[Any]:
    """The oracle: the batches of an epoch, one sample after the other, in this process."""
    made = []
    for seq, indices in enumerate(batches):
        samples = []
        for position, index in enumerate(indices):
            if position == 0 or not by_batch:
                seeds = sample_seeds(base_seed, epoch, seq, position if by_batch else position + 1)
                torch.manual_seed(seeds[0])
                random.seed(seeds[1])
                np.random.seed(seeds[2])
            samples.append(dataset[index])
        made.append(plain(default_collate(samples)))
    return made


@settings(max_examples=25, derandomize="CI" in os.environ, **SMALL)
@given(
    lengths=st.lists(st.integers(1, 4), max_size=9),
    slow=st.frozensets(st.integers(0, 7), max_size=3),
    workers=st.integers(1, 3),
    prefetch=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 5), max_size=2),
    by_batch=st.booleans(),
    in_order=st.booleans(),
    kept=st.booleans(),
)
def test_any_loader_gives_what_the_oracle_does(
    lengths: list[int],
    slow: frozenset[int],
    workers: int,
    prefetch: int,
    cuts: list[int],
    by_batch: bool,
    in_order: bool,
    kept: bool,
) -> None:
    """Epochs left early and whole ones, with slow samples, batches of any size, kept or not."""
    dataset = (DrawsInBatches if by_batch else Draws)(8, slow)
    batches = [[(3 * seq + k) % 8 for k in range(length)] for seq, length in enumerate(lengths)]
    with DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=prefetch,
        persistent_workers=True,
        in_order=in_order,
        dispatch="dynamic",
    ) as loader:
        seen: list[list[Any]] = []
        for cut in [*cuts, len(batches)]:
            iterator = iter(loader)
            epoch = [next(iterator) for _ in range(min(cut, len(batches)))]
            seen.append(epoch if kept else [plain(batch) for batch in epoch])
        assert next(iterator, None) is None
        base_seed = iterator._base_seed
        del iterator
    for number, epoch in enumerate(seen):
        expected = as_documented(dataset, batches, base_seed, number, by_batch)
        found = [plain(batch) for batch in epoch]
        if in_order:
            assert found == expected[: len(found)]
        else:
            assert all(batch in expected for batch in found)
            assert len(found) < len(expected) or sorted(map(repr, found)) == sorted(map(repr, expected))


@pytest.mark.parametrize("kind", [Draws, DrawsInBatches])
@pytest.mark.parametrize("size", [None, 3])
def test_draws_are_the_same_with_any_number_of_workers_and_in_every_run(kind: type, size: int | None) -> None:
    """Two epochs, shuffled, which draw differently from each other."""
    dataset = kind(20, frozenset({4, 11}))
    one, *others = [
        play(dataset, 2, batch_size=size, shuffle=True, num_workers=workers) for workers in (1, 2, 3, 3)
    ]
    assert all(other == one for other in others)
    assert one[0] != one[1]
    assert play(dataset, 2, seed=6, batch_size=size, shuffle=True, num_workers=1) != one


@pytest.mark.parametrize("workers", [1, 2])
def test_each_epoch_of_the_same_workers_draws_differently(workers: int) -> None:
    epochs = play(Draws(6), 3, batch_size=2, num_workers=workers)
    drawn = [[batch["torch"] for batch in epoch] for epoch in epochs]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_samples_of_an_epoch_draw_differently_even_of_one_index() -> None:
    """A sampler that gives an index often, as oversampling does, gets as many augmentations."""
    (batches,) = play(Draws(4), batch_sampler=[[1, 1], [1, 1]], num_workers=2)
    for name in ("torch", "numpy", "random"):
        assert len({repr(value) for batch in batches for value in batch[name]}) == 4


def test_what_collate_fn_draws_is_the_same_too() -> None:
    """Also of samples that come from one call, or draw nothing."""
    for dataset in (Draws(12), DrawsInBatches(12), TensorDataset(torch.arange(12))):
        found = [
            play(dataset, batch_size=2, num_workers=workers, collate_fn=draws_when_collated)
            for workers in (1, 3)
        ]
        assert found[0] == found[1]
        assert len({batch[1][0] for batch in found[0][0]}) == 6


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_going_on_without_bad_samples_is_the_same_with_any_number_of_workers(on_error: str) -> None:
    found = []
    for workers in (1, 3):
        with pytest.warns(RuntimeWarning, match="4 bad sample"):
            found.append(play(SomeBad(16), batch_size=4, num_workers=workers, on_error=on_error))
    assert found[0] == found[1]
    assert [len(batch["index"]) for batch in found[0][0]] == [3 if on_error == "skip" else 4] * 4


class SomeBad(Draws):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index % 4 == 2:
            raise ValueError(index)
        return sample


def test_workers_of_another_start_method_draw_the_same(warm_helpers: None) -> None:
    found = [
        play(Draws(8), batch_size=2, num_workers=2, multiprocessing_context=method)
        for method in ("fork", "forkserver")
    ]
    assert found[0] == found[1]


def test_a_dataset_that_seeds_itself_draws_what_it_seeded() -> None:
    """Its own seed is set after the loader's."""
    (batches,) = play(SeedsItself(4), batch_size=1, num_workers=2)
    expected = [float(torch.rand(1, generator=torch.Generator().manual_seed(i))) for i in range(4)]
    assert [batch[0] for batch in batches] == pytest.approx(expected, abs=0)


class SeedsItself(Draws):
    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return float(torch.rand(1))


class OwnGenerators(Draws):
    """Draws from ``get_worker_info().rng``."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info.dataset is self
        rng = info.rng
        drawn = torch.rand(1, generator=rng.torch_generator), rng.random_generator.random()
        return *drawn, rng.numpy_generator.random(), torch.rand(1, generator=rng.torch_generator)


def test_generators_of_the_worker_are_seeded_for_each_sample_in_processes_and_threads() -> None:
    """Threads leave the program's global generators alone."""
    found = [play(OwnGenerators(12), batch_size=3, num_workers=workers) for workers in (1, 3)]
    torch.manual_seed(5)
    state = random.getstate(), np.random.get_state()[1].tolist()
    found.append(play(OwnGenerators(12), batch_size=3, num_workers=2, worker_type="thread"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
    assert found[0] == found[1] == found[2]
    assert len({value for batch in found[0][0] for value in batch[2]}) == 12


# --- who makes what


class Gate(Dataset):
    """Sample ``i`` of ``closed`` waits until ``i + others`` samples were made in all, or for ``patience_s``.

    So until ``others`` were made that come after it. A sample is its index, its worker and whether the wait
    was for nothing.
    """

    def __init__(
        self, length: int, closed: set[int], others: int, patience_s: float = 90.0, items: int = 3
    ) -> None:
        self.length, self.closed, self.others, self.patience_s = length, closed, others, patience_s
        self.made = multiprocessing.get_context("fork").Value("q", 0)
        self.items = items

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        gave_up = 0
        if index in self.closed:
            until_s = time.monotonic() + self.patience_s
            while self.made.value < index + self.others and not gave_up:
                time.sleep(0.001)
                gave_up = int(time.monotonic() > until_s)
        with self.made.get_lock():
            self.made.value += 1
        return torch.tensor([index, get_worker_info().id, gave_up] + [0] * (self.items - 3))


def passed(loader: DataLoader) -> torch.Tensor:
    """The samples of an epoch, whose indices must be in order. No batch is kept."""
    samples = torch.cat([batch.clone() for batch in loader])
    assert samples[:, 0].tolist() == list(range(len(samples)))
    return samples


@pytest.mark.parametrize(("closed", "others"), [({0}, 40), ({30}, 40), ({8, 70}, 25)])
def test_a_slow_batch_does_not_stall_the_other_worker(closed: set[int], others: int) -> None:
    """The other one makes many batches meanwhile, with the default prefetch_factor of 2."""
    with DataLoader(
        Gate(100, closed, others), num_workers=2, dispatch="dynamic", persistent_workers=True
    ) as loader:
        samples = passed(loader)
        assert not samples[:, 2].any()
        first = min(closed)
        meanwhile = samples[first + 4 : first + 4 + others // 2, 1]
        # but for one, which may have been in the slow worker's hands already
        assert (meanwhile == samples[first, 1]).sum() <= 1
        assert loader.statistics().tasks_ahead >= others - 10


def test_with_static_dispatch_it_does() -> None:
    """So the test above proves what it says: nobody lets the slow batch through."""
    with DataLoader(Gate(100, {30}, 40, patience_s=0.3), num_workers=2) as loader:
        assert passed(loader)[30, 2] == 1
        assert loader.statistics().tasks_ahead == 0


def test_out_of_order_a_slow_batch_comes_last() -> None:
    """As soon as its worker has it; batches that the others make come at once."""
    with DataLoader(Gate(40, {3}, 30), num_workers=2, dispatch="dynamic", in_order=False) as loader:
        samples = torch.cat(list(loader))
    assert sorted(samples[:, 0].tolist()) == list(range(40))
    assert not samples[:, 2].any()
    assert samples[:, 0].tolist().index(3) >= 30


def test_a_task_goes_to_a_worker_that_is_free() -> None:
    """One worker of three is held up in the first batch: it makes no other until the gate opens."""
    with DataLoader(
        Gate(60, {0}, 50), num_workers=3, prefetch_factor=1, dispatch="dynamic", batch_size=1
    ) as loader:
        samples = passed(loader)
    assert not samples[:, 2].any()
    assert samples[0, 1] not in samples[1:50, 1]
    assert len(set(samples[1:50, 1].tolist())) == 2


def test_the_next_slow_batch_finds_the_window_wide() -> None:
    with DataLoader(Gate(400, {10}, 30), num_workers=2, dispatch="dynamic") as loader:
        iterator = iter(loader)
        for _ in range(11):
            next(iterator)
        wide = iterator._balance.window
        assert 30 <= wide <= 70
        assert 4 < len(iterator._exchange.outstanding) <= wide  # further ones were sent though nobody waits
        iterator.close()


def test_the_window_narrows_by_one_for_a_whole_window_of_batches() -> None:
    pool, outstanding = _Pool(), dict.fromkeys(range(10), 0)
    balance = Balance(pool, 2, 2, 0.0, outstanding, {})  # type: ignore[arg-type]
    while balance.window < 9:
        assert balance.may_widen(balance.window)
    assert pool.warm_slots == 11
    widths = []
    for _ in range(9 + 8 + 7 + 6 + 5 + 20):
        assert balance.may_refill(balance.window - 1)
        assert not balance.may_refill(balance.window)
        balance.note_return()
        widths.append(balance.window)
    assert [widths.count(width) for width in (9, 8, 7, 6, 5)] == [8, 8, 7, 6, 5]
    assert widths[-20:] == [4] * 20  # as it began, and no less
    assert pool.warm_slots == 6


def test_no_more_slots_are_made_than_the_bound() -> None:
    """prefetch_factor x workers + 2, and 64; then the window is full and the gate stays closed."""
    dataset = Gate(200, {5}, 150, patience_s=0.5)
    with DataLoader(dataset, num_workers=2, dispatch="dynamic", persistent_workers=True) as loader:
        samples = passed(loader)
        assert samples[5, 2] == 1
        assert len(loader._iterator.pool.slots) <= 2 * 2 + 2 + 64
        assert loader.statistics().spills == 0
        # the next epoch begins without the memory that the slow batch took
        assert iter(loader) is loader._iterator
        assert sum(slot.nbytes > 0 for slot in loader._iterator.pool.slots) <= 2 * 2 + 2


def test_the_memory_budget_bounds_how_far_others_run_ahead() -> None:
    """No batch is copied for it, and the slots together stay within the budget."""
    items, budget = 1 << 15, 12 << 18  # a batch is 1/4 MiB
    dataset = Gate(60, {5}, 40, patience_s=0.5, items=items)
    with DataLoader(
        dataset, num_workers=2, dispatch="dynamic", persistent_workers=True, memory_budget_nbytes=budget
    ) as loader:
        most = 0
        seen = []
        for batch in loader:
            seen.append(batch[0, :3].tolist())
            most = max(most, sum(slot.nbytes for slot in loader._iterator.pool.slots))
        assert [index for index, _, _ in seen] == list(range(60))
        assert seen[5][2] == 1
        assert budget // 2 < most <= budget
        now = loader.statistics()
        assert now.tasks_ahead > 0
        assert now.spills == 0


def test_batches_that_are_kept_stay_what_they_are() -> None:
    """More of them than there are slots, while a slow one lets others run ahead."""
    with DataLoader(
        Gate(150, {5, 100}, 30, patience_s=0.5), num_workers=2, dispatch="dynamic", persistent_workers=True
    ) as loader:
        kept = list(loader)
        assert len(loader._iterator.pool.slots) <= 2 * 2 + 2 + 64
        passed(loader)
        assert torch.cat(kept)[:, 0].tolist() == list(range(150))
        assert kept[5][0, 2] == 0


@settings(max_examples=200, derandomize="CI" in os.environ, **SMALL)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["send", "answer", "return"]), st.integers(0, 9)), max_size=60),
    workers=st.integers(1, 4),
)
def test_any_task_goes_to_the_worker_with_the_fewest_to_do(
    steps: list[tuple[str, int]], workers: int
) -> None:
    """Against counting: whatever was sent, answered in each worker's order, and returned."""
    outstanding: dict[int, int] = {}
    arrived: dict[int, int] = {}
    balance = Balance(_Pool(), workers, 2, 0.0, outstanding, arrived)  # type: ignore[arg-type]
    seq = 0
    for step, which in steps:
        to_do = [[s for s, w in outstanding.items() if w == k and s not in arrived] for k in range(workers)]
        if step == "send":
            worker_id = balance.choose(seq)
            assert len(to_do[worker_id]) == min(map(len, to_do))
            outstanding[seq] = worker_id
            seq += 1
        elif step == "answer" and to_do[which % workers]:
            arrived[to_do[which % workers][0]] = 0
        elif step == "return" and arrived:
            done = list(arrived)[which % len(arrived)]
            del arrived[done], outstanding[done]
        idle = any(
            not [s for s, w in outstanding.items() if w == k and s not in arrived] for k in range(workers)
        )
        assert balance.is_stalled(0) == idle


def test_what_an_epoch_left_undone_does_not_count_in_the_next() -> None:
    outstanding: dict[int, int] = {}
    balance = Balance(_Pool(), 2, 2, 0.0, outstanding, {})  # type: ignore[arg-type]
    for seq in range(4):
        outstanding[seq] = balance.choose(seq)
    assert not balance.is_stalled(0)
    balance.begin()
    assert balance.is_stalled(0)


class _Pool:
    most_tasks, base_slots, warm_slots = 4, 6, 6

    def has_room_for_more(self) -> bool:
        return True


# --- workers that die or hang


def test_an_epoch_is_the_same_though_workers_die(tmp_path: Path) -> None:
    """Also what the samples draw: those that are made again draw the same numbers again."""
    expected = play(Draws(40), 2, batch_size=4, num_workers=1)
    torch.manual_seed(5)
    with DataLoader(
        DrawsAndDies(40, tmp_path, (1, 18, 33)),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        worker_restarts=3,
        dispatch="dynamic",
    ) as loader:
        assert [[plain(batch) for batch in loader] for _ in range(2)] == expected
        assert loader.statistics().worker_restarts == 3


def test_a_worker_that_starts_in_a_later_epoch_draws_that_epochs_numbers(tmp_path: Path) -> None:
    expected = play(Draws(40), 3, batch_size=4, num_workers=1)
    torch.manual_seed(5)
    with DataLoader(
        DrawsAndDies(40, tmp_path, ()),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        worker_restarts=2,
        dispatch="dynamic",
    ) as loader:
        assert [plain(batch) for batch in loader] == expected[0]
        for epoch in (1, 2):
            os.kill(loader._iterator._workers[epoch % 2].pid, signal.SIGKILL)
            assert [plain(batch) for batch in loader] == expected[epoch]
        assert loader.statistics().worker_restarts == 2


def test_a_worker_may_die_while_the_other_runs_ahead() -> None:
    """The one that runs ahead is killed: its many tasks are made again, none is lost."""
    with DataLoader(
        Gate(80, {7}, 40), num_workers=2, dispatch="dynamic", worker_restarts=2, timeout=60
    ) as loader:
        iterator = iter(loader)
        victim = None
        samples = []
        for batch in iterator:
            samples.append(batch)
            if len(samples) == 3:
                victim = iterator._workers[1 - int(samples[0][0, 1])].pid
                os.kill(victim, signal.SIGKILL)
        assert torch.cat(samples)[:, 0].tolist() == list(range(80))
        assert loader.statistics().worker_restarts == 1


def test_without_restarts_a_death_is_an_error_that_names_what_it_held(tmp_path: Path) -> None:
    dataset = DrawsAndDies(40, tmp_path, (20,))
    with DataLoader(dataset, batch_size=4, num_workers=2, dispatch="dynamic") as loader:
        with pytest.raises(WorkerDied, match=r"20, 21, 22, 23") as caught:
            list(loader)
        assert caught.value.indices[0] == [20, 21, 22, 23]
        assert [int(batch["index"][0]) for batch in loader] == list(range(0, 40, 4))


class Hangs(Draws):
    def __init__(self, length: int, folder: Path) -> None:
        super().__init__(length)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        mark = self.folder / "hung"
        if index == 6 and not mark.exists():
            mark.touch()
            time.sleep(60)
        time.sleep(0.02)
        return super().__getitem__(index)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_hangs_is_found_though_the_other_runs_ahead(tmp_path: Path, restarts: int) -> None:
    """Once the wait is as long as the timeout, nobody is given more to do."""
    with DataLoader(
        Hangs(200, tmp_path), num_workers=2, dispatch="dynamic", timeout=0.4, worker_restarts=restarts
    ) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        if restarts:
            assert [int(batch["index"]) for batch in iterator] == list(range(6, 200))
            assert loader.statistics().worker_restarts == 1
        else:
            with pytest.raises(WorkerTimeout, match=r"timed out after 0\.4.*\[6\]"):
                next(iterator)
            assert len(iterator._exchange.outstanding) < 50  # of 70 that the slots would have allowed
            for worker in iterator._workers:  # closing would wait for the one that hangs
                worker.kill()


# --- arguments and lives


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_arguments_are_checked() -> None:
    assert DataLoader(Numbered(3)).dispatch == "static"
    with pytest.raises(ValueError, match="dispatch must be one of 'static', 'dynamic', not 'free'"):
        DataLoader(Numbered(3), dispatch="free")
    with pytest.raises(ValueError, match="dispatch='dynamic' needs a map-style dataset: each worker has a"):
        DataLoader(Stream(), dispatch="dynamic")


def test_without_workers_it_has_no_effect() -> None:
    assert [int(batch) for batch in DataLoader(Numbered(3, items=1), dispatch="dynamic")] == [0, 1, 2]


def test_an_error_of_the_sampler_comes_once_and_the_batches_before_it_come_all() -> None:
    """It is raised while the program waits for a slow batch, when a further task was to be sent."""
    dataset = Gate(40, {4}, 40, patience_s=1)
    loader = DataLoader(dataset, sampler=BadSampler(), num_workers=2, dispatch="dynamic")
    iterator = iter(loader)
    found: list[Any] = []
    while True:
        try:
            found.append(int(next(iterator)[0, 0]))
        except StopIteration:
            break
        except ArithmeticError:
            found.append("error")
    assert sorted(entry for entry in found if entry != "error") == list(range(10))
    assert found.count("error") == 1
    loader.close()


class BadSampler:
    def __iter__(self) -> Iterator[int]:
        yield from range(10)
        raise ArithmeticError("no more")


def test_an_iterator_dies_with_its_last_reference() -> None:
    """Nothing that waits for its workers holds it."""
    loader = DataLoader(Gate(50, {2}, 10), num_workers=2, dispatch="dynamic")
    assert_dies_with_its_last_reference(loader, batches=5)
