"""shard="auto": each item exactly once over ranks and workers, equally many batches on each rank."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from batch_outcomes import outcomes
from stream_datasets import (
    ByItself,
    ByItselfTooLate,
    ByShard,
    ByShardAndItself,
    Files,
    GoesOn,
    Looks,
    Numbers,
    WithBadSamples,
    identity,
)
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")

Batches = list[list[int]]


def of_rank(patch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """Set the environment variables that torchrun sets."""
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(ranks))


def batches_by_rank(patch: pytest.MonkeyPatch, dataset: Any, ranks: int, **given: Any) -> list[Batches]:
    batches = []
    for rank in range(ranks):
        of_rank(patch, rank, ranks)
        batches.append(list(DataLoader(dataset, collate_fn=identity, shard="auto", **given)))
    return batches


def items(batches: list[Batches]) -> list[int]:
    return sorted(item for of_rank in batches for batch in of_rank for item in batch)


WAYS: dict[str, IterableDataset[int]] = {
    "shard": ByShard(48),
    "stride": Numbers(48),
    "stride, too few shards": ByShard(48, num_shards=3),
    "stride, looks at its worker info": Looks(48),
    "stride, too few shards that divide themselves": ByShardAndItself(48, num_shards=3),
    "a chain, by stride": ChainDataset([Numbers(20), Numbers(28)]),
    "shard, and by itself": ByShardAndItself(48),
}


@pytest.mark.in_ci(4)
@pytest.mark.each_value
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("dataset", WAYS.values(), ids=WAYS)
def test_each_item_comes_exactly_once_over_ranks_and_workers(
    dataset: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have equally many batches if items divide equally."""
    for ranks in (1, 2):
        batches = batches_by_rank(monkeypatch, dataset, ranks, batch_size=2, num_workers=workers)
        expected = [*range(20), *range(28)] if isinstance(dataset, ChainDataset) else range(48)
        assert items(batches) == sorted(expected), ranks
        assert len({len(of_rank) for of_rank in batches}) == 1


def test_files_that_cannot_be_divided_equally_are_not_given_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of five files for two ranks are dealt out instead. Workers of one rank may get any files."""
    dataset = Files([0, 1, 2, 3, 4])
    batches = batches_by_rank(monkeypatch, dataset, 2, batch_size=2, num_workers=1)
    assert batches == expected_by_stride(20, 2, 2, drop_last=False)
    (of_files,) = batches_by_rank(monkeypatch, dataset, 1, batch_size=4, num_workers=2)
    assert of_files == [list(range(4 * file, 4 * file + 4)) for file in (0, 1, 2, 3, 4)]


def test_they_are_the_same_under_every_start_method(
    start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spawned workers are sent rank and number of ranks; their environment need not have them."""
    given = {"num_workers": 1, "multiprocessing_context": start_method}
    batches = batches_by_rank(monkeypatch, Numbers(24), 2, batch_size=3, **given)
    assert batches == expected_by_stride(24, 2, 3, drop_last=False)


def test_they_are_the_same_in_worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a copy of the dataset, and a worker info of its own."""
    before = get_worker_info()
    for dataset in WAYS.values():
        if not isinstance(dataset, ChainDataset):
            batches = batches_by_rank(monkeypatch, dataset, 2, num_workers=3, worker_type="thread")
            assert items(batches) == list(range(48))
    assert get_worker_info() is before


def test_without_it_every_worker_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does the same; shard="auto" avoids it."""
    of_rank(monkeypatch, 1, 2)
    batches = list(DataLoader(Numbers(6), 2, num_workers=2, collate_fn=identity))
    assert items([batches]) == sorted([*range(6)] * 2)


# --- stride


def expected_by_stride(length: int, ranks: int, size: int, drop_last: bool) -> list[Batches]:
    """Group by group: rank r has every ranks-th item of it, from the r-th on, the last ones repeated."""
    by_rank: list[Batches] = [[] for _ in range(ranks)]
    for begin in range(0, length, ranks * size):
        group = list(range(begin, min(begin + ranks * size, length)))
        if drop_last and len(group) < ranks * size:
            break
        last = group[len(group) // ranks * ranks :]
        while len(group) % ranks:
            group.append(last[len(group) % ranks % len(last)])
        for rank in range(ranks):
            by_rank[rank].append(group[rank::ranks])
    return by_rank


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 11, 12, 13, 40])
def test_ranks_have_equal_batches_by_stride_whatever_the_length(
    length: int, drop_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is padded by fewer than ``ranks`` items, or the last group is left out, with any workers."""
    for ranks, size, workers in [(1, 4, 2), (2, 3, 0), (2, 3, 1), (3, 2, 2), (4, 3, 3)]:
        batches = batches_by_rank(
            monkeypatch,
            Numbers(length),
            ranks,
            batch_size=size,
            num_workers=workers,
            drop_last=drop_last,
            worker_type="thread",
        )
        assert batches == expected_by_stride(length, ranks, size, drop_last)
        assert len({tuple(map(len, of_rank)) for of_rank in batches}) == 1
        assert drop_last or set(items(batches)) == set(range(length))
        assert drop_last or len(items(batches)) - length < ranks


def test_items_without_batches_come_in_the_streams_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is one item for each rank with ``batch_size=None``."""
    for workers in (0, 2):
        loaders = batches_by_rank(monkeypatch, Numbers(7), 2, batch_size=None, num_workers=workers)
        assert loaders == [[0, 2, 4, 6], [1, 3, 5, 6]]


def test_persistent_workers_begin_each_epoch_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are dealt out, or have shards, which get the epoch of their dataset."""
    of_rank(monkeypatch, 0, 1)
    for dataset in (Numbers(8), ByShard(8)):
        loader = DataLoader(
            dataset, 2, collate_fn=identity, num_workers=2, persistent_workers=True, shard="auto"
        )
        with loader:
            for epoch in range(3):
                loader.set_epoch(epoch)
                base = 1000 * epoch if isinstance(dataset, ByShard) else 0
                assert items([list(loader)]) == [base + number for number in range(8)]


# --- what is refused


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [ByItself, ByItselfTooLate])
def test_a_dataset_that_may_divide_itself_is_an_error_at_the_line_that_reads(
    kind: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers would be divided twice. Without shard it divides them."""
    for rank in range(2):
        of_rank(monkeypatch, rank, 2)
        loader = DataLoader(kind(20), 4, num_workers=workers, shard="auto", collate_fn=identity)
        with pytest.raises(RuntimeError, match=rf"{kind.__name__} reads .*num_workers.* Leave out shard"):
            list(loader)
    of_rank(monkeypatch, 0, 1)
    assert items([list(DataLoader(ByItself(20), 4, num_workers=2, collate_fn=identity))]) == list(range(20))


def test_an_error_of_the_stream_says_its_place_in_the_whole_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place counts all samples, not those that the worker has taken."""
    of_rank(monkeypatch, 1, 2)
    loader = DataLoader(Numbers(20, fails_at=13), 3, num_workers=2, shard="auto")
    with pytest.raises(ValueError, match="no number 13") as caught:
        list(loader)
    assert "raised by sample 13 of the stream" in " ".join(caught.value.__notes__)


def with_errors(batches: Any) -> list[Any]:
    """Batches, or the texts of the errors in their places."""
    return [one if isinstance(one, list) else str(one) for one in outcomes(batches)]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_an_error_costs_its_batch_and_no_other(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised once on each rank, where the batch would have come."""
    given: dict[str, Any] = {"num_workers": workers, "collate_fn": identity, "shard": "auto"}
    alone = with_errors(DataLoader(WithBadSamples(21), 3, **given))
    assert alone == [
        [0, 1, 2],
        "bad sample 4",
        "bad sample 9",
        [11, 12, 13],
        "bad sample 14",
        "bad sample 19",
    ]
    for rank in range(2):
        of_rank(monkeypatch, rank, 2)
        of_two = with_errors(DataLoader(WithBadSamples(21), 2, **given))
        assert of_two == [[rank, 2 + rank], *(f"bad sample {number}" for number in (4, 9, 14, 19))]


class FailsOnce(GoesOn):
    """A draw fails once, and gives its number when it is repeated."""

    def __init__(self, length: int, at: int) -> None:
        super().__init__(length)
        self.at = at

    def __next__(self) -> int:
        if self.next == self.at:
            self.at = -1
            raise ConnectionError("the server has gone")
        if self.next == self.length:
            raise StopIteration
        self.next += 1
        return self.next - 1


class FailsInOneWorker(Numbers):
    """Its iterator fails in worker 1 only."""

    def __iter__(self) -> FailsOnce:
        info = get_worker_info()
        assert info is not None
        return FailsOnce(self.length, self.fails_at if info.id == 1 else -1)


@pytest.mark.parametrize("at", range(1, 12))
def test_what_fails_in_one_worker_costs_at_most_a_batch_of_its_own(at: int) -> None:
    dataset = FailsInOneWorker(12, fails_at=at)
    loader = DataLoader(dataset, 3, num_workers=2, collate_fn=identity, shard="auto")
    expected: list[Any] = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    if at // 3 % 2 == 1:
        expected[at // 3] = "the server has gone"
    assert with_errors(loader) == expected


@pytest.mark.in_ci(3)
@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:to resume,")
@pytest.mark.parametrize("taken", range(7))
@pytest.mark.parametrize("of_a_batch", [None, 3])
def test_a_stream_that_has_raised_goes_on_with_other_workers(taken: int, of_a_batch: int | None) -> None:
    given: dict[str, Any] = {"batch_size": of_a_batch, "collate_fn": as_list, "shard": "auto"}
    with DataLoader(WithBadSamples(21), num_workers=2, **given) as loader:
        iterator = iter(loader)
        for _ in range(taken):
            with contextlib.suppress(ValueError):
                next(iterator)
        state, rest = loader.state_dict(), with_errors(iterator)
    with DataLoader(WithBadSamples(21), num_workers=3, **given) as other:
        other.load_state_dict(state)
        assert with_errors(other) == rest


@pytest.mark.filterwarnings("ignore:to resume,")
def test_a_state_behind_a_last_batch_of_which_nothing_came_has_an_empty_rest() -> None:
    with DataLoader(WithBadSamples(15), 3, num_workers=2, shard="auto") as loader:
        iterator = iter(loader)
        for _ in range(5):  # the stream's last draw raises, as the first one of its batch
            with contextlib.suppress(ValueError):
                next(iterator)
        state = loader.state_dict()
    with DataLoader(WithBadSamples(15), 3, shard="auto") as other:
        other.load_state_dict(state)
        assert next(iter(other), None) is None


def as_list(one: Any) -> list[Any]:
    return [one]


@pytest.mark.parametrize(
    ("dataset", "given", "message"),
    [
        (Numbers(3), {"shard": "stride"}, "shard must be one of 'auto', not 'stride'"),
        (torch.arange(3), {"shard": "auto"}, "needs an iterable-style dataset.*ShardedSampler"),
    ],
)
def test_wrong_arguments_are_refused(dataset: Any, given: dict[str, Any], message: str) -> None:
    """The error comes when the loader is made."""
    with pytest.raises(ValueError, match=message):
        DataLoader(dataset, **given)


def test_bad_samples_cannot_be_left_out_by_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would have batches of other sizes. A dataset with shards of its own may skip samples."""
    of_rank(monkeypatch, 0, 2)
    loader = DataLoader(Numbers(20), 4, num_workers=1, shard="auto", on_error="skip")
    with pytest.raises(ValueError, match="on_error='skip' is not possible if shard='auto' deals out"):
        iter(loader)
    assert list(DataLoader(ByShard(4), 4, shard="auto", on_error="skip", collate_fn=identity)) == [[0, 2]]


def test_it_is_refused_where_torchs_own_workers_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's workers would give every item as often as there are workers."""
    monkeypatch.setattr("shmloader.loading.why_unavailable", lambda: "no memory files")
    with pytest.raises(
        NotImplementedError, match=r"no memory files.*does not divide streams as shard='auto'"
    ):
        iter(DataLoader(Numbers(4), num_workers=1, shard="auto"))
    assert len(list(DataLoader(Numbers(4), shard="auto"))) == 4


@pytest.mark.parametrize(("rank", "ranks"), [("2", "2"), ("x", "2"), ("-1", "2")])
def test_a_wrong_environment_is_refused(rank: str, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error quotes the environment."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ValueError, match=f"RANK='{rank}' and WORLD_SIZE='{ranks}'"):
        iter(DataLoader(Numbers(4), shard="auto"))
