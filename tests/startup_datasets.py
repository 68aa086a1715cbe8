"""Datasets whose pickles and imports can be counted, for workers under every start method."""

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loading import Numbered
from torch.utils.data import Dataset, get_worker_info

from shmloader.memory import Descriptor

ARRAY_NBYTES = 1 << 20


class CountsPickles(Numbered):
    """Counts its pickles in the main process; sample ``i`` has its worker and the sum of the ballast."""

    def __init__(self, length: int, ballast: int = 0) -> None:
        super().__init__(length)
        self.pickles = 0
        self.numbers = list(range(ballast))

    def __getstate__(self) -> dict[str, Any]:
        self.pickles += 1
        return self.__dict__

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = get_worker_info()
        assert info is not None
        return index, info.id, sum(self.numbers)


class HoldsHandles(Dataset):
    """Holds one of each kind of object that can only be pickled for a process that is being started.

    Sample ``i`` uses them all; the main process sees the effects.
    """

    def __init__(self, length: int, context: Any) -> None:
        self.length = length
        self.pickles = 0
        self.lock = context.Lock()
        self.queue = context.Queue()
        self.value = context.Value("q", 0)
        self.event = context.Event()
        self.reads, self.writes = context.Pipe(duplex=False)
        self.tensor = torch.zeros(8, dtype=torch.int64).share_memory_()
        self.file = Descriptor(os.memfd_create("test-handles"))
        os.write(self.file.fd, b"contents")

    def __getstate__(self) -> dict[str, Any]:
        self.pickles += 1
        return self.__dict__

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert self.event.is_set()
        assert os.pread(self.file.fd, 8, 0) == b"contents"
        with self.lock:
            self.value.value += 1
            self.tensor[index] += 1
            self.writes.send(index)
        self.queue.put(index)
        return index

    def close(self) -> None:
        os.close(self.file.fd)
        self.reads.close()
        self.writes.close()
        self.queue.close()
        self.queue.join_thread()


class HoldsArrays(Dataset):
    """Large arrays, one of which is read-only. Each worker writes its number to another, and looks again."""

    def __init__(self) -> None:
        self.array = np.arange(ARRAY_NBYTES // 8, dtype=np.int64)
        self.columns = np.asfortranarray(self.array.reshape(256, -1))
        self.frozen = self.array.copy()
        self.frozen.flags.writeable = False
        self.small = np.arange(3)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, bool, bool]:
        info = get_worker_info()
        assert info is not None
        untouched = bool((self.array[1:] == np.arange(1, len(self.array))).all())
        untouched &= bool((self.columns == np.arange(len(self.array)).reshape(256, -1)).all())
        untouched &= self.array[0] in (0, 100 + info.id)
        self.array[0] = 100 + info.id
        self.small[0] = info.id
        # A pickle by torch's transport keeps the flag from Python 3.14 on.
        kept = self.frozen.flags.writeable == (pickle.DEFAULT_PROTOCOL < 5)
        return info.id, int(self.array[0]), untouched, kept and self.columns.flags.f_contiguous


def memory_files(_: list[Any]) -> list[str]:
    """A collate function that returns the memory files that this worker maps or has open."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in maps if "/memfd:" in line}
    return sorted(f"map {name}" for name in mapped) + sorted(f"fd {name}" for name in open_files())


def open_files() -> list[str]:
    """The files that the descriptors of this process refer to."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor that listed them
            continue
    return files


class HasTensor(Dataset):
    """A tensor, sent to workers as torch sends it; the worker copies it and drops the original."""

    def __init__(self) -> None:
        self.tensor = torch.arange(1000)

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"].clone()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor[index * 10]


class EndsOnce(CountsPickles):
    """The worker that is first asked for sample 5 ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(16)
        self.mark = folder / "ended"

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return super().__getitem__(index)


class Collects(Numbered):
    """Sample ``i`` is a garbage collection in its worker: objects visited, and bytes made private."""

    def __init__(self, length: int, rows: int) -> None:
        super().__init__(length)
        self.rows = [[index] for index in range(rows)]

    def __getitem__(self, index: int) -> tuple[int, int]:
        before_nbytes = _private_nbytes()
        gc.collect()
        return len(gc.get_objects()), _private_nbytes() - before_nbytes


def _private_nbytes() -> int:
    return 1024 * sum(
        int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        if line.startswith("Private_Dirty")  # others are a library's that another process has let go of
    )
