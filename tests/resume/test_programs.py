"""The programs of docs/resume.md: run, killed with SIGKILL in mid-epoch, and started again."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "resume.md"
DEADLINE_S = 120


def program(heading: str) -> str:
    """The program below a heading."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, path.name],
        cwd=path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def checkpointed(folder: Path) -> int:
    """Batches of the program up to its last checkpoint."""
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    return int(checkpoint["epoch"] * 30 + checkpoint["loader"]["batches"])


def finish(path: Path) -> list[str]:
    process = start(path)
    out, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, error
    return out.splitlines()


def kill_after(path: Path, lines: int) -> list[str]:
    """Start a program, kill it when it has printed so many lines, and return all that it has printed."""
    process = start(path)
    assert process.stdout is not None
    assert process.stderr is not None
    deadline_s = time.monotonic() + DEADLINE_S
    printed = []
    for line in process.stdout:
        printed.append(line.rstrip("\n"))
        assert time.monotonic() < deadline_s
        if len(printed) == lines:
            process.kill()
    process.wait(timeout=DEADLINE_S)
    process.stderr.close()
    process.stdout.close()
    return printed


@pytest.mark.parametrize("workers", [[2, 0, 1], [0, 2, 2]], ids=str)
def test_a_killed_training_loop_goes_on_from_its_last_checkpoint(workers: list[int], tmp_path: Path) -> None:
    """Killed in the first epoch and in the second; each run has another number of workers.

    The batches up to the last checkpoint and those that came after it are those of a run that nobody
    killed, with the same losses, bit for bit.
    """
    text = program("A training loop")
    (tmp_path / "whole").mkdir()
    whole_path = tmp_path / "whole" / "train.py"
    whole_path.write_text(text)
    whole = finish(whole_path)
    assert len(whole) == 3 * 30

    path = tmp_path / "train.py"
    done = 0  # batches up to the last checkpoint
    for number, after in zip(workers[:2], (14, 33), strict=True):
        path.write_text(text.replace("num_workers=2", f"num_workers={number}"))
        printed = kill_after(path, after)
        assert len(printed) >= after
        assert printed == whole[done : done + len(printed)]
        place, done = done + len(printed), checkpointed(tmp_path)
        assert place - 8 < done <= place
    path.write_text(text.replace("num_workers=2", f"num_workers={workers[2]}"))
    rest = finish(path)
    assert rest == whole[done:]
    for epoch in range(3):
        lines = [line for line in whole[:done] + rest if line.startswith(f"{epoch} ")]
        indices = [int(index) for line in lines for index in re.findall(r"\d+", line.split("]")[0])[1:]]
        assert sorted(indices) == list(range(300))
