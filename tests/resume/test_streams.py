"""Iterable-style datasets are resumed: by their own states, by counting, with other workers and ranks."""

from __future__ import annotations

import itertools
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stream_datasets import (
    ByItself,
    ByShard,
    Files,
    Numbers,
    Stateful,
    StatefulIterator,
    StatefulShards,
    Uneven,
    WithBadSamples,
    WithStatefulIterator,
    identity,
)
from torch.utils.data import IterableDataset, get_worker_info

from shmloader import DataLoader, ResumeError
from shmloader.wire.stream_records import StreamRules

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:to resume, .* samples", "ignore:.*bad sample"
)

State = dict[str, Any]


def loader_of(dataset: Any, **given: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 3, "collate_fn": identity} | given)


def stopped_after(loader: DataLoader[Any], batches: int) -> tuple[list[Any], State]:
    """The first batches, and the state after them, written to JSON and read again."""
    iterator = iter(loader)
    had = [next(iterator) for _ in range(batches)]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    return had, state


def rest_after(loader: DataLoader[Any], state: State) -> list[Any]:
    loader.load_state_dict(state)
    rest = list(loader)
    loader.close()
    return rest


def numbers(batches: list[Any]) -> list[Any]:
    """The same batches without the facts about the iteration."""
    return [[item[0] if isinstance(item, tuple) else item for item in batch] for batch in batches]


def items(batches: list[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(numbers(batches)))


KINDS: dict[str, Callable[[], Any]] = {
    "counted": lambda: Numbers(20),
    "dataset's state": lambda: Stateful(20),
    "dataset's state with tensors": lambda: Stateful(20, tensors=True),
    "iterator's state": lambda: WithStatefulIterator(20),
    "divided by itself": lambda: ByItself(20),
}


@pytest.mark.each_value
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_rest_comes_from_every_place(make: Callable[[], Any], workers: int) -> None:
    """The rest comes batch by batch, in order, after any stop, also at the end."""
    given = {"num_workers": workers, "worker_type": "thread" if workers > 1 else "process"}
    whole = numbers(list(loader_of(make(), **given)))
    for stop in range(len(whole) + 1):
        had, state = stopped_after(loader_of(make(), **given), stop)
        assert numbers(had) == whole[:stop]
        assert numbers(rest_after(loader_of(make(), **given), state)) == whole[stop:], stop


@pytest.mark.each_value
@pytest.mark.parametrize("shard", [None, "auto"])
@pytest.mark.parametrize("kind", [Stateful, WithStatefulIterator])
@pytest.mark.parametrize(("asked", "kept"), [(True, 6), (False, 3)], ids=["asked before", "not asked before"])
def test_with_a_state_nothing_is_drawn_again(kind: Any, shard: Any, asked: bool, kept: int) -> None:
    """Each item includes the place where its iteration began: by a worker's latest state, or its first."""
    loader = loader_of(kind(40), num_workers=2, shard=shard)
    if asked:
        loader.state_dict()
    _, state = stopped_after(loader, 4)
    for batch in rest_after(loader_of(kind(40), num_workers=2, shard=shard), state):
        assert all(began >= kept for _, began in batch), batch


def test_without_a_state_one_warning_tells_how_much_is_drawn_again() -> None:
    """Three batches of three samples are drawn again; for a stream with a state there is no warning."""
    for dataset, expected in ((Numbers(20), 1), (Stateful(20), 0)):
        _, state = stopped_after(loader_of(dataset, num_workers=2), 3)
        loader = loader_of(dataset, num_workers=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest_after(loader, state)
        found = [str(one.message) for one in caught if "drawn again" in str(one.message)]
        assert len(found) == expected
        assert all("9 samples of the stream" in text and "Numbers" in text for text in found)


def test_workers_with_streams_of_other_lengths_go_on_in_turn() -> None:
    """Some have ended when the program stops, or end before their turn comes."""
    for lengths in ((2, 11, 5), (0, 4, 9), (9, 0, 1), (3, 3, 3)):
        given = {"num_workers": 3, "worker_type": "thread"}
        whole = list(loader_of(Uneven(*lengths), **given))
        for stop in range(len(whole) + 1):
            _, state = stopped_after(loader_of(Uneven(*lengths), **given), stop)
            assert rest_after(loader_of(Uneven(*lengths), **given), state) == whole[stop:], (lengths, stop)


def test_a_resumed_epoch_is_stopped_and_resumed_again() -> None:
    """Streams resume by states and by counting, with one state for each further batch."""
    for make in (lambda: Numbers(20), lambda: Stateful(20), lambda: StatefulShards(20)):
        shard = "auto" if isinstance(make(), StatefulShards) else None
        given = {"num_workers": 2, "shard": shard}
        whole = numbers(list(loader_of(make(), **given)))
        found, state = stopped_after(loader_of(make(), **given), 1)
        for _ in range(3):
            loader = loader_of(make(), **given)
            loader.load_state_dict(state)
            more, state = stopped_after(loader, 1)
            found += more
        assert numbers(found + rest_after(loader_of(make(), **given), state)) == whole


# --- the moment of the state


def test_a_state_holds_for_what_was_returned_and_not_for_what_was_made() -> None:
    """States are taken before the first batch, between two, twice, after a break, at the end, once loaded."""
    loader = loader_of(Stateful(20), num_workers=2, prefetch_factor=4)
    before = loader.state_dict()
    assert numbers(rest_after(loader_of(Stateful(20)), before | {"stream": ""})) == numbers(
        list(loader_of(Stateful(20)))
    )
    whole = numbers(list(loader_of(Stateful(20), num_workers=2)))
    for batch in loader:
        first = loader.state_dict()
        assert loader.state_dict() == first
        assert first is not loader.state_dict()
        assert numbers([batch]) == whole[:1]
        break
    assert loader.state_dict() == first
    loader.load_state_dict(first)
    assert {name: loader.state_dict()[name] for name in first} == first
    assert numbers(list(loader)) == whole[1:]


def test_the_warning_of_samples_that_are_drawn_again_points_at_the_program() -> None:
    _, state = stopped_after(loader_of(Numbers(12)), 2)
    loader = loader_of(Numbers(12))
    loader.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match="6 samples of the stream are drawn again") as said:
        iter(loader)
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:ByShard has set_epoch")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", [lambda: Numbers(12), lambda: Stateful(12), lambda: ByShard(12)])
def test_epochs_after_a_resumed_one_are_whole(make: Callable[[], Any], persistent: bool) -> None:
    """Persistent workers, which were started with the place, and a finished state are tried too."""
    shard = "auto" if isinstance(make(), ByShard) else None
    given = {"num_workers": 2, "persistent_workers": persistent, "shard": shard}
    whole = numbers(list(loader_of(make(), **given)))
    _, state = stopped_after(loader_of(make(), **given), 2)
    loader = loader_of(make(), **given)
    loader.load_state_dict(state)
    assert numbers(list(loader)) == whole[2:]
    finished = loader.state_dict()
    assert numbers(list(loader)) == whole
    iterator = iter(loader)
    assert numbers([next(iterator)]) == whole[:1]
    in_the_third = loader.state_dict()
    assert numbers(rest_after(loader_of(make(), **given), in_the_third)) == whole[1:]
    assert numbers(rest_after(loader_of(make(), **given), finished)) == whole
    loader.close()


def test_states_may_be_taken_every_few_batches() -> None:
    """Samples drawn since the last state are drawn again, and none before it."""
    given = {"num_workers": 2, "snapshot_every_n_steps": 3}
    whole = list(loader_of(Stateful(60), **given))
    for stop in (1, 5, 6, 7, 13):
        _, state = stopped_after(loader_of(Stateful(60), **given), stop)
        rest = rest_after(loader_of(Stateful(60), **given), state)
        assert numbers(rest) == numbers(whole)[stop:]
        per_worker = stop // 2 // 3 * 9
        assert all(began in (per_worker, per_worker + 9) for batch in rest for _, began in batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_no_state_is_taken_where_none_is_wanted(workers: int) -> None:
    """As with torchdata's loader, the epoch's samples are then drawn again from its beginning."""
    given = {"num_workers": workers, "snapshot_every_n_steps": 0}
    whole = list(loader_of(RefusesStates(60), **given))
    for stop in (1, 5):
        _, state = stopped_after(loader_of(RefusesStates(60), **given), stop)
        rest = rest_after(loader_of(RefusesStates(60), **given), state)
        assert numbers(rest) == numbers(whole)[stop:]
        assert all(began == 0 for batch in rest for _, began in batch)


class RefusesStates(Stateful):
    """Cannot be asked for its state."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("asked for a state")


# --- with another configuration


@pytest.mark.parametrize("make", [lambda: Numbers(40), lambda: Stateful(40)])
def test_dealt_out_samples_go_on_with_any_workers_ranks_and_batches(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks stop after two batches of three; three ranks continue with batches of four, in the order."""
    found: list[int] = []
    for workers, again in ((0, 2), (2, 1), (3, 0)):
        found = []
        for rank in range(2):
            of_rank(monkeypatch, rank, 2)
            had, state = stopped_after(loader_of(make(), num_workers=workers, shard="auto"), 2)
            found += items(had)
        for rank in range(3):
            of_rank(monkeypatch, rank, 3)
            rest = rest_after(loader_of(make(), batch_size=4, num_workers=again, shard="auto"), state)
            found += items(rest)
        assert set(found) == set(range(40))
        assert len(found) - 40 < 3


def of_rank(patch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(ranks))


@pytest.mark.parametrize(
    "make", [lambda: ByShard(40), lambda: StatefulShards(40), lambda: Files([*range(10)])]
)
def test_shards_of_the_datasets_own_go_on_with_any_number_of_workers(make: Callable[[], Any]) -> None:
    """Each worker plays the shards that it has one after another; some may have none."""
    for workers, others in ((4, (1, 3, 0)), (1, (2,)), (2, (3, 1, 2))):
        found, state = stopped_after(loader_of(make(), num_workers=workers, shard="auto"), 3)
        for other in others[:-1]:
            loader = loader_of(make(), num_workers=other, shard="auto")
            loader.load_state_dict(state)
            more, state = stopped_after(loader, 2)
            found += more
        found += rest_after(loader_of(make(), num_workers=others[-1], shard="auto"), state)
        assert sorted(items(found)) == list(range(40)), (workers, others)


def test_batches_that_come_out_of_order_are_resumed_as_a_set() -> None:
    """Each worker's batches come in its own order. If samples are dealt out, in_order=False is refused."""
    given = {"num_workers": 3, "in_order": False}
    had, state = stopped_after(loader_of(ByItself(60), **given), 7)
    found = had + rest_after(loader_of(ByItself(60), **given), state)
    assert sorted(items(found)) == list(range(60))
    with pytest.raises(ResumeError, match="in_order=False if shard='auto' deals samples out"):
        stopped_after(loader_of(Numbers(60), shard="auto", **given), 4)


@pytest.mark.each_value
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_were_left_out_count(on_error: Any, workers: int) -> None:
    """A place is a number of draws, bad samples included."""
    given = {"on_error": on_error, "num_workers": workers}
    whole = list(loader_of(WithBadSamples(30), **given))
    for stop in range(0, len(whole) + 1, 2):
        _, state = stopped_after(loader_of(WithBadSamples(30), **given), stop)
        assert rest_after(loader_of(WithBadSamples(30), **given), state) == whole[stop:], stop


# --- what is refused


def test_another_number_of_workers_is_an_error_that_names_both() -> None:
    """Without shmloader's sharding, each worker had a stream of its own."""
    _, state = stopped_after(loader_of(Numbers(20), num_workers=2), 2)
    loader = loader_of(Numbers(20), num_workers=3)
    with pytest.raises(ResumeError, match=r"made with 2 worker\(s\), and this loader has 3"):
        loader.load_state_dict(state)
    assert len(rest_after(loader_of(Numbers(20), num_workers=2), state)) == 12


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stateful, WithStatefulIterator])
def test_a_state_that_the_dataset_itself_refuses_is_refused(
    kind: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the class and contains the exception."""
    owner = StatefulIterator if kind is WithStatefulIterator else kind
    _, state = stopped_after(loader_of(kind(20), num_workers=workers), 2)

    def refuse(self: Any, state: Any) -> None:
        raise KeyError("no shards")

    monkeypatch.setattr(owner, "load_state_dict", refuse)
    with pytest.raises(ResumeError, match=rf"of {owner.__name__} raised KeyError\('no shards'\)"):
        rest_after(loader_of(kind(20), num_workers=workers), state)


def test_a_state_of_another_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have streams of their own here."""
    for dataset, shard in ((ByItself(40), None), (ByShard(40), "auto")):
        of_rank(monkeypatch, 0, 2)
        _, state = stopped_after(loader_of(dataset, shard=shard), 2)
        for rank, ranks in ((1, 2), (0, 1)):
            of_rank(monkeypatch, rank, ranks)
            with pytest.raises(ResumeError, match=f"of rank 0 of 2, and this is rank {rank} of {ranks}"):
                loader_of(dataset, shard=shard).load_state_dict(state)


def test_a_stream_that_is_shorter_now_is_refused() -> None:
    """A stream that is divided in another way is refused too."""
    _, state = stopped_after(loader_of(Numbers(20)), 4)
    with pytest.raises(ResumeError, match="ended after 5 of the 12 samples"):
        rest_after(loader_of(Numbers(5)), state)
    _, state = stopped_after(loader_of(Numbers(20), shard="auto"), 4)
    with pytest.raises(ResumeError, match="made with shard='auto', and this loader has no shard"):
        loader_of(Numbers(20)).load_state_dict(state)
    _, state = stopped_after(loader_of(ByShard(20), num_workers=2, shard="auto"), 4)
    with pytest.raises(ResumeError, match=r"2 shard\(s\) of the dataset on each of 1 rank"):
        loader_of(ByShard(20, num_shards=1), shard="auto").load_state_dict(state)


def test_a_state_of_a_dataset_that_divides_itself_is_loaded_without_shard() -> None:
    """Such a dataset was left to itself by shard="auto" in earlier versions."""
    whole = list(loader_of(ByItself(20), num_workers=2))
    _, state = stopped_after(loader_of(ByItself(20), num_workers=2), 3)
    with pytest.raises(ResumeError, match="leave out shard='auto' to resume"):
        loader_of(ByItself(20), num_workers=2, shard="auto").load_state_dict(state)
    assert rest_after(loader_of(ByItself(20), num_workers=2), state) == whole[3:]


class RaisesOnce(StatefulIterator):
    def __next__(self) -> tuple[int, int]:
        item = super().__next__()
        if item[0] == 9:
            raise ValueError("no number 9")
        return item


class RaisesOnceWithoutState(RaisesOnce):
    state_dict = load_state_dict = None  # type: ignore[assignment]


class Raising(Numbers):
    """Its iterator raises in place of number 9, and continues after it."""

    def __init__(self, kind: Any) -> None:
        super().__init__(40)
        self.kind = kind

    def __iter__(self) -> Any:
        return self.kind(self.length)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [RaisesOnce, RaisesOnceWithoutState])
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_stream_that_has_raised_goes_on_behind_it(workers: int, kind: Any, behind: int) -> None:
    """The batch in which it raised was drawn only up to that place."""
    loader = loader_of(Raising(kind), batch_size=4, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises(ValueError, match="no number 9"):
        next(iterator)
    for _ in range(behind):
        next(iterator)
    state, rest = loader.state_dict(), numbers(list(iterator))
    assert rest[0][0] == 10 + 4 * behind
    other = loader_of(Raising(kind), batch_size=4, num_workers=workers)
    assert numbers(rest_after(other, state)) == rest


class Flaky(Numbers):
    """Its iterator raises once instead of giving number ``at``, which it gives when it is asked again."""

    at: int | None = 9

    def __iter__(self) -> Any:
        return FlakyIterator(self.length, self.at)


class FlakyIterator:
    """An iterator of the plainest kind: without a state."""

    def __init__(self, length: int, at: int | None) -> None:
        self.next, self.length, self.at = 0, length, at

    def __iter__(self) -> FlakyIterator:
        return self

    def __next__(self) -> tuple[int, int]:
        if self.next == self.at:
            self.at = None
            raise ConnectionError("the server has gone")
        if self.next == self.length:
            raise StopIteration
        self.next += 1
        return self.next - 1, 0


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_failure_that_has_passed_costs_no_sample(on_error: Any, behind: int) -> None:
    """A dataset that raised once, and then gave the sample, raises no more when it is resumed."""
    given = {"batch_size": 4, "num_workers": 1, "on_error": on_error}
    loader = loader_of(Flaky(40), **given)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    if on_error == "raise":
        with pytest.raises(ConnectionError):
            next(iterator)
    else:
        next(iterator)  # 8, 9, 10: the failure counts as one of four
    for _ in range(behind):
        next(iterator)
    state, rest = loader.state_dict(), numbers(list(iterator))
    well = Flaky(40)
    well.at = None
    assert numbers(rest_after(loader_of(well, **given), state)) == rest


class Refuses(Flaky):
    """Cannot be set to epoch 1 in a worker."""

    def set_epoch(self, epoch: int) -> None:
        if epoch == 1 and get_worker_info() is not None:
            raise LookupError("no epoch 1 here")


def test_a_failure_before_the_first_sample_tells_nothing_of_the_last_epoch() -> None:
    with loader_of(Refuses(40), batch_size=4, num_workers=1, persistent_workers=True) as loader:
        next(iter(loader))  # the worker goes on to number 9, which raises
        loader.set_epoch(1)
        iterator = iter(loader)
        with pytest.raises(LookupError, match=r"no epoch 1 here(.|\n)*worker 0"):
            next(iterator)
        state = loader.state_dict()
        assert json.loads(state["stream"])["parts"][0][0] == 0
        with pytest.raises(RuntimeError, match="its first batch says why"):
            next(iterator)
        loader.set_epoch(2)
        assert numbers([next(iter(loader))]) == [[0, 1, 2, 3]]
    with loader_of(Numbers(40), batch_size=4, num_workers=1) as other:
        assert numbers(rest_after(other, state))[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_while_samples_are_drawn_again_is_raised(workers: int) -> None:
    """Nothing is left out: the program can try again with the same state."""
    well = Flaky(40)
    well.at = None
    given = {"batch_size": 4, "num_workers": workers}
    _, state = stopped_after(loader_of(well, **given), 4)
    loader = loader_of(Flaky(40), **given)
    loader.load_state_dict(state)
    with pytest.raises(ConnectionError, match="the server has gone"):
        next(iter(loader))
    for again in (state, loader.state_dict()):
        assert len(rest_after(loader_of(well, **given), again)) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_while_samples_are_drawn_again_is_passed_over_where_samples_may_raise(workers: int) -> None:
    given = {"batch_size": 4, "num_workers": workers, "on_error": "skip"}
    well = Flaky(40)
    well.at = None
    had, state = stopped_after(loader_of(well, **given), 4)
    rest = numbers(rest_after(loader_of(Flaky(40), **given), state))
    assert [one for batch in numbers(had) + rest for one in batch] == list(range(40))


def test_failures_count_since_the_last_state_that_has_arrived() -> None:
    """A state of the dataset in a batch that could not be sent does not count."""
    given = {"batch_size": 2, "num_workers": 1, "on_error": "skip", "snapshot_every_n_steps": 3}
    loader = loader_of(Raising(RaisesTwice), collate_fn=unsendable_third, **given)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        next(iterator)
    (part,) = json.loads(loader.state_dict()["stream"])["parts"]
    assert (part[4], part[5]) == (2, 0)


class RaisesTwice(StatefulIterator):
    def __next__(self) -> tuple[int, int]:
        item = super().__next__()
        if item[0] in (1, 4):
            raise ValueError("bad")
        return item


def unsendable_third(samples: list[Any]) -> Any:
    return (lambda: 0) if any(item[0] >= 4 for item in samples) else samples


def test_an_interrupt_while_a_batch_is_counted_loses_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the bookkeeping of the batch before: the state has that batch, which the program has."""
    of_a_batch = StreamRules.of_a_batch
    moments = iter([False, True])

    def interrupted(rules: StreamRules) -> int:
        if next(moments, False):
            raise KeyboardInterrupt
        return of_a_batch.__get__(rules)

    with DataLoader(Endless(), 2, num_workers=1) as loader:
        iterator = iter(loader)
        monkeypatch.setattr(StreamRules, "of_a_batch", property(interrupted))
        had: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            while True:
                had += next(iterator).tolist()
        state = loader.state_dict()
    with DataLoader(Endless(), 2, num_workers=1) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).tolist() == [len(had), len(had) + 1]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()
