"""Programs behind look-aheads of their own, killed at random moments: every sample once, equal losses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

PROGRAM = Path(__file__).parents[1] / "killed_hand_made.py"
KILLS = 250 if os.environ.get("SHMLOADER_LONG") == "1" else 12


@pytest.mark.in_ci
@pytest.mark.timeout(3600)
def test_programs_that_were_killed_go_on_with_the_batch_after_the_last_checkpoint(tmp_path: Path) -> None:
    """With threads for an epoch and for all epochs, in the same thread, and eager; one worker or two."""
    command = [*warm_python(), str(PROGRAM), str(tmp_path / "programs"), str(KILLS), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all as undisturbed" in done.stdout
