"""Servers and readers for tests of `shmloader.serving`: datasets, and programs in processes or threads."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import shmloader

WAIT_S = 60.0
_count = itertools.count()


class Numbers(torch.utils.data.Dataset[Any]):
    """Sample ``i`` says ``i`` in a tensor, a string and a number, with a random number."""

    def __init__(self, samples: int = 64, width: int = 512, *, draws: bool = True) -> None:
        self._samples, self._width, self._draws = samples, width, draws

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": torch.full((self._width,), float(index)),
            "name": f"sample {index}",
            "index": index,
            "noise": torch.rand(2) if self._draws else torch.ones(2),
        }


class Raising(Numbers):
    """Sample 5 raises."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("sample 5 is bad")
        return super().__getitem__(index)


class Ending(Numbers):
    """Sample 9 ends its worker, as a crash does."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9:
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def numbers(workers: int = 2, dataset: Any = None, **options: Any) -> shmloader.DataLoader[Any]:
    """A shuffled loader whose batches are the same in each process."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    options = {"batch_size": 4, "shuffle": True, "generator": generator, "num_workers": workers} | options
    return shmloader.DataLoader(dataset or Numbers(), **options)


def new_name() -> str:
    return f"test-{os.getpid()}-{next(_count)}"


def serve_made(make: Callable[[], Any], name: str, options: dict[str, Any]) -> None:
    shmloader.serve(make(), name, **options)


@contextlib.contextmanager
def served(
    make: Callable[[], Any], *, method: str = "fork", fails: bool = False, **options: Any
) -> Iterator[tuple[str, Any]]:
    """A process that serves what ``make`` returns: its name, and the process. It has to end by itself."""
    name = new_name()
    process = multiprocessing.get_context(method).Process(target=serve_made, args=(make, name, options))
    process.start()  # type: ignore[attr-defined]
    try:
        yield name, process
        process.join(WAIT_S)  # type: ignore[attr-defined]
        assert process.exitcode is not None, "the server has not ended"  # type: ignore[attr-defined]
        assert fails or process.exitcode == 0  # type: ignore[attr-defined]
    finally:
        process.kill()  # type: ignore[attr-defined]
        process.join()  # type: ignore[attr-defined]
        process.close()  # type: ignore[attr-defined]


@contextlib.contextmanager
def served_by_thread(loader: Any, **options: Any) -> Iterator[str]:
    """A thread of this process that serves a loader, which the test can look at; it has to end by itself."""
    name, errors = new_name(), list[BaseException]()

    def run() -> None:
        try:
            shmloader.serve(loader, name, **options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield name
    thread.join(WAIT_S)
    assert not thread.is_alive(), "the server has not ended"
    if errors:
        raise errors[0]


def plain(batch: Any) -> Any:
    """A batch as plain lists, to compare and to keep."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
