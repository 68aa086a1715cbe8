"""Imported or made under another default device, dtype or mode, a loader loads through slots as always."""

from __future__ import annotations

import subprocess

import pytest
from warm_python import warm_python

MODES = {
    "a device": "torch.device('meta')",
    "a default device": "default_device('meta')",
    "a default dtype": "default_dtype(torch.float64)",
    "inference": "torch.inference_mode()",
    "no gradients": "torch.no_grad()",
}
PROGRAM = """
import contextlib, sys, warnings
import numpy as np, torch, torch.utils.data
warnings.simplefilter("error")

@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    yield
    torch.set_default_device(None)

@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)

data = torch.utils.data.TensorDataset(torch.arange(300), torch.ones(300, 3))

def batches_of(loader):
    torch.manual_seed(0)
    return [[column.tolist() for column in batch] for batch in loader]

with {mode}:
    import shmloader
    from shmloader.torch_private import why_missing
    import shmloader.iterator, shmloader.indices.array_samplers, shmloader.worker.loop
    sampler = shmloader.ShardedSampler(range(300), 1, 0, shuffle=True)
    loader = shmloader.DataLoader(data, 100, shuffle=True, num_workers=1)
    assert shmloader.indices.array_samplers.why_unlike_torchs(torch.utils.data.RandomSampler) is None
    assert len(list(sampler)) == 300
    store = shmloader.share([{{"x": np.ones(3)}}] * 100)
    assert store.take([3, 4])["x"].tolist() == [[1.0] * 3] * 2

assert why_missing() is None
with loader:
    batches = batches_of(loader)
    assert batches == batches_of(torch.utils.data.DataLoader(data, 100, shuffle=True))
    assert loader.statistics().batches == 3
    assert loader.state_dict()["finished"]
    next(iter(loader))
    state = loader.state_dict()
with {mode}:
    again = shmloader.DataLoader(data, 100, shuffle=True)
    again.load_state_dict(state)
assert len(list(again)) == 2
"""


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_program(mode: str) -> None:
    program = [*warm_python(), "-c", PROGRAM.format(mode=mode)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
