"""`follow()` and ``state_dict(taken=)``: a state of what came out of a look-ahead, or of fewer batches."""

from __future__ import annotations

import gc
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from look_ahead import Eager, InThread, InThreadForGood, cycled, in_this_thread
from resume_datasets import Buckets, OwnGenerator, Plain, Stateful, StatefulToTheEnd
from robustness.processes import LONG
from stream_datasets import Numbers, StatefulShards, Uneven
from stream_datasets import Stateful as StatefulStream

from shmloader import DataLoader, ResumeError, ShardedSampler, TokenBatchSampler
from shmloader.resume.compatibility import behind
from shmloader.resume.progress import Progress

# Of streams whose states are not read with each batch.
pytestmark = pytest.mark.filterwarnings("ignore:to resume, .* samples of the stream are drawn again")

EPOCHS = 3
Loader = DataLoader[Any]


def shuffled(**options: Any) -> Loader:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(Plain(21), batch_size=4, shuffle=True, generator=generator, **options)


def by_sampler(make: Callable[[], Any]) -> Callable[..., Loader]:
    return lambda **options: DataLoader(Plain(21), batch_size=4, sampler=make(), **options)


def by_tokens(**options: Any) -> Loader:
    sampler = TokenBatchSampler([1 + index % 5 for index in range(21)], 10, seed=3)
    return DataLoader(Plain(21), batch_sampler=sampler, **options)


def in_buckets(**options: Any) -> Loader:
    return DataLoader(Plain(21), batch_sampler=Buckets(Stateful(21), 4), **options)


def of_stream(make: Callable[[], Any], **of_loader: Any) -> Callable[..., Loader]:
    def build(**options: Any) -> Loader:
        return DataLoader(make(), **({"batch_size": 4} | of_loader | options))

    return build


def own_generator() -> OwnGenerator:
    return OwnGenerator(21, torch.Generator().manual_seed(2))


MAPS: dict[str, Callable[..., Loader]] = {
    "torch's sampler": shuffled,
    "own generator": by_sampler(own_generator),
    "own state": by_sampler(lambda: Stateful(21)),
    "own state to the end": by_sampler(lambda: StatefulToTheEnd(21)),
    "sharded": by_sampler(lambda: ShardedSampler(range(21), 1, 0, seed=5)),
    "tokens": by_tokens,
}
STREAMS: dict[str, Callable[..., Loader]] = {
    "counted": of_stream(lambda: Numbers(21), shard="auto"),
    "with a state": of_stream(lambda: StatefulStream(21)),
    "with a rare state": of_stream(lambda: StatefulStream(21), snapshot_every_n_steps=3),
    "shards with a state": of_stream(lambda: StatefulShards(21), shard="auto"),
    "uneven": of_stream(lambda: Uneven(3, 17)),
}
KINDS = MAPS | STREAMS
WORKERS: dict[str, dict[str, Any]] = {
    "none": {"num_workers": 0},
    "threads": {"num_workers": 2, "worker_type": "thread"},
    "persistent": {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"},
}
COMBINED = [(kind, workers) for kind in KINDS for workers in WORKERS if (kind, workers) != ("uneven", "none")]
AHEAD: dict[str, Callable[[Loader], Iterable[Any]]] = {
    "generator": in_this_thread,
    "eager": Eager,
    "thread": InThread,
}


def sample(states: list[Any], seed: str, number: int) -> list[Any]:
    """Some of them, always the same; all with SHMLOADER_LONG=1."""
    return states if LONG else random.Random(seed).sample(states, min(number, len(states)))


def ints(batch: Any) -> list[int]:
    first = batch[0] if isinstance(batch, list) else batch
    return [int(number) for number in first.flatten()]


def tell(loader: Loader, epoch: int) -> None:
    loader.set_epoch(epoch)


def undisturbed(loader: Loader) -> list[list[list[int]]]:
    epochs = []
    for epoch in range(EPOCHS):
        tell(loader, epoch)
        epochs.append([ints(batch) for batch in loader])
    return epochs


def rest(loader: Loader, state: dict[str, Any], epoch: int) -> list[list[list[int]]]:
    """What a new program has from a state on, that is in an epoch or before it."""
    loader.load_state_dict(state)
    epochs = []
    for number in range(epoch, EPOCHS):
        tell(loader, number)
        epochs.append([ints(batch) for batch in loader])
    return epochs


@pytest.mark.in_ci(5)
@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "workers"), COMBINED)
def test_the_state_is_of_the_batch_that_came_out(kind: str, workers: str) -> None:
    """After each batch, and after each epoch, behind each look-ahead: the rest is that of the program."""
    options = WORKERS[workers]
    whole = undisturbed(KINDS[kind](**options))
    states = []
    for ahead in AHEAD.values():
        loader = KINDS[kind](**options)
        loader.state_dict()
        for epoch in range(EPOCHS):
            tell(loader, epoch)
            had = []
            for batch in loader.follow(ahead(loader)):
                had.append(ints(batch))
                states.append((epoch, len(had), loader.state_dict()))
            assert had == whole[epoch]
            states.append((epoch + 1, 0, loader.state_dict()))
            assert states[-1][2]["finished"]
        loader.close()
    for epoch, had, state in sample(states, f"{kind} {workers}", 6):
        expected = whole[epoch:]
        if expected:
            expected = [expected[0][had:], *expected[1:]]
        got = rest(KINDS[kind](**options), state, epoch)
        assert got == expected, (epoch, had, state)


@pytest.mark.each_value
@pytest.mark.parametrize("ahead", [1, 4, 30])
@pytest.mark.parametrize("kind", ["torch's sampler", "own generator", "sharded", "counted"])
def test_one_thread_reads_into_the_next_epochs(kind: str, ahead: int) -> None:
    """Up to all of them: epochs are read, and states are of them, in turn."""
    options = WORKERS["threads"]
    build = KINDS[kind]
    whole = [[ints(batch) for batch in loader] for loader in [build(**options)] for _ in range(EPOCHS)]
    loader, states = build(**options), []
    loader.state_dict()
    reader = InThreadForGood(loader, EPOCHS, ahead)
    followed = loader.follow(reader)
    for epoch in range(EPOCHS):
        had, reading = [], iter(followed)
        reader.await_all()
        for batch in reading:
            reader.await_all()
            had.append(ints(batch))
            states.append((epoch, len(had), loader.state_dict()))
        assert had == whole[epoch]
        if epoch + 1 < EPOCHS:
            states.append((epoch + 1, 0, loader.state_dict()))
    loader.close()
    for epoch, had, state in states:
        again = build(**options)
        again.load_state_dict(state)
        got = [[ints(batch) for batch in again] for _ in range(epoch, EPOCHS)]
        assert got == [whole[epoch][had:], *whole[epoch + 1 :]], (epoch, had, state)


def test_an_epoch_that_begins_between_two_loops_is_not_shown_before_it_is_read() -> None:
    """A thread that was slow goes on after the loop: what it reads is not what the program has had."""
    loader, read, go_on = shuffled(), queue.Queue[Any](), threading.Semaphore()
    whole = [[ints(batch) for batch in one] for one in [shuffled()] for _ in range(3)]

    def fill() -> None:
        for _ in range(3):
            go_on.acquire()
            for batch in itertools.chain(loader, [None]):
                read.put(batch)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    for epoch in range(3):
        assert [ints(batch) for batch in loader.follow(iter(read.get, None))] == whole[epoch]
        at_end = loader.state_dict()
        assert at_end["finished"]
        go_on.release()
        while epoch < 2 and read.qsize() < 3:
            time.sleep(0.001)
        assert loader.state_dict() == at_end
        again = shuffled()
        again.load_state_dict(at_end)
        assert [[ints(batch) for batch in again] for _ in range(epoch, 2)] == whole[epoch + 1 :]
    thread.join()
    for had, _ in enumerate(loader, 1):
        assert loader.state_dict()["batches"] == had


@pytest.mark.parametrize("limit", [None, 3])
def test_epochs_in_one_pass_are_followed_in_turn(limit: int | None) -> None:
    """A reader that begins the next epoch by itself, after a whole one or in the middle of one."""
    loader = shuffled()
    whole = [[ints(batch) for batch in itertools.islice(loader, limit)] for _ in range(EPOCHS)]
    loader = shuffled()

    def some() -> Iterable[Any]:
        for _ in range(EPOCHS):
            yield from itertools.islice(loader, limit)

    epochs = cycled(loader, EPOCHS) if limit is None else some()
    places = [(epoch, had) for epoch in range(EPOCHS) for had in range(1, len(whole[epoch]) + 1)]
    count = 0
    for (epoch, had), batch in zip(places, loader.follow(in_this_thread(epochs)), strict=True):
        assert ints(batch) == whole[epoch][had - 1]
        again = shuffled()
        again.load_state_dict(loader.state_dict())
        assert [ints(one) for one in again][: limit and limit - had] == whole[epoch][had:], (epoch, had)
        count += 1
    assert count == len(places)


@pytest.mark.in_ci(5)
@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "workers"), COMBINED)
def test_a_state_after_any_number_of_batches(kind: str, workers: str) -> None:
    """Asked for at the epoch's end only, and not before; in a resumed epoch it is counted from there."""
    options = WORKERS[workers]
    whole = undisturbed(KINDS[kind](**options))[0]
    loader = KINDS[kind](**options)
    tell(loader, 0)
    assert [ints(batch) for batch in loader] == whole
    places = [(had, loader.state_dict(taken=had)) for had in range(len(whole) + 1)]
    resumed = KINDS[kind](**options)
    resumed.load_state_dict(places[2][1])
    tell(resumed, 0)
    assert [ints(batch) for batch in resumed] == whole[2:]
    places += [(2 + had, resumed.state_dict(taken=had)) for had in range(len(whole) - 1)]
    for had, state in sample(places, f"{kind} {workers}", 6):
        again = KINDS[kind](**options)
        again.load_state_dict(state)
        tell(again, 0)
        assert [ints(batch) for batch in again] == whole[had:], (had, state)


@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")
def test_batches_by_arrival_left_out_and_raised() -> None:
    """What was done between two batches that were returned is done with the later one."""

    def build(on_error: Any, **options: Any) -> Loader:
        threads = {"num_workers": 2, "worker_type": "thread"}
        return DataLoader(Bad(24, bad=(4, 5, 11, 20)), batch_size=2, on_error=on_error, **(threads | options))

    for options in ({}, {"in_order": False}, {"num_workers": 0, "worker_type": "process"}):
        for on_error in ("skip", "raise"):
            loader, had, states = build(on_error, **options), [], []
            batches = iter(loader)
            while True:
                try:
                    had.append(ints(next(batches)))
                except ValueError:
                    continue
                except StopIteration:
                    break
                states.append(loader.state_dict())
            for number, state in enumerate(states, 1):
                assert loader.state_dict(taken=number) == state, (options, on_error, number)
            assert loader.state_dict(taken=0)["batches"] == 0
            with pytest.raises(
                ResumeError, match=rf"after {len(had) + 1} batches.* has returned {len(had)} "
            ):
                loader.state_dict(taken=len(had) + 1)


class Bad(Plain):
    """Some samples raise."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


class FirstLast(Plain):
    """The first sample comes when twelve others were returned."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.go_on = threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index or self.go_on.wait(60)
        return super().__getitem__(index)


def test_batches_that_came_early_are_in_the_states_after_them() -> None:
    """Also in states after fewer batches; each is loaded, before the first batch has come and after it."""

    def build() -> tuple[Loader, FirstLast]:
        dataset = FirstLast(24)
        threads = {"num_workers": 2, "worker_type": "thread", "dispatch": "dynamic", "in_order": False}
        return DataLoader(dataset, batch_size=2, **threads), dataset  # type: ignore[arg-type]

    loader, dataset = build()
    had, states = [], []
    for batch in loader:
        had.append(ints(batch))
        states.append(loader.state_dict())
        if len(had) == 6:
            dataset.go_on.set()
    assert had[0] != [0, 1]
    assert states[3]["batches"] == 0
    assert states[3]["batches_behind"]
    for number, state in enumerate(states, 1):
        assert loader.state_dict(taken=number) == state
        again, dataset = build()
        dataset.go_on.set()
        again.load_state_dict(state)
        assert sorted(ints(batch) for batch in again) == sorted(had[number:])


def test_a_number_that_was_not_returned_is_refused() -> None:
    loader = shuffled()
    assert loader.state_dict(taken=0) == loader.state_dict()
    with pytest.raises(ResumeError, match=r"no state after 1 batches: iter\(\) was not called yet"):
        loader.state_dict(taken=1)
    batches = iter(loader)
    next(batches)
    for taken in (-1, 2):
        with pytest.raises(ResumeError, match=f"no state after {taken} batches: .* has returned 1 in this"):
            loader.state_dict(taken=taken)
    state = loader.state_dict(taken=1)
    loader.load_state_dict(state)
    assert loader.state_dict(taken=0) == state
    with pytest.raises(ResumeError, match=r"iter\(\) was not called yet"):
        loader.state_dict(taken=1)


@pytest.mark.parametrize("kind", ["own generator", "with a state", "by arrival"])
def test_how_far_back_states_go(kind: str) -> None:
    """Beyond that orders with a checksum have none, and streams and batches by arrival are refused."""
    if kind == "own generator":
        sampler = OwnGenerator(1200, torch.Generator().manual_seed(2))
        loader = DataLoader[Any](Plain(1200), sampler=sampler)
    elif kind == "with a state":
        loader = DataLoader(StatefulStream(1200), snapshot_every_n_steps=1)
    else:
        loader = DataLoader(Plain(1200), num_workers=2, worker_type="thread", in_order=False)
    for _ in loader:
        pass
    assert loader.state_dict(taken=0)["batches"] == 0
    state = loader.state_dict(taken=300)
    assert state["batches"] + len(behind(state)) == 300
    if kind == "own generator":
        assert loader.state_dict(taken=300)["sampler_checksum"] is not None
        assert loader.state_dict(taken=5)["sampler_checksum"] is None
        assert loader.state_dict(taken=5)["batches"] == 5
        return
    with pytest.raises(ResumeError, match="1,024"):
        loader.state_dict(taken=5)


def test_a_reader_that_gives_more_than_was_returned_is_refused_when_a_state_is_asked_for() -> None:
    """Each batch in two halves, say: then no number of batches is that of the items."""
    loader = DataLoader[Any](Plain(8), batch_size=2)
    halves = loader.follow(half for batch in loader for half in batch)
    reader = iter(halves)
    next(reader)
    next(reader)
    with pytest.raises(ResumeError, match=r"after 2 batches: .* has returned 1 "):
        loader.state_dict()


def test_a_reader_of_another_loader_is_refused() -> None:
    loader, other = shuffled(), shuffled()
    with pytest.raises(ResumeError, match=r"batches of another loader than this one of Plain, .* no epoch"):
        next(iter(loader.follow(other)))


def test_a_reader_that_is_left_leaves_the_loader_to_the_next_loop() -> None:
    """Left by a break, or held by a variable, in the same thread; then a reader, or a plain loop."""
    loader = shuffled(num_workers=2, worker_type="thread")
    held = [iter(loader.follow(in_this_thread(loader)))]
    next(held[0])
    for _ in range(2):
        for had, _ in enumerate(loader, 1):
            assert loader.state_dict()["batches"] == had
    for leave in (True, False):
        reader = iter(loader.follow(InThread(loader, ahead=1)))
        next(reader)
        assert loader.state_dict()["batches"] == 1
        if not leave:
            held.append(reader)
        del reader
        gc.collect()
        for had, _ in enumerate(loader.follow(in_this_thread(loader)), 1):
            assert loader.state_dict()["batches"] == had
        assert loader.state_dict()["finished"]
        for had, _ in enumerate(loader, 1):
            assert loader.state_dict()["batches"] == had
    loader.close()


def test_a_reader_inside_another_one_is_ahead_of_it() -> None:
    """A framework follows what it reads, and the program what it reads from the framework."""
    loader = shuffled(num_workers=2, worker_type="thread")
    for ahead in (in_this_thread, InThread):
        framework = loader.follow(in_this_thread(loader))
        for epoch in range(2):
            reader = loader.follow(ahead(framework if epoch else loader.follow(in_this_thread(loader))))
            for had, _ in enumerate(reader, 1):
                assert loader.state_dict()["batches"] == had
            assert loader.state_dict()["finished"]
            framework = loader.follow(in_this_thread(loader))


def test_what_follow_returns_is_as_long_and_as_often_iterable_as_what_it_was_given() -> None:
    loader = shuffled()
    followed = loader.follow(InThread(loader))
    assert len(followed) == len(loader) == 6  # type: ignore[arg-type]
    assert [len(list(followed)) for _ in range(2)] == [6, 6]
    with pytest.raises(TypeError):
        len(loader.follow(in_this_thread(loader)))  # type: ignore[arg-type]


def test_an_exception_comes_through_and_the_reader_goes_on() -> None:
    loader = DataLoader[Any](Bad(8, bad=(2,)), batch_size=2)
    reader = iter(loader.follow(loader))
    assert ints(next(reader)) == [0, 1]
    with pytest.raises(ValueError, match="sample 2 is bad"):
        next(reader)
    assert loader.state_dict()["batches"] == 1
    assert ints(next(reader)) == [4, 5]
    assert loader.state_dict()["batches"] == 3


def test_states_are_right_while_another_thread_reads() -> None:
    """Asked for all the time: no batch of a stream is counted twice."""
    loader = DataLoader[Any](StatefulStream(3000), batch_size=2, snapshot_every_n_steps=7)
    had = 0
    for batch in loader.follow(InThread(loader, ahead=8)):
        had += 1
        state = loader.state_dict()
        assert state["batches"] == had
        if had % 100 == 1:
            again = DataLoader[Any](StatefulStream(3000), batch_size=2, snapshot_every_n_steps=7)
            again.load_state_dict(state)
            assert ints(next(iter(again)))[0] == ints(batch)[-1] + 1
    assert had == 1500
    assert threading.active_count() < 10


@pytest.mark.parametrize(
    ("arrivals", "used", "done"), [((0, 2), 1, (1,)), ((0, 3, 1), 1, (1,)), ((2, 0, 1), 1, (0, 2))]
)
def test_a_batch_that_is_late_is_not_lost_before_one_that_is_not_used(
    arrivals: tuple[int, ...], used: int, done: tuple[int, ...]
) -> None:
    """With in_order=False, the batches that the look-ahead holds may come after one that no one has had."""
    progress = Progress(0, 0, None, "", None, by_arrival=True)
    for position in arrivals:
        progress.take(position)
    assert progress.done_after(used) == done
