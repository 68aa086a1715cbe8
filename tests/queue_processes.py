"""What the processes of the tests of queues do; under spawn these functions are imported."""

from __future__ import annotations

import os
import queue
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shmloader import Queue, QueueClosed

KINDS = 9


def item(seed: int, number: int) -> Any:
    """Object ``number`` of a run, of a random kind and size; always the same one."""
    chance = random.Random(f"{seed} {number}")
    size = chance.choice([0, 1, 3, 17, 200, 5_000, 70_000])
    match chance.randrange(KINDS):
        case 0:
            return number
        case 1:
            return {"number": number, "text": "x" * size, "nested": [(number, None)]}
        case 2:
            return torch.full((size,), number)
        case 3:
            return np.full((size, 2), number, np.float32)
        case 4:
            return {f"leaf {leaf}": torch.full((leaf + 1, 3), number + leaf) for leaf in range(30)}
        case 5:
            return number.to_bytes(4, "little") * size
        case 6:
            return [
                torch.tensor(number),
                np.float64(number),
                {number},
                torch.full((size,), number).bfloat16(),
            ]
        case 7:
            return torch.full((size + 1, 4), number).t()
        case _:
            return (number, torch.full((size,), float(number)).requires_grad_())


def same(left: Any, right: Any) -> bool:
    """Whether two objects are the same in types and values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.requires_grad != right.requires_grad or left.dtype != right.dtype:
            return False
        return left.stride() == right.stride() and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def put_items(queue: Queue, seed: int, count: int, pauses: bool = False) -> None:
    """Produce so many objects, and close the queue."""
    torch.set_num_threads(1)  # a fork has none of the pool that its parent may have used
    chance = random.Random(seed)
    for number in range(count):
        if pauses and chance.random() < 0.05:
            time.sleep(chance.random() / 50)
        made = item(seed, number)
        if (
            isinstance(made, torch.Tensor)
            and made.dim() == 1
            and not made.requires_grad
            and chance.random() < 0.5
        ):
            given = queue.new_empty(made.shape, made.dtype)
            given.copy_(made)
            made = given
        queue.put(made)
    queue.close()


def echo(inward: Queue, outward: Queue) -> None:
    """Put what is got, until the other end closes."""
    torch.set_num_threads(1)  # a fork has none of the pool that its parent may have used
    for got in objects(inward):
        outward.put(got)
    outward.close()


def objects(queue: Queue) -> Iterator[Any]:
    """All objects of a queue until its producer closes it."""
    while True:
        try:
            yield queue.get()
        except QueueClosed:
            return


def put_and_die(queue: Queue, count: int, number: int) -> None:
    """Produce so many objects, and die by a signal."""
    torch.set_num_threads(1)  # a fork has none of the pool that its parent may have used
    for made in range(count):
        queue.put(torch.full((1000,), made))
    os.kill(os.getpid(), number)


def die(queue: Queue, code: int) -> None:
    """End without a use of the queue."""
    os._exit(code)


def get_and_die(queue: Queue, count: int, number: int) -> None:
    """Get so many objects, and die by a signal."""
    torch.set_num_threads(1)  # a fork has none of the pool that its parent may have used
    for _ in range(count):
        queue.get()
    os.kill(os.getpid(), number)


def put_for_ever(queue: Queue, seed: int) -> None:
    """Produce until killed, or until the consumer is dead."""
    torch.set_num_threads(1)  # a fork has none of the pool that its parent may have used
    number = 0
    while True:
        queue.put((number, item(seed, number)))
        number += 1


def get_for_ever(queue: Queue, seed: int) -> None:
    """Consume and check until killed, or until the producer is dead; keep some."""
    torch.set_num_threads(1)  # a fork has none of the pool that its parent may have used
    number, held = 0, []
    while True:
        got, made = queue.get()
        assert got == number, f"object {got} came in place of {number}"
        assert same(made, item(seed, number)), f"object {number} has changed"
        held.append((number, made))
        if len(held) > 5:
            old, kept = held.pop(number % 5)
            assert same(kept, item(seed, old)), f"object {old} has changed while it was held"
        number += 1


def claim_putting(queue: Queue, answers: Queue) -> None:
    """Try to put into a queue that another process puts into; answer with the error."""
    answers.put(_error_of(lambda: queue.put(1)))


def claim_getting(queue: Queue, answers: Queue) -> None:
    """Try to get from a queue that another process gets from; answer with the error."""
    answers.put(_error_of(queue.get_nowait))


def _error_of(call: Any) -> str:
    try:
        call()
    except queue.Empty:
        return "no error"
    except RuntimeError as error:
        return str(error)
    return "no error"
