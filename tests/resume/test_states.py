"""States at any moment: their contents, the batches they count, and copies of loaders."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from epoch_datasets import Tells
from resume_datasets import DiesOnce, Drawing, Late, OwnGenerator, Plain, Stateful
from resume_loaders import build, fetched, flat, started, take, values
from torch.utils.data import Dataset, IterableDataset

from shmloader import BadSampleWarning, DataLoader, ResumeError, errors
from shmloader.resume.compatibility import behind, signed


def test_a_state_has_the_same_keys_at_any_moment_and_starts_no_worker() -> None:
    loader = build()
    states = [loader.state_dict()]
    assert loader.statistics().slots_free == 0
    iterator = iter(loader)
    states.append(loader.state_dict())
    for _ in iterator:
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    assert len({frozenset(state) for state in states}) == 1
    assert {type(value) for state in states for value in state.values()} <= {int, str, bool, type(None)}
    assert max(len(json.dumps(state)) for state in states) < 1024
    assert [state["batches"] for state in states] == [0, *range(11), 10]
    assert [state["finished"] for state in states] == [False] * 12 + [True]


def test_the_documentation_explains_all_keys() -> None:
    text = (Path(__file__).parents[2] / "docs/resume-exact.md").read_text()
    table = text.partition("## What is in a state")[2].partition("\n## ")[0]
    keys = [re.findall("`([^`]+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    assert sorted(itertools.chain(*keys)) == sorted(build().state_dict())


@pytest.mark.parametrize("asks", [False, True])
def test_a_state_in_mid_epoch_is_of_the_epoch_that_was_set_before_it(asks: bool) -> None:
    """Workers begin with the next one later, so the rest of this epoch is not told of it."""
    loader = DataLoader(Tells(), num_workers=1, persistent_workers=True)
    loader.set_epoch(3)
    iterator = iter(loader)
    assert next(iterator) == ["3"]
    if asks:
        loader.state_dict()
    loader.set_epoch(4)
    state = loader.state_dict()
    again = DataLoader(Tells(), num_workers=1, persistent_workers=True)
    again.load_state_dict(state)
    assert list(again) == list(iterator) == [["3"]] * 3
    assert loader.state_dict()["set_epoch"] == 4
    assert list(loader) == [["4"]] * 4
    loader.close()
    again.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_does_not_go_on_with_a_dataset_that_is_told_of_another(workers: int) -> None:
    def make(dataset: Any) -> DataLoader[Any]:
        return DataLoader(dataset, num_workers=workers)

    first = make(Tells())
    first.set_epoch(3)
    next(iter(first))
    state = first.state_dict()
    again = make(Tells())
    again.load_state_dict(state)
    again.set_epoch(0)
    with pytest.raises(ResumeError, match=r"set_epoch\(3\).*told of epoch 0 since.*begin with epoch 3"):
        iter(again)
    again.set_epoch(3)
    assert list(again) == [["3"]] * 3
    again.load_state_dict(signed(state | {"finished": True}))
    again.set_epoch(5)
    assert list(again) == [["5"]] * 4


def test_a_state_is_new_each_time() -> None:
    """accelerate adds a key to the state, which is ignored when the state is loaded."""
    loader = build(0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    state["_iterator_finished"] = True
    assert "_iterator_finished" not in loader.state_dict()
    state["batches"] = 1
    again = build(0)
    again.load_state_dict(state)
    assert values(again) == values(iterator)


def test_the_state_of_an_epoch_of_a_million_batches_is_no_larger() -> None:
    loader = build(0, length=4_000_000)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 1024


def test_an_empty_state_does_nothing() -> None:
    loader, other = build(0), build(0)
    loader.load_state_dict({})
    assert values(loader) == values(other)


def test_a_loaded_state_is_the_loaders_until_it_iterates() -> None:
    loader = build(0)
    iterator = iter(loader)
    take(iterator, 3)
    state = loader.state_dict()
    other = build(0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert take(iter(other), 1) == take(iterator, 1)
    assert other.state_dict()["batches"] == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_that_of_the_latest_epoch_or_of_the_loaded_state(workers: int) -> None:
    """States of an epoch that was left are no longer used."""
    with build(workers) as loader:
        iterator = iter(loader)
        take(iterator, 3)
        third = loader.state_dict()
        take(iterator, 1)
        assert loader.state_dict() == signed(third | {"batches": 4})
        loader.load_state_dict(third)
        assert loader.state_dict() == third
        iterator = iter(loader)
        assert loader.state_dict() == third
        take(iterator, 2)
        assert loader.state_dict()["batches"] == 5
        del iterator
        iterator = iter(loader)
        assert loader.state_dict()["batches"] == 0
        take(iterator, 1)
        assert loader.state_dict()["batches"] == 1
        values(iterator)
        assert loader.state_dict()["finished"]


class Ends(Plain):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise StopIteration
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "given",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "prefetch_epochs": True, "prefetch_factor": 1},
    ],
)
def test_an_epoch_that_a_sample_ends_is_finished(given: dict[str, Any]) -> None:
    """The program's loop has ended, so a resumed program begins its next epoch."""

    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        persistent = bool(given["num_workers"])
        return DataLoader(
            Ends(12), 2, shuffle=True, generator=generator, persistent_workers=persistent, **given
        )

    with make() as loader:
        epochs = [values(iter(loader)) for _ in range(3)]
    with make() as loader:
        assert values(iter(loader)) == epochs[0]
        state = loader.state_dict()
    assert state["finished"]
    with make() as loader:
        loader.load_state_dict(state)
        assert [values(iter(loader)) for _ in range(2)] == epochs[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_goes_on_after_that_is_not(workers: int) -> None:
    with DataLoader(Ends(12), 2, num_workers=workers) as loader:
        iterator = iter(loader)
        assert values(iterator) == [[0, 1], [2, 3]]
        assert take(iterator, 1) == [[6, 7]]
        state = loader.state_dict()
    assert (state["batches"], state["finished"]) == (4, False)
    with DataLoader(Ends(12), 2, num_workers=workers) as loader:
        loader.load_state_dict(state)
        assert values(iter(loader)) == [[8, 9], [10, 11]]


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_copy_has_the_loaded_state_too(kind: str, workers: int) -> None:
    loader = build(0)
    iterator = iter(loader)
    take(iterator, 3)
    with build(workers) as other:
        other.load_state_dict(loader.state_dict())
        with COPIES[kind](other) as copied:
            assert copied.state_dict() == loader.state_dict()
            rest = values(iterator)
            assert values(copied) == rest
        if kind != "copy":  # which has the generator in common
            assert values(other) == rest


def rebuilt(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Rebuild a loader as Lightning does."""
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)


def test_a_loader_made_of_one_with_a_state_warns_that_it_begins_anew() -> None:
    """The warning comes once, and not if the first loader has resumed from its state."""
    loader = build(0)
    loader.load_state_dict(started(build(0)))
    other = rebuilt(loader)
    with pytest.warns(RuntimeWarning, match="load_state_dict.. was called on another loader of this dataset"):
        assert len(values(other)) == 10
    assert len(values(other)) == 10
    assert len(values(loader)) == 9
    assert len(values(rebuilt(loader))) == 10
    assert len(values(build(0))) == 10  # of another dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_that_was_returned_is_fetched_again(workers: int, tmp_path: Path) -> None:
    loader = build(0)
    iterator = iter(loader)
    seen = take(iterator, 6)
    log = tmp_path / "fetched"
    with build(workers) as other:
        other.dataset.log = log  # type: ignore[attr-defined]
        other.load_state_dict(loader.state_dict())
        rest = values(other)
    assert sorted(fetched(log)) == sorted(flat(rest))
    assert sorted(flat(seen + rest)) == list(range(40))


def let_late_samples_go(log: Path) -> None:
    """Else closing would wait for the worker that waits."""
    with log.open("a") as file:
        file.write("0\n" * 16)


def test_out_of_order_the_set_of_samples_is_exact(tmp_path: Path) -> None:
    """The first batch comes late, after others, which are not made again."""

    def make(workers: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(Late(80, log=tmp_path / "fetched"), 4, num_workers=workers, **options)

    with make(2, in_order=False) as loader:
        iterator = iter(loader)
        seen = take(iterator, 2)
        state = loader.state_dict()
        let_late_samples_go(tmp_path / "fetched")
    assert state["batches"] == 0
    assert state["batches_behind"]
    for workers in (0, 2):
        with make(workers) as other:
            other.load_state_dict(state)
            iterator = iter(other)
            again = seen + take(iterator, 2)
            with make(1, in_order=False) as third:
                third.load_state_dict(other.state_dict())
                assert sorted(flat(again + values(third))) == list(range(80))


def test_positions_that_came_early_are_left_out_once() -> None:
    """The same, with a state that is certain to have such positions."""
    loader = build(0)
    batches = values(loader)
    loader = build(0)
    next(iter(loader))
    state = signed(loader.state_dict() | {"batches": 2, "batches_behind": "3,5"})
    for workers in (0, 2):
        with build(workers) as other:
            other.load_state_dict(state)
            assert other.state_dict() == state
            iterator = iter(other)
            assert other.state_dict()["batches_behind"] == "3,5"
            assert take(iterator, 1) == [batches[2]]
            assert (other.state_dict()["batches"], other.state_dict()["batches_behind"]) == (4, "5")
            assert values(iterator) == [batches[4], *batches[6:]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_state_counts_batches_that_came_early_and_are_not_drawn_again_yet(
    stateful: bool, workers: int
) -> None:
    """The batch before them is the last that the sampler has given: it knows nothing of the later ones."""

    def make(workers: int = 0) -> DataLoader[Any]:
        sampler = Stateful(40) if stateful else OwnGenerator(40, torch.Generator().manual_seed(1))
        return DataLoader(Plain(40), 4, sampler=sampler, num_workers=workers)

    batches = values(make())
    loader = make()
    loader.state_dict()  # from now on, the sampler's state is read with each batch
    iterator = iter(loader)
    take(iterator, 2)
    state = signed(loader.state_dict() | {"batches_behind": "3,4"})
    with make() as other:
        other.load_state_dict(state)
        iterator = iter(other)
        assert take(iterator, 1) == [batches[2]]
        state = other.state_dict()
        assert (state["batches"], state["batches_behind"]) == (5, "")
    with make(workers) as third:
        third.load_state_dict(state)
        assert values(third) == batches[5:]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_left_out_and_batches_that_raise_count(workers: int) -> None:
    def make(on_error: Any) -> DataLoader[Any]:
        return DataLoader(Drawing(12, bad=(2, 3)), 2, num_workers=workers, on_error=on_error)

    loader = make("raise")
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="sample 2 is bad"):
        next(iterator)
    assert loader.state_dict()["batches"] == 2
    loader.close()
    other = make("skip")
    iterator = iter(other)
    take(iterator, 2)
    assert other.state_dict()["batches"] == 3
    with pytest.warns(BadSampleWarning, match="2 bad"):
        other.close()


def test_a_worker_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    def make() -> DataLoader[Any]:
        dataset = DiesOnce(40, tmp_path / "died")
        return DataLoader(dataset, 4, num_workers=2, worker_restarts=1, seed_per_sample=True)

    with make() as loader:
        iterator = iter(loader)
        seen = take(iterator, 4)
        assert loader.statistics().worker_restarts == 1
        state, rest = loader.state_dict(), values(iterator)
        assert [batch[0] for batch in seen + rest] == list(range(0, 40, 4))
    with make() as other:
        other.load_state_dict(state)
        assert values(other) == rest


def test_the_batch_of_an_interrupted_call_comes_again() -> None:
    """Ctrl-C comes while a sample is fetched without workers: the program did not get that batch."""
    loader = DataLoader(Plain(40), 4)
    iterator = iter(loader)
    take(iterator, 2)
    loader.dataset.interrupt_at = 8  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert loader.state_dict()["batches"] == 2


def test_the_batch_of_a_call_that_is_interrupted_late_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes after the batch was taken from a worker, and before it is returned."""
    with build(1) as loader:
        iterator = iter(loader)
        take(iterator, 2)

        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(iterator._lifecycle, "leave", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert loader.state_dict()["batches"] == 2


class WithState(Plain):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


class WithWeights(torch.nn.Module, Dataset[Any]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("make", "count"), [(lambda: WithState(4), 1), (WithWeights, 0)])
def test_a_map_style_datasets_own_state_is_left_out_with_one_warning(
    make: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loader in (DataLoader(make()), DataLoader(make())):
            before = len(caught)
            values(loader)
            assert len(caught) == before  # nobody has asked
            loader.state_dict()
            loader.state_dict()
    found = [str(one.message) for one in caught]
    assert len(found) == count
    assert all("leaves out the state_dict() of its map-style dataset, WithState" in text for text in found)


class Opens(Plain):
    """All samples but the bad ones wait until a file is there."""

    def __init__(self, length: int, bad: tuple[int, ...], file: Path) -> None:
        super().__init__(length, bad)
        self.file = file

    def __getitem__(self, index: int) -> torch.Tensor:
        while index not in self.bad and not self.file.exists():
            time.sleep(0.01)
        if index in self.bad:
            raise ValueError(index)
        return torch.tensor([index])


class OpensStream(IterableDataset[torch.Tensor]):
    """The same as a stream."""

    def __init__(self, *arguments: Any) -> None:
        self.samples = Opens(*arguments)

    def __iter__(self) -> Any:
        return map(self.samples.__getitem__, range(len(self.samples)))


@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning", "ignore:to resume:RuntimeWarning")
@pytest.mark.parametrize("dataset", [Opens, OpensStream])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_was_left_out_stays_so_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Any, in_order: bool
) -> None:
    """The interrupted call had left out the first batch and waited for the second; then the loop goes on."""

    def make() -> DataLoader[Any]:
        samples = dataset(40, (0, 1, 2, 3), tmp_path / "open")
        workers = 2 if dataset is Opens else 1  # each has the whole stream
        return DataLoader(samples, 4, num_workers=workers, in_order=in_order, on_error="skip")

    with make() as loader:
        iterator = iter(loader)
        wait = iterator._all_workers.wait

        def interrupt(timeout_s: float | None) -> Any:
            if loader.statistics().bad_samples:
                raise KeyboardInterrupt
            return wait(timeout_s)

        monkeypatch.setattr(iterator._all_workers, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        monkeypatch.undo()
        assert loader.state_dict()["batches"] == 1
        (tmp_path / "open").touch()
        seen = take(iterator, 3)
        state = loader.state_dict()
        assert state["batches"] + len(behind(state)) == 4
        rest = values(iterator)
        assert sorted(flat(seen + rest)) == list(range(4, 40))
        assert (loader.state_dict()["batches"], loader.state_dict()["batches_behind"]) == (10, "")
    with make() as other:
        other.load_state_dict(state)
        assert sorted(values(other)) == sorted(rest)


def test_a_batch_in_whose_place_the_sampler_raises_counts() -> None:
    """As in torch, the batch is gone; without order the count would stay at its place for ever."""

    class Raises(Stateful):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.position += 1
            if self.position == 7:
                raise LookupError
            if self.position > 13:
                raise StopIteration
            return self.position

    with DataLoader(
        Plain(40), sampler=Raises(40), batch_size=None, num_workers=2, in_order=False, prefetch_factor=2
    ) as loader:
        iterator, errors = iter(loader), 0
        while True:
            try:
                next(iterator)
            except StopIteration:
                break
            except LookupError:
                errors += 1
        state = loader.state_dict()
        assert (errors, state["batches"], state["batches_behind"]) == (1, 12, "")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_count_goes_on_after_an_interrupt_where_an_earlier_program_had_no_order(
    tmp_path: Path, workers: int
) -> None:
    """Without workers the batch of the interrupted call is gone, as in torch."""
    with DataLoader(Late(40, log=tmp_path / "log"), 4, num_workers=2, in_order=False) as loader:
        iterator = iter(loader)
        take(iterator, 2)  # the first batch may come as the third
        state = loader.state_dict()
        assert state["batches"] == 0
        let_late_samples_go(tmp_path / "log")
        del iterator
    with DataLoader(Plain(40), 4, num_workers=workers) as loader:
        loader.load_state_dict(state)
        if not workers:
            loader.dataset.interrupt_at = 20  # type: ignore[attr-defined]
        iterator = iter(loader)
        interrupts = 0
        while True:
            try:
                next(iterator)
            except StopIteration:
                break
            except KeyboardInterrupt:
                interrupts += 1
            assert len(behind(loader.state_dict())) <= 3
        assert interrupts == (not workers)
        assert (loader.state_dict()["batches"], loader.state_dict()["batches_behind"]) == (10, "")
