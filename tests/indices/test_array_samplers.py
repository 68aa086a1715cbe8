"""Index batches that are drawn as arrays: the same as torch's, from the same draws, at the same calls."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import Ends, Numbered
from robustness.processes import LONG
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import shmloader
from shmloader import BlockSampler, DataLoader, ShardedSampler
from shmloader.indices.array_samplers import index_arrays, index_runs
from shmloader.indices.packed_indices import LEAST_PACKED, PackedInts


def _steps(
    batches: Iterator[Any], generator: torch.Generator | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Each batch, with the state of the generator after it; the last one's batch is empty."""
    for batch in batches:
        state = (generator or torch.default_generator).get_state()
        yield list(batch), state.tolist()
    yield [], (generator or torch.default_generator).get_state().tolist()


@st.composite
def _samplers(draw: st.DrawFn) -> tuple[Any, torch.Generator | None]:
    length = draw(st.integers(1, 300))
    generator = torch.Generator() if draw(st.booleans()) else None
    sampler: Any = SequentialSampler(range(length))
    kind = draw(st.sampled_from(["sequential", "random", "subset", "weighted", "distributed"]))
    if kind == "weighted":
        replacement = draw(st.booleans())
        nsamples = draw(st.integers(1, 700 if replacement else length))
        sampler = WeightedRandomSampler(torch.rand(length) + 0.1, nsamples, replacement, generator)
    elif kind == "subset":
        indices = draw(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=300))
        kinds = [list, tuple, lambda _: range(3, 3 + length)]
        sampler = SubsetRandomSampler(draw(st.sampled_from(kinds))(indices), generator)
    elif kind == "distributed":
        replicas = draw(st.integers(1, 9) | st.just(400))
        rank, booleans = draw(st.integers(0, replicas - 1)), st.booleans()
        data: Any = range(length)
        sampler = DistributedSampler(data, replicas, rank, draw(booleans), 5, draw(booleans))
        sampler.set_epoch(draw(st.integers(0, 3)))
    elif kind == "random":
        num_samples = draw(st.none() | st.integers(1, 700) | st.just(2 * length))
        sampler = RandomSampler(range(length), num_samples=num_samples, generator=generator)
    batch_size = draw(st.integers(LEAST_PACKED, 100) | st.sampled_from([length, 2 * length]))
    return BatchSampler(sampler, max(batch_size, LEAST_PACKED), draw(st.booleans())), generator


@settings(max_examples=200 if LONG else 50, deadline=None)
@given(_samplers(), st.integers(0, 1 << 32))
def test_the_same_batches_and_the_same_draws(case: tuple[Any, torch.Generator | None], seed: int) -> None:
    sampler, generator = case
    found = []
    for _ in range(2):
        torch.manual_seed(seed)
        if generator is not None:
            generator.manual_seed(seed)
        arrays = index_arrays(sampler)
        assert arrays is not None
        found.append(list(_steps(iter(sampler) if found else arrays, generator)))
    assert found[0] == found[1]


@settings(max_examples=100 if LONG else 30, deadline=None)
@given(_samplers())
def test_runs_are_the_batches_of_a_sequential_sampler(case: tuple[Any, torch.Generator | None]) -> None:
    sampler, _ = case
    runs = index_runs(sampler)
    if type(sampler.sampler) is not SequentialSampler:
        assert runs is None
        return
    assert runs is not None
    assert [run.tolist() for run in runs] == list(sampler)


@pytest.mark.parametrize("batch_size", [0, 40])
def test_a_batch_size_that_is_changed_between_runs_counts_as_in_torch(batch_size: int) -> None:
    found = []
    for iterate in (iter, index_runs):
        sampler = BatchSampler(SequentialSampler(range(100)), 50, drop_last=False)
        batches = iterate(sampler)
        assert batches is not None
        first = next(batches)
        sampler.batch_size = batch_size
        rest = itertools.islice(batches, 5)
        found.append([batch if iterate is iter else batch.tolist() for batch in (first, *rest)])
    assert found[0] == found[1]


@settings(max_examples=100 if LONG else 30, deadline=None)
@given(_samplers(), st.integers(1, 30))
def test_batches_that_are_skipped_are_drawn_all_the_same(
    case: tuple[Any, torch.Generator | None], skip: int
) -> None:
    """They may cover any number of permutations, and lie after the last batch."""
    sampler, generator = case
    found = []
    for is_torchs in (True, False):
        torch.manual_seed(1)
        if generator is not None:
            generator.manual_seed(1)
        batches = iter(sampler) if is_torchs else index_arrays(sampler, skip)
        if batches is None and type(sampler.sampler) in (SubsetRandomSampler, WeightedRandomSampler):
            return
        assert batches is not None
        if is_torchs:
            list(itertools.islice(batches, skip))
        found.append(list(_steps(batches, generator)))
    assert found[0] == found[1]


class _Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source) - 1, -1, -1))


@pytest.mark.parametrize(
    "sampler",
    [
        BatchSampler(_Reversed(range(100)), 50, False),
        BatchSampler(RandomSampler(range(100), replacement=True), 50, False),
        BatchSampler(SubsetRandomSampler(["a", *range(99)]), 50, False),
        BatchSampler(SubsetRandomSampler(torch.arange(100)), 50, False),
        BatchSampler(SubsetRandomSampler([True] * 100), 50, False),
        BatchSampler(SequentialSampler(range(100)), LEAST_PACKED - 1, False),
        BatchSampler(range(100), 50, False),
        SequentialSampler(range(100)),
        type("Own", (BatchSampler,), {})(SequentialSampler(range(100)), 50, False),
    ],
)
def test_other_samplers_are_left_to_themselves(sampler: Any) -> None:
    assert index_arrays(sampler) is None


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler, BatchSampler])
def test_what_is_put_into_torchs_samplers_is_asked(
    kind: Any, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(torch.arange(100), 50, shuffle=kind is RandomSampler, num_workers=1)
    assert index_arrays(loader.batch_sampler) is not None
    mine = (lambda self: iter([[7] * 50])) if kind is BatchSampler else (lambda self: iter([7] * 50))
    monkeypatch.setattr(kind, "__iter__", functools.wraps(kind.__iter__)(mine) if wrapped else mine)
    assert index_arrays(loader.batch_sampler) is None
    assert [batch.tolist() for batch in loader] == [[7] * 50]


def test_a_subset_that_is_changed_in_an_epoch_counts_as_in_torch() -> None:
    found = []
    for iterate in (iter, index_arrays):
        indices, generator = list(range(100)), torch.Generator().manual_seed(1)
        batches = iterate(BatchSampler(SubsetRandomSampler(indices, generator), 40, drop_last=False))
        assert batches is not None
        first = list(next(batches))
        indices[:] = range(100, 200)
        found.append([first, *map(list, batches)])
    assert found[0] == found[1]


class _SaysTypes(Numbered):
    """Samples say of what type the index is, and batches of what type the indices."""

    def __getitem__(self, index: Any) -> Any:
        return f"{type(index).__name__} {index}"


class _SaysListTypes(_SaysTypes):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [type(indices).__name__, *{type(index).__name__ for index in indices}]


@pytest.mark.parametrize("shuffle", [False, True])
def test_datasets_are_asked_for_plain_ints(shuffle: bool) -> None:
    loader = DataLoader(_SaysTypes(64), batch_size=64, shuffle=shuffle, num_workers=1)
    (batch,) = loader
    assert sorted(batch) == sorted(f"int {index}" for index in range(64))
    (batch,) = DataLoader(_SaysListTypes(64), batch_size=64, shuffle=shuffle, num_workers=1, collate_fn=list)
    assert batch == ["list", "int"]


def _dies_in_a_worker(samples: list[torch.Tensor]) -> torch.Tensor:
    if get_worker_info() is not None:
        raise SystemError(str(len(samples)))
    return torch.stack(samples)


def test_errors_name_indices_as_lists() -> None:
    with pytest.raises(shmloader.WorkerDied) as died:
        list(DataLoader(Ends(64, at=40, how=3), batch_size=64, num_workers=1))
    assert died.value.indices == (list(range(64)),)
    loader = DataLoader(Numbered(64), batch_size=64, num_workers=1, collate_fn=_dies_in_a_worker)
    with pytest.raises(SystemError) as raised:
        list(loader)
    assert any("[0, 1, 2, 3" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("to", [70, 0])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_size_that_is_changed_meanwhile_counts_when_it_does_in_torch(
    drop_last: bool, to: int
) -> None:
    found = []
    for iterate in (iter, index_arrays):
        sampler = BatchSampler(SequentialSampler(range(500)), 40, drop_last)
        batches = iterate(sampler)
        assert batches is not None
        lengths = [len(next(batches))]
        sampler.batch_size = to
        found.append(lengths + [len(batch) for batch in itertools.islice(batches, 100)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change", [{"total_size": 3}, {"num_samples": 1}, {"drop_last": True, "total_size": 99}]
)
def test_a_distributed_sampler_that_contradicts_itself_raises_torchs_error(change: dict[str, Any]) -> None:
    data: Any = range(50)
    sampler = DistributedSampler(data, 4, 1)
    vars(sampler).update(change)
    batches = BatchSampler(sampler, LEAST_PACKED, drop_last=False)
    with pytest.raises(AssertionError) as torchs:
        list(batches)
    arrays = index_arrays(batches)
    assert arrays is not None
    with pytest.raises(AssertionError) as ours:
        list(arrays)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_divided_orders_come_as_arrays_too(ranks: int, drop_last: bool, uneven: Any) -> None:
    data: Any = range(1003)
    for rank in range(ranks):
        for inner in (
            ShardedSampler(data, ranks, rank, seed=3, uneven=uneven),
            BlockSampler(
                data, ranks, rank, True, -3, blocks=range(0, 1003, 50), run_length=20, uneven=uneven
            ),
        ):
            sampler = BatchSampler(inner, 40, drop_last)
            for epoch, state in ((0, None), (1, inner.state_after(4, 40)), (1, None)):
                batches = []
                for iterate in (iter, index_arrays):
                    inner.set_epoch(epoch)
                    if state is not None:
                        inner.load_state_dict(state)
                    found: Any = iterate(sampler)
                    batches.append([list(batch) for batch in found])
                    assert inner.state_after(9, 40)["consumed"] == min(9 * 40 * ranks, 1003)
                assert batches[0] == batches[1]
                assert all(type(batch) is PackedInts for batch in index_arrays(sampler) or [()])


def test_a_divided_order_that_a_program_overrides_is_its_own() -> None:
    class Reversed(ShardedSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(list(super().__iter__())[::-1])

    data: Any = range(100)
    assert index_arrays(BatchSampler(Reversed(data, 1, 0), 40, False)) is None
