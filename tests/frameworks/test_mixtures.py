"""Mixtures under accelerate and Lightning: two ranks share the sampler's order, epoch by epoch."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frameworks.mixture_ranks import EPOCHS, loader_of
from frameworks.pages import needs


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_two_ranks_share_the_order_of_a_mixture(framework: str, tmp_path: Path) -> None:
    needs(framework)
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launched, str(Path(__file__).with_name("mixture_ranks.py")), str(tmp_path), framework],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    alone: list[int] = []
    sampler = loader_of(num_replicas=1, rank=0).sampler
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        alone += sampler
    if framework == "accelerate":  # which gives whole batches to ranks in turn
        together = list(itertools.chain.from_iterable(itertools.chain(*zip(*ranks, strict=True))))
    else:
        rows = [list(itertools.chain.from_iterable(rank)) for rank in ranks]
        together = list(itertools.chain(*zip(*rows, strict=True)))
    assert together == alone
