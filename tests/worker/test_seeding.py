"""Seeding the generators of a worker process: on every device that torch is built for."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.worker.random_state import other_global_states, seed_worker_process, worker_seeds


def as_of_torch_2_6() -> None:
    raise RuntimeError("there is no accelerator")


@pytest.mark.parametrize(
    ("ask", "seeds_devices"),
    [
        (lambda check_available: None, False),
        (lambda check_available: torch.device("cuda"), True),
        (as_of_torch_2_6, True),
    ],
)
def test_devices_are_seeded_where_torch_is_built_for_one(
    monkeypatch: pytest.MonkeyPatch, ask: Any, seeds_devices: bool
) -> None:
    """Else the stack would be formatted for devices that cannot be there."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", ask)
    seeds = worker_seeds(1 << 40, 3)
    with other_global_states():
        seed_worker_process(1 << 40, 3)
        drawn = torch.rand(3).tolist(), random.random(), np.random.rand()
        assert torch.initial_seed() == seeds.torch_seed == (1 << 40) + 3
    assert seeded == [seeds.torch_seed] * seeds_devices
    assert drawn == (
        torch.rand(3, generator=torch.Generator().manual_seed(seeds.torch_seed)).tolist(),
        random.Random(seeds.random_seed).random(),
        np.random.RandomState(seeds.numpy_seed).rand(),
    )
