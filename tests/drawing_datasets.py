"""Datasets whose samples are draws from generators: their worker's own, or the program's."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset


class Draws(Dataset):
    """Sample ``i`` is ``i`` and its draws from each of its worker's generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[float]:
        rng = torch.utils.data.get_worker_info().rng
        own = float(torch.rand(1, generator=rng.torch_generator)), rng.random_generator.random()
        drawn = float(torch.randn(1)), float(np.random.standard_normal()), random.gauss(0, 1)
        return [index, *drawn, *own, rng.numpy_generator.random()]


class DrawsFromItsOwn(Draws):
    """Draws from its own generator, for threads: the program's generators are left alone."""

    def __getitem__(self, index: int) -> list[float]:
        rng = torch.utils.data.get_worker_info().rng
        return [index, float(torch.rand(1, generator=rng.torch_generator)), rng.random_generator.random()]
