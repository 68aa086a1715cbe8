"""Seeding the generators of a worker process: on every device that torch is built for."""

import random

import numpy as np
import pytest
import torch

from shmloader.worker.random_state import other_global_states, seed_worker_process, worker_seeds


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_devices_are_seeded_where_torch_is_built_for_one(
    monkeypatch: pytest.MonkeyPatch, accelerator: torch.device | None
) -> None:
    """Else the stack would be formatted for devices that cannot be there."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    seeds = worker_seeds(1 << 40, 3)
    with other_global_states():
        seed_worker_process(1 << 40, 3)
        drawn = torch.rand(3).tolist(), random.random(), np.random.rand()
        assert torch.initial_seed() == seeds.torch_seed == (1 << 40) + 3
    assert seeded == ([] if accelerator is None else [seeds.torch_seed])
    assert drawn == (
        torch.rand(3, generator=torch.Generator().manual_seed(seeds.torch_seed)).tolist(),
        random.Random(seeds.random_seed).random(),
        np.random.RandomState(seeds.numpy_seed).rand(),
    )
