"""`shmloader.Queue`: order and values, the end, roles, waiting, and memory that is made in the queue."""

from __future__ import annotations

import copy
import multiprocessing
import queue
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from queue_processes import claim_getting, claim_putting, echo, item, objects, put_items, same

import shmloader
from shmloader import Queue, QueueClosed
from shmloader.channel.consumer import Consumer
from shmloader.channel.producer import Producer

METHODS = pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.long), "forkserver"]
)


@contextmanager
def process(method: str, target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that has ended by itself, and well, after the block."""
    started = multiprocessing.get_context(method).Process(target=target, args=arguments)
    started.start()
    try:
        yield started
        started.join(60)
        assert started.exitcode == 0
    finally:
        started.kill()
        started.join()
        started.close()


@METHODS
@pytest.mark.parametrize("maxsize", [1, 7])
def test_objects_of_every_kind_arrive_in_order_and_stay_while_they_are_held(
    warm_helpers: None, method: str, maxsize: int
) -> None:
    count, held = 150, []
    numbers = Queue(maxsize)
    with process(method, put_items, numbers, maxsize, count):
        for number, got in enumerate(objects(numbers)):
            assert same(got, item(maxsize, number)), number
            if number % 3 == 0:
                held.append((number, got))
            if len(held) > 20:
                old, kept = held.pop(number % 20)
                assert same(kept, item(maxsize, old)), old
    assert number == count - 1
    assert all(same(got, item(maxsize, number)) for number, got in held)


@METHODS
def test_there_and_back(warm_helpers: None, method: str) -> None:
    inward, outward = Queue(2), Queue(2)
    with process(method, echo, inward, outward):
        for number in range(60):
            inward.put(item(1, number))
            assert same(outward.get(timeout=60), item(1, number))
        inward.close()
        with pytest.raises(QueueClosed, match=r"puts into this queue, .* \(pid \d+\), has closed it"):
            outward.get(timeout=60)


def test_two_threads_of_one_process() -> None:
    both = Queue(3)
    thread = threading.Thread(target=lambda: [both.put(item(2, number)) for number in range(200)])
    thread.start()
    assert all(same(both.get(), item(2, number)) for number in range(200))
    thread.join()
    both.close()


def test_several_threads_at_each_end_lose_and_double_nothing() -> None:
    both, got = Queue(4), []
    producers = [
        threading.Thread(target=lambda first=first: [both.put((first, n)) for n in range(100)])
        for first in range(3)
    ]
    consumers = [
        threading.Thread(target=lambda: [got.append(both.get()) for _ in range(100)]) for _ in range(3)
    ]
    for thread in (*producers, *consumers):
        thread.start()
    for thread in (*producers, *consumers):
        thread.join()
    assert sorted(got) == [(first, n) for first in range(3) for n in range(100)]
    both.close()


def test_what_was_got_may_be_written_to_and_what_was_put_changed() -> None:
    both, values = Queue(2), torch.arange(100_000)
    both.put(values)
    values.zero_()
    got = both.get()
    got += 1
    assert torch.equal(got, torch.arange(100_000) + 1)
    both.put(values)
    assert not both.get().any()
    assert torch.equal(got, torch.arange(100_000) + 1)
    both.close()


def test_small_arrays_travel_in_the_record_and_are_writable() -> None:
    both = Queue(2)
    both.put((np.arange(3), torch.ones(2)))
    array, tensor = both.get()
    array += 1
    tensor += 1
    assert array.tolist() == [1, 2, 3]
    assert tensor.tolist() == [2, 2]
    consumer: Any = both._ends[Consumer]
    assert consumer._table.tasks == 2  # it took none of the granted slots
    both.close()


def test_put_does_not_wait_for_the_first_get_and_maxsize_holds() -> None:
    for size in (1, 100_000):
        both = Queue(3)
        for number in range(3):
            assert not both.full()
            both.put_nowait(bytes([number]) * size)
        assert (both.qsize(), both.full(), both.empty()) == (3, True, False)
        with pytest.raises(queue.Full):
            both.put_nowait(b"")
        began_s = time.monotonic()
        with pytest.raises(queue.Full):
            both.put(b"", timeout=0.2)
        assert time.monotonic() - began_s >= 0.2
        assert both.get() == b"\0" * size
        both.put_nowait(b"last")
        assert [len(both.get()) for _ in range(3)] == [size, size, 4]
        assert both.empty()
        with pytest.raises(queue.Empty):
            both.get_nowait()
        with pytest.raises(queue.Empty):
            both.get(timeout=0.1)
        both.close()


@pytest.mark.parametrize("maxsize", [1, 15, 100, 1000, 16_000])
def test_a_full_queue_of_the_largest_records_needs_no_get(maxsize: int) -> None:
    """No put of an object that is not beyond ``maxsize`` waits for room in the pipe."""
    both = Queue(maxsize)
    size = both._parts.inline_nbytes - 60
    values = [bytes([number % 251]) * max(0, size - number % 3) for number in range(maxsize)]
    for value in values:
        both.put_nowait(value)
    with pytest.raises(queue.Full):
        both.put_nowait(1)
    assert [both.get_nowait() for _ in values] == values
    both.close()


def test_sizes_that_cannot_be() -> None:
    for maxsize in (0, -1):
        with pytest.raises(ValueError, match="must be at least 1"):
            Queue(maxsize)
    with pytest.raises(
        ValueError, match=r"maxsize=10000000 is too large: a pipe of this system holds \d+ pages"
    ):
        Queue(10_000_000)


def test_an_object_that_cannot_be_pickled_changes_nothing() -> None:
    both = Queue(2)
    for obj in (lambda: None, [torch.ones(100_000), lambda: None]):
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            both.put(obj)
    both.put([1])
    assert both.get() == [1]
    with pytest.raises(queue.Empty):
        both.get_nowait()
    both.close()


class Refuses:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_object_that_cannot_be_unpickled_raises_and_the_next_one_comes() -> None:
    both = Queue(2)
    both.put([Refuses(), torch.ones(100_000)])
    both.put(2)
    with pytest.raises(ValueError, match="no number"):
        both.get()
    assert both.get() == 2
    both.close()


# --- memory in the queue


def test_memory_of_the_queue_is_not_copied_and_is_given_away() -> None:
    both = Queue(2)
    for number in range(10):
        given = both.new_empty((300, 100), torch.float64).fill_(number)
        producer: Any = both._ends[Producer]
        before = producer._outbox._encoder.copied_nbytes
        both.put({"x": given, "number": number})
        assert producer._outbox._encoder.copied_nbytes == before
        assert given.shape == (0,)
        got = both.get()
        assert got["x"].shape == (300, 100)
        assert (got["x"] == number).all()
    both.close()


def test_views_that_are_left_keep_their_values_and_do_not_change_what_was_put() -> None:
    both = Queue(1)
    given = both.new_empty(100_000, torch.int32).fill_(1)
    view = given[:1000]
    both.put(given)
    view += 1
    got = both.get()
    assert (got == 1).all()
    assert (view == 2).all()
    del got
    both.put(torch.full((100_000,), 7, dtype=torch.int32))  # in the same slot
    assert (view == 2).all()
    both.get()
    both.close()


def test_memory_that_was_not_put_stays_the_programs() -> None:
    both = Queue(1)
    given = both.new_empty(100_000, torch.int32).fill_(1)
    both.put(torch.full((100_000,), 2, dtype=torch.int32))
    given += 4
    assert (both.get() == 2).all()
    both.put(torch.full((100_000,), 3, dtype=torch.int32))
    assert (given == 5).all()
    both.get()
    both.close()


def test_a_failed_put_leaves_the_memory_and_it_can_be_put_again() -> None:
    both = Queue(1)
    given = both.new_empty(100_000, torch.int32).fill_(1)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        both.put([given, lambda: None])
    assert given.shape == (100_000,)
    both.put(given)
    with pytest.raises(queue.Full):
        both.new_empty(1, timeout=0.1)
    assert (both.get() == 1).all()
    both.close()


def test_several_tensors_in_one_object_with_and_without_room() -> None:
    both = Queue(1)
    for number in range(4):
        given = [both.new_empty((size,), torch.int64).fill_(number) for size in (1000, 100_000, 3)]
        both.put(given)
        assert [len(one) for one in both.get()] == [1000, 100_000, 3]
    both.close()


# --- roles


@METHODS
def test_a_second_producer_and_a_second_consumer_are_refused_by_name(warm_helpers: None, method: str) -> None:
    for target, does in ((claim_putting, "puts into"), (claim_getting, "gets from")):
        used, answers = Queue(2), Queue(2)
        used.put(1)
        used.get()
        with process(method, target, used, answers):
            error = answers.get(timeout=60)
        assert f"another one {does} this queue, MainProcess (pid " in error
        assert "one queue for each producer" in error
        used.close()
        answers.close()


def test_it_travels_with_a_process_alone() -> None:
    one = Queue(1)
    for attempt in (lambda: one.put(one), lambda: copy.deepcopy(one)):
        with pytest.raises(RuntimeError, match="should only be shared between processes through inheritance"):
            attempt()
    one.close()


# --- several queues


def test_waiting_for_several_producers(warm_helpers: None) -> None:
    queues = [Queue(2) for _ in range(3)]
    got: dict[int, list[Any]] = {place: [] for place in range(3)}
    started = [
        multiprocessing.get_context("fork").Process(target=put_items, args=(one, seed, 40, True))
        for seed, one in enumerate(queues)
    ]
    for one in started:
        one.start()
    open_queues = dict(enumerate(queues))
    while open_queues:
        for ready in shmloader.wait(open_queues.values(), timeout=60):
            place = queues.index(ready)
            try:
                got[place].append(ready.get_nowait())
            except QueueClosed:
                del open_queues[place]
    for seed, values in got.items():
        assert len(values) == 40
        assert all(same(value, item(seed, number)) for number, value in enumerate(values))
    for one in started:
        one.join()
        one.close()


def test_wait_returns_after_its_timeout_and_at_once_if_something_is_there() -> None:
    first, second = Queue(1), Queue(1)
    began_s = time.monotonic()
    assert shmloader.wait([first, second], timeout=0.2) == []
    assert 0.2 <= time.monotonic() - began_s < 30
    second.put(1)
    assert shmloader.wait([first, second], timeout=0) == [second]
    assert shmloader.wait([first, second]) == [second]
    first.close()
    second.close()


def test_selectors_see_what_is_there() -> None:
    one = Queue(2)
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ)
        assert selector.select(timeout=0) == []
        one.put(1)
        one.put(torch.ones(100_000))
        for _ in range(2):
            assert [key.fileobj for key, _ in selector.select(timeout=60)] == [one]
            one.get()
        assert selector.select(timeout=0) == []
    one.close()


# --- the end


def test_what_was_put_comes_before_the_end() -> None:
    one = Queue(4)
    with process("fork", put_items, one, 3, 4):
        time.sleep(0.3)
        assert [same(got, item(3, number)) for number, got in enumerate(objects(one))] == [True] * 4
        with pytest.raises(EOFError):
            one.get()
    one.close()


def test_wrong_arguments_are_refused_and_a_wait_for_nothing_is_too() -> None:
    for wrong in ("4", 2.5, None):
        with pytest.raises(TypeError, match=f"maxsize must be a whole number, not {wrong!r}"):
            Queue(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="queues is empty, so nothing can come"):
        shmloader.wait([])
    one = Queue(2)
    for size in (-1, (3, -2), (-3, -2)):
        for error in (_error(torch.empty, size), _error(one.new_empty, size)):
            assert error[0] is RuntimeError
            assert "negative dimension" in error[1]
    first = one.new_empty(3)
    assert _error(one.new_empty, -1)[0] is RuntimeError  # nor beside another tensor
    one.put(first.fill_(1))
    assert one.get().tolist() == [1, 1, 1]
    one.close()


def _error(call: Callable[[Any], object], size: object) -> tuple[type[Exception], str]:
    try:
        raise AssertionError(call(size))
    except RuntimeError as error:
        return type(error), str(error)


def test_a_closed_queue_refuses_and_closes_once() -> None:
    one = Queue(2)
    one.put(torch.ones(50_000))
    kept = one.get()
    one.put(1)
    one.close()
    one.close()
    one.join_thread()
    for call in (one.get, lambda: one.put(1), one.fileno, lambda: one.new_empty(1)):
        with pytest.raises(ValueError, match="is closed"):
            call()
    assert kept.sum() == 50_000


def test_closing_ends_a_wait_in_another_thread() -> None:
    one, errors = Queue(2), []

    def waits() -> None:
        try:
            one.get()
        except QueueClosed as error:
            errors.append(str(error))

    thread = threading.Thread(target=waits)
    thread.start()
    while Consumer not in one._ends:
        time.sleep(0.01)
    time.sleep(0.2)
    one.close()
    thread.join(60)
    assert errors == ["this process has closed the queue"]


def test_the_producer_hears_that_the_consumer_closed(warm_helpers: None) -> None:
    def consume(one: Queue) -> None:
        one.get()
        one.close()

    one = Queue(1)
    closed = pytest.raises(QueueClosed, match=r"gets from this queue, .* \(pid \d+\), has closed it")
    with process("fork", consume, one), closed:
        while True:
            one.put(torch.ones(10_000))
    one.close()


def test_the_producer_hears_of_it_where_a_thread_of_the_consumer_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmloader.channel.end.LOOK_S", 0.05)  # forked with it

    def waits(one: Queue) -> None:
        with pytest.raises(QueueClosed):
            one.get()

    def consume(one: Queue) -> None:
        thread = threading.Thread(target=waits, args=(one,))
        thread.start()
        time.sleep(0.2)
        one.close()
        thread.join()

    one = Queue(1)
    with process("fork", consume, one), pytest.raises(QueueClosed, match="has closed it"):
        time.sleep(0.5)  # until then it waits
        while True:
            one.put(1, timeout=60)
    one.close()


def test_a_producer_that_ends_without_closing_is_an_error_after_its_objects() -> None:
    one = Queue(2)

    def produce() -> None:
        one.put(1)
        one.put(2)

    started = multiprocessing.get_context("fork").Process(target=produce)
    started.start()
    assert one.get() == 1
    assert one.get() == 2
    with pytest.raises(shmloader.PeerDied, match="exited with code 0"):
        one.get()
    started.join()
    started.close()
    one.close()


def test_nothing_is_imported_before_it_is_used() -> None:
    from robustness.processes import python

    python(
        """
        import sys, shmloader
        assert not any(name.startswith("shmloader.channel") for name in sys.modules)
        assert shmloader.Queue(1).maxsize == 1
        assert "shmloader.channel.queue" in sys.modules
        """
    )


def test_a_size_may_be_a_number_of_numpys() -> None:
    one = Queue(2)
    assert one.new_empty(np.int64(3)).shape == (3,)
    assert one.new_empty((np.int64(2), 3)).shape == (2, 3)
    one.close()
