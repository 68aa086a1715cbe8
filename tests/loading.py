"""Datasets and collate functions that workers under every start method can import."""

import multiprocessing
import os
import signal
import subprocess
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

import shmloader


class Numbered(Dataset[torch.Tensor]):
    """Sample ``i`` is ``items`` int64 items, all of them ``i``, after ``delay_s`` seconds.

    It carries ``ballast_nbytes`` of data, which is pickled for spawned workers.
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


class Growing(Numbered):
    """Sample ``i`` has ``sizes[i]`` items."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(len(sizes))
        self.sizes = sizes

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index)


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


class DiesWithHeir(Numbered):
    """The worker starts a process that holds all its descriptors, and is killed.

    Attributes:
        heir: The pid of that process, for the test to end it.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.heir = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            self.heir.fill_(subprocess.Popen(["sleep", "600"], close_fds=False).pid)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Held(Numbered):
    """No sample comes before ``released`` is set; for forked workers and threads."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.released = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.released.wait()
        return super().__getitem__(index)


class HeldAt(Held):
    """Sample ``at`` alone does not come before ``released`` is set; the worker sets ``inside`` there."""

    def __init__(self, length: int, at: int) -> None:
        super().__init__(length)
        self.at, self.inside = at, multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index != self.at:
            return Numbered.__getitem__(self, index)
        self.inside.set()
        return super().__getitem__(index)


class Sleeps(Numbered):
    """Takes ``sleep_s`` seconds for sample ``at`` (for each, if None)."""

    def __init__(self, length: int, sleep_s: float, at: int | None = None) -> None:
        super().__init__(length)
        self.sleep_s, self.at = sleep_s, at

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.at in (None, index):
            time.sleep(self.sleep_s)
        return super().__getitem__(index)


class FourArguments(Exception):
    """Cannot be rebuilt from ``args``."""

    def __init__(self, one: int, two: int, three: int, four: int) -> None:
        super().__init__(f"{one}{two}{three}{four}")
        self.four = four


class Unpicklable(ValueError):
    """Holds an object that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("with a lambda")
        self.function = lambda: None


def make_error(name: str) -> BaseException:
    """Make an exception of a kind that is known to get lost between processes."""
    return {
        "KeyError": lambda: KeyError("a", 1),
        "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        "CalledProcessError": lambda: subprocess.CalledProcessError(3, ["ls"], b"out", b"err"),
        "FourArguments": lambda: FourArguments(1, 2, 3, 4),
        "Unpicklable": Unpicklable,
        "ExceptionGroup": lambda: ExceptionGroup("two", [ValueError(1), KeyError(2)]),
        "SystemExit": lambda: SystemExit(7),
        "KeyboardInterrupt": lambda: KeyboardInterrupt("in a worker"),
        "OSError": lambda: FileNotFoundError(2, "No such file", "gone.png"),
    }[name]()


class Raises(Numbered):
    """Sample ``at`` raises ``make_error(name)``."""

    def __init__(self, length: int, at: int, name: str) -> None:
        super().__init__(length)
        self.at, self.name = at, name

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            raise make_error(self.name)
        return super().__getitem__(index)


class KeepsBatches:
    """A collate function whose worker keeps all its batches, and changes nothing in them.

    Each call checks that the earlier batches are unchanged.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        for batch, copy in self.kept:
            if not torch.equal(batch, copy):
                raise AssertionError("a batch that the worker kept has changed")
        batch = default_collate(samples)
        self.kept.append((batch, batch.clone()))
        return batch


class SendsAgain(KeepsBatches):
    """Returns each batch together with the first one that this worker made."""

    def __call__(self, samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = super().__call__(samples)
        return batch, self.kept[0][0]


def into_empty(samples: list[torch.Tensor]) -> dict[str, Any]:
    """A custom collate that writes into ``shmloader.empty`` and returns views of it."""
    out = shmloader.empty(len(samples) + 1, len(samples[0]), dtype=torch.int64)
    for row, sample in zip(out, [samples[0], *samples], strict=True):
        row.copy_(sample)
    return {"rows": out[1:], "first": out[0], "array": np.arange(len(samples))}
