"""Datasets and samplers of the tests of `state_dict()`, which workers under every start method can import."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler


class Drawing(Dataset[torch.Tensor]):
    """Sample ``i`` is ``i`` and draws from the three global generators; in a thread, from its worker's.

    Args:
        length: Number of samples.
        bad: Indices whose samples raise.
        log: A file that gets a line for each index that is fetched.
    """

    def __init__(self, length: int, bad: tuple[int, ...] = (), log: Path | None = None) -> None:
        self.length, self.bad, self.log = length, bad, log

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{int(index)}\n")
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        if threading.current_thread() is threading.main_thread():
            drawn = torch.randint(1 << 30, ()).item(), random.getrandbits(30), np.random.randint(1 << 30)
            return torch.tensor([index, *drawn])
        rng: Any = torch.utils.data.get_worker_info().rng  # type: ignore[union-attr]
        of_torch = torch.randint(1 << 30, (), generator=rng.torch_generator).item()
        others = rng.random_generator.getrandbits(30), int(rng.numpy_generator.integers(1 << 30))
        return torch.tensor([index, of_torch, *others])


class Plain(Drawing):
    """Sample ``i`` is ``i``, and draws nothing. The one at ``interrupt_at`` is interrupted by Ctrl-C."""

    interrupt_at = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.interrupt_at:
            raise KeyboardInterrupt
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{int(index)}\n")
        return torch.tensor([index])


class Late(Plain):
    """In a worker, the first sample waits until sixteen others were fetched.

    With two workers, the other one fetches so many only after two of its batches were taken.
    """

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.log is not None
        info = torch.utils.data.get_worker_info()
        deadline_s = time.monotonic() + 60
        while index == 0 and info is not None and info.num_workers > 1:
            if self.log.exists() and len(self.log.read_text().split()) >= 16:
                break
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return super().__getitem__(index)


class DiesOnce(Drawing):
    """The first worker that fetches sample 9 is killed; a file notes that."""

    def __init__(self, length: int, died: Path) -> None:
        super().__init__(length)
        self.died = died

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stateful(Sampler[int]):
    """A permutation by seed and epoch; it counts epochs itself, and its state has its position.

    At an epoch's end its state is that of the next epoch's beginning.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length, self.seed = length, seed
        self.epoch_now, self.position, self.resumed = 0, 0, False

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.position = 0
        self.resumed = False
        order = np.random.default_rng([self.seed, self.epoch_now]).permutation(self.length)
        while self.position < self.length:
            self.position += 1
            yield int(order[self.position - 1])
        self.epoch_now, self.position = self.epoch_now + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch_now, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not 0 <= state["position"] <= self.length:
            raise ValueError(f"there is no position {state['position']} in {self.length} samples")
        self.epoch_now, self.position, self.resumed = state["epoch"], state["position"], True


class StatefulToTheEnd(Sampler[int]):
    """A permutation by its own generator; as in torchdata, its state at an epoch's end says all was given."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = torch.Generator().manual_seed(5)
        self.given, self.to_skip = 0, 0
        self.before = self.generator.get_state()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.before = self.generator.get_state()
        order = torch.randperm(self.length, generator=self.generator).tolist()
        self.given, self.to_skip = self.to_skip, 0
        while self.given < self.length:
            self.given += 1
            yield order[self.given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.to_skip = state["given"]
        self.generator.set_state(state["generator"])


class Buckets(Sampler[list[int]]):
    """A batch sampler that draws three batches ahead and sorts them."""

    def __init__(self, sampler: Sampler[int], batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while several := sorted(itertools.islice(indices, 3 * self.batch_size)):
            for begin in range(0, len(several), self.batch_size):
                yield several[begin : begin + self.batch_size]


class OwnGenerator(Sampler[int]):
    """Draws one index after the other from its generator, or from torch's global one."""

    def __init__(self, length: int, generator: torch.Generator | None) -> None:
        self.length, self.generator = length, generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(self.length, generator=self.generator).tolist():
            yield (index + int(torch.randint(2, (), generator=self.generator))) % self.length


class FromRandom(Sampler[int]):
    """Draws from ``random``, which no state contains."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(self.length), self.length)


class FromRandomOneByOne(FromRandom):
    """Draws one index after the other with ``draw``, from a global generator."""

    def __init__(self, length: int, draw: Callable[[int], int]) -> None:
        super().__init__(length)
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(self.draw(self.length))
