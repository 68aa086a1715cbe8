"""Datasets with ``worker_setup`` and ``worker_teardown`` that write down, in files, what is called where."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Call(NamedTuple):
    """A line of the file: what was called, the number of the worker (-1 for none), its process and thread."""

    what: str
    worker: int
    pid: int
    thread: int


def note(folder: Path, what: str) -> None:
    """Write down a call, a word, in one write: several processes write to the file."""
    info = get_worker_info()
    number = -1 if info is None else info.id
    with (folder / "calls").open("a") as file:
        file.write(f"{what} {number} {os.getpid()} {threading.get_native_id()}\n")


def calls(folder: Path, *names: str) -> list[Call]:
    """What was called so far, in this order; only of these names, if there are any."""
    lines = [line.split() for line in (folder / "calls").read_text().splitlines()]
    found = [Call(what, int(worker), int(pid), int(thread)) for what, worker, pid, thread in lines]
    return [call for call in found if not names or call.what in names]


def by_worker(folder: Path) -> dict[tuple[int, int], list[str]]:
    """The calls of each worker, without repetitions one after the other; workers by pid and thread."""
    found: dict[tuple[int, int], list[str]] = {}
    for call in calls(folder):
        told = found.setdefault((call.pid, call.thread), [])
        if told[-1:] != [call.what]:
            told.append(call.what)
    return found


class Opens(Dataset):
    """Reads a file that is opened in ``worker_setup`` alone; an open one has no pickle and no copy."""

    file: Any = None

    def __init__(self, folder: Path, length: int = 24) -> None:
        self.folder = folder
        self.length = length

    def __len__(self) -> int:
        return self.length

    def worker_setup(self, info: Any) -> None:
        assert len(info.dataset) == 24
        assert self.file is None
        note(self.folder, "setup")
        self.file = (self.folder / "calls").open()

    def worker_teardown(self) -> None:
        note(self.folder, "teardown")
        self.file.close()
        self.file = None

    def __getitem__(self, index: int) -> torch.Tensor:
        assert not self.file.closed
        note(self.folder, "sample")
        return torch.tensor(index)


class Streams(Opens, IterableDataset):
    """A stream whose ``finally`` block uses the open file."""

    def __iter__(self) -> Iterator[int]:
        try:
            for index in range(self.length):
                assert not self.file.closed
                yield index
        finally:
            note(self.folder, "too-late" if self.file is None else "ends")


class FailsToSetUp(Opens):
    """``worker_setup`` raises in worker 0, in its first call in a process."""

    failed = False

    def worker_setup(self, info: Any) -> None:
        if info.id == 0 and not self.failed:
            self.failed = True
            raise ConnectionError("no server")
        super().worker_setup(info)


class FailsToTearDown(Opens):
    """``worker_teardown`` raises when it has closed the file."""

    def worker_teardown(self) -> None:
        super().worker_teardown()
        raise ConnectionError("the server has gone")


class Forks(Opens):
    """A process that sample 5 forks comes back from the dataset with an exception."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            child = os.fork()
            if child == 0:
                os.close(2)  # its traceback
                raise RuntimeError("this process is no worker")
            os.waitpid(child, 0)
        return super().__getitem__(index)
