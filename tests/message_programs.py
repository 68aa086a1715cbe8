"""Programs that end with the messages of docs/messages.md.

    python message_programs.py NAME (torch|shmloader)

Those with a message of torch's end with it under torch's loader; with shmloader's some load all batches, and
print "loaded".
"""

import mmap
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data

import shmloader

MAIN = os.getpid()
BATCHES = 64
MAP_NORESERVE = 0x4000  # not in mmap


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of 4 KB; before each of them it may do something."""

    def __init__(self, act: Callable[[int], object] = int, items: int = 1000) -> None:
        self.act, self.items = act, items

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.act(index)
        return torch.full((self.items,), index)


def load(dataset: Any, **options: Any) -> None:
    kept = list(loader_of(dataset, **options))
    assert len(kept) == BATCHES
    print("loaded")


def loader_of(dataset: Any, **options: Any) -> Any:
    kind = shmloader.DataLoader if "shmloader" in sys.argv else torch.utils.data.DataLoader
    return kind(dataset, **({"num_workers": 1, "multiprocessing_context": "fork"} | options))


def ends_by(number: int) -> Callable[[int], object]:
    return lambda index: index == 5 and os.kill(os.getpid(), number)


def bus_error() -> None:
    load(Rows(ends_by(signal.SIGBUS)))


def no_space() -> None:
    load(Rows(items=1 << 19))


def killed() -> None:
    load(Rows(ends_by(signal.SIGKILL)))


def exited() -> None:
    load(Rows(lambda index: index == 5 and os._exit(3)))


def files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    load(Rows())


def _put(queue: Any, stopped: bool) -> None:
    queue.put(torch.zeros(1000))
    while stopped:  # its thread that serves descriptors stops too
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(30)


def _sent(stopped: bool) -> tuple[Any, Any]:
    queue = torch.multiprocessing.get_context("fork").Queue()
    process = torch.multiprocessing.get_context("fork").Process(
        target=_put, args=(queue, stopped), daemon=True
    )
    process.start()
    while not queue._poll():
        time.sleep(0.01)
    time.sleep(1.0)
    return queue, process


def ancdata() -> None:
    """With room for the connection over which the descriptor comes, and not for the descriptor."""
    if "shmloader" in sys.argv:
        files()
        return
    queue, _ = _sent(stopped=False)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, free + 2))
    queue.get()


def reset() -> None:
    queue, process = _sent(stopped=True)
    threading.Timer(1.0, os.kill, (process.pid, signal.SIGKILL)).start()
    queue.get()


def key_error() -> None:
    load(Rows({}.__getitem__))


def local_object() -> None:
    load(Rows(lambda index: None), multiprocessing_context="spawn")


def manager() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    os.environ["TMPDIR"] = "/nonexistent"
    load(Rows())


def object_gone() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    loader = loader_of(Rows())
    iterator = iter(loader)
    deadline_s = time.monotonic() + (60 if "torch" in sys.argv else 2)
    found: list[pathlib.Path] = []
    while not found and time.monotonic() < deadline_s:
        time.sleep(0.1)
        found = list(pathlib.Path("/dev/shm").glob(f"torch_{iterator._workers[0].pid}_*"))
    for path in found:
        path.unlink()
    assert sum(1 for _ in iterator) == BATCHES
    print("loaded")


def timed_out() -> None:
    load(Rows(lambda index: time.sleep(30)), timeout=1)


def child() -> None:
    iterator = iter(loader_of(Rows()))
    next(iterator)
    pid = os.fork()
    if not pid:
        del iterator
        os._exit(0)
    os.waitpid(pid, 0)
    if "torch" in sys.argv:  # whose workers the child may have ended
        os._exit(0)
    assert sum(1 for _ in iterator) == BATCHES - 1
    print("loaded")


def keeps() -> None:
    dataset = torch.utils.data.ConcatDataset([Rows(items=1 << 15)] * 2)
    assert len(list(loader_of(dataset, prefetch_factor=1))) == 2 * BATCHES


def closed() -> None:
    loader = loader_of(Rows())
    iterator = iter(loader)
    loader.close()
    next(iterator)


def other_state() -> None:
    loader = loader_of(Rows(), batch_size=2)
    next(iter(loader))
    other = loader_of(Rows(), batch_size=4)
    other.load_state_dict(loader.state_dict())
    iter(other)


def rebuilt() -> None:
    rows = Rows()
    rows.texts = [f"text {number}" for number in range(700_000)]  # type: ignore[attr-defined]
    load(rows, multiprocessing_context="spawn")


def exhausted() -> None:
    nbytes = psutil.virtual_memory().total + (1 << 30)
    shmloader.share(np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | MAP_NORESERVE), np.uint8))


if sys.argv[1] == "guard":  # at its top level, as it must not be
    list(loader_of(Rows(), multiprocessing_context="spawn"))
elif __name__ == "__main__":
    globals()[sys.argv[1]]()
