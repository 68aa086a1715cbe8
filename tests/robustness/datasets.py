"""Datasets that workers under every start method can import, and the batches that they must give."""

import ctypes
import logging
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from loading import Numbered
from torch.utils.data import Dataset

BATCH = 4


class Dicts(Numbered):
    """Sample ``i`` is a dict of ``leaves`` tensors."""

    def __init__(self, length: int, leaves: int) -> None:
        super().__init__(length)
        self.leaves = leaves

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {f"leaf{n}": torch.full((4,), index + n) for n in range(self.leaves)}


class Records(Numbered):
    """Labels of 600,000 records, which are Python objects."""

    def __init__(self) -> None:
        super().__init__(600_000)
        self.samples = [{"path": f"folder/{n}.jpeg", "label": n + 1000} for n in range(self.length)]

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]["label"]


class Subprocesses(Numbered):
    """The one sample is the exit code of a program that was asked to end by SIGTERM."""

    def __init__(self) -> None:
        super().__init__(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return torch.tensor(program.wait(10))


class Eats(Numbered):
    """Sample ``at`` allocates and touches ``nbytes`` of private memory."""

    def __init__(self, length: int, at: int, nbytes: int) -> None:
        super().__init__(length)
        self.at, self.nbytes = at, nbytes

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            np.ones(self.nbytes, np.uint8)
        return super().__getitem__(index)


class WithEpoch(Numbered):
    """Samples are the value of ``epoch``: a ``multiprocessing.Value`` or a shared tensor."""

    def __init__(self, length: int, epoch: Any) -> None:
        super().__init__(length)
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        value = self.epoch if isinstance(self.epoch, torch.Tensor) else self.epoch.value
        return torch.tensor([index, int(value)])


def first_indices(batches: Any) -> list[int]:
    """The first index of each batch of `Numbered`, after checking that every item is its sample's."""
    found = []
    for batch in batches:
        expected = torch.arange(int(batch[0, 0]), int(batch[0, 0]) + len(batch))
        assert torch.equal(batch, expected[:, None].expand_as(batch)), f"a wrong batch: {batch}"
        found.append(int(batch[0, 0]))
    return found


class GrowsAt(Dataset[torch.Tensor]):
    """Sample ``i`` has 8 items, sample ``at`` has ``items``, made in one piece."""

    def __init__(self, length: int, at: int, items: int) -> None:
        self.length, self.at, self.items = length, at, items

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.items if index == self.at else 8,), index)


class Logs(Numbered):
    """Uses logging, torch and Arrow, whose locks a thread of the main process may hold at a fork."""

    def __getitem__(self, index: int) -> torch.Tensor:
        logging.getLogger().warning("sample %d", index)
        logging.getLogger("robustness.new").addHandler(logging.NullHandler())
        assert (torch.randn(300, 300) @ torch.randn(300, 300)).shape == (300, 300)
        assert pc.sum(pa.array([index, 1])).as_py() == index + 1
        return super().__getitem__(index)


class HoldsTheLock(Numbered):
    """Sample ``at`` writes a file, then takes a minute in C code that holds the interpreter lock."""

    def __init__(self, length: int, at: int, path: str) -> None:
        super().__init__(length)
        self.at, self.path = at, path

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            Path(self.path).write_text(str(index))
            ctypes.PyDLL(None).sleep(60)
        return super().__getitem__(index)
