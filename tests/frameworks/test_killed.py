"""Programs behind frameworks' look-aheads, killed at random moments; see `killed_in_frameworks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frameworks.pages import needs

PROGRAM = Path(__file__).parents[1] / "killed_in_frameworks.py"
KILLS = 250 if os.environ.get("SHMLOADER_LONG") == "1" else 10


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("framework", ["accelerate", "lightning", "ray"])
def test_killed_programs_go_on_with_the_batch_after_the_last_checkpoint(
    framework: str, tmp_path: Path
) -> None:
    needs("ray.train.torch" if framework == "ray" else framework)
    command = [sys.executable, str(PROGRAM), str(tmp_path / "programs"), str(KILLS), "1", framework]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all as undisturbed" in done.stdout
