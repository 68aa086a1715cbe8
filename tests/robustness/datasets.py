"""Datasets that workers under every start method can import, and the batches that they must give."""

import logging
import os
import signal
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset

BATCH = 4


class Numbered(Dataset[torch.Tensor]):
    """Sample ``i`` is ``items`` int64 items, all of them ``i``, after ``delay_s`` seconds.

    ``ballast_nbytes`` is carried along, and so pickled where workers are spawned.
    """

    def __init__(self, length: int, items: int = 8, delay_s: float = 0.0, ballast_nbytes: int = 0) -> None:
        self.length, self.items, self.delay_s = length, items, delay_s
        self.ballast = np.zeros(ballast_nbytes, np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.full((self.items,), index)


class Sleeps(Numbered):
    """Takes ``sleep_s`` seconds over sample ``at`` (over each where None)."""

    def __init__(self, length: int, sleep_s: float, at: int | None = None) -> None:
        super().__init__(length)
        self.sleep_s, self.at = sleep_s, at

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.at in (None, index):
            time.sleep(self.sleep_s)
        return super().__getitem__(index)


class Ends(Numbered):
    """The worker that is asked for ``at`` ends itself: by signal ``-how``, or with exit code ``how``."""

    def __init__(self, length: int, at: int, how: int) -> None:
        super().__init__(length)
        self.at, self.how = at, how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            if self.how < 0:
                signal.signal(-self.how, signal.SIG_DFL) if -self.how != signal.SIGKILL else None
                os.kill(os.getpid(), -self.how)
            os._exit(self.how)
        return super().__getitem__(index)


class Dicts(Numbered):
    """Sample ``i`` is a dict of ``leaves`` tensors."""

    def __init__(self, length: int, leaves: int) -> None:
        super().__init__(length)
        self.leaves = leaves

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {f"leaf{n}": torch.full((4,), index + n) for n in range(self.leaves)}


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
    """Sample ``i`` is 8 items, sample ``at`` is ``items`` of them, made in one piece."""

    def __init__(self, length: int, at: int, items: int) -> None:
        self.length, self.at, self.items = length, at, items

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.items if index == self.at else 8,), index)


class Logs(Numbered):
    """Uses in the worker what a thread of the main process may have held when it was forked."""

    def __getitem__(self, index: int) -> torch.Tensor:
        logging.getLogger().warning("sample %d", index)
        logging.getLogger("robustness.new").addHandler(logging.NullHandler())
        assert (torch.randn(300, 300) @ torch.randn(300, 300)).shape == (300, 300)
        assert pc.sum(pa.array([index, 1])).as_py() == index + 1
        return super().__getitem__(index)
