"""The programs of docs/resume.md: run, killed with SIGKILL in mid-epoch, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from warm_python import warm_python

import shmloader

PAGE = Path(__file__).parents[2] / "docs" / "resume.md"
DEADLINE_S = 120


def program(heading: str) -> str:
    """The program under a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*warm_python(), path.name],
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


def slowed(text: str) -> str:
    """A program that sleeps after each line that it prints, so that it does not end before it is killed."""
    return re.sub(r"( +)(print\(.*)", r"\1\2\n\1__import__('time').sleep(0.02)", text)


def kill_after(path: Path, lines: int) -> list[str]:
    """Start a program, kill it when it has printed some number of lines, and return all its output."""
    process = start(path)
    assert process.stdout is not None
    assert process.stderr is not None
    deadline_s = time.monotonic() + DEADLINE_S
    printed = []
    for line in process.stdout:
        if line.endswith("\n"):  # the last one may be cut off by the kill
            printed.append(line.rstrip("\n"))
        assert time.monotonic() < deadline_s
        if len(printed) == lines:
            process.kill()
    process.wait(timeout=DEADLINE_S)
    process.stderr.close()
    process.stdout.close()
    return printed


@pytest.mark.in_ci
@pytest.mark.parametrize("workers", [pytest.param([2, 0, 1], marks=pytest.mark.long), [0, 2, 2]], ids=str)
def test_a_killed_training_loop_goes_on_from_its_last_checkpoint(workers: list[int], tmp_path: Path) -> None:
    """Killed in the first epoch and in the second; each run has another number of workers.

    The batches up to the last checkpoint and those after it are those of an undisturbed run, with the same
    losses, bit for bit.
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
        path.write_text(slowed(text.replace("num_workers=2", f"num_workers={number}")))
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


def test_a_killed_loop_behind_a_thread_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Killed in both epochs: nothing that the thread has read and the loop has not had is lost."""
    path, whole_path = tmp_path / "train.py", tmp_path / "whole" / "train.py"
    whole_path.parent.mkdir()
    whole_path.write_text(program("Behind a look-ahead"))
    path.write_text(slowed(program("Behind a look-ahead")))
    whole, done = finish(whole_path), 0
    assert len(whole) == 2 * 30
    for after in (9, 33):
        printed = kill_after(path, after)
        assert printed == whole[done : done + len(printed)]
        place, done = done + len(printed), checkpointed(tmp_path)
        assert place - 8 < done <= place
    assert finish(path) == whole[done:]


@pytest.mark.parametrize("workers", [[2, 1, 3], [0, 2, 0]], ids=str)
def test_a_killed_program_goes_on_in_its_stream(workers: list[int], tmp_path: Path) -> None:
    """Batches and sums are those of a program that was not killed; each run has other workers."""
    text = program("Streams")
    path = tmp_path / "train.py"
    done, total = 0, 0
    for number, after in zip(workers, (7, 9, 40), strict=True):
        path.write_text(
            f"import warnings; warnings.simplefilter('ignore')\n{slowed(text)}".replace("=2,", f"={number},")
        )
        printed = kill_after(path, after)
        for step, line in enumerate(printed, done):
            numbers = list(range(10 * step, 10 * step + 10))
            total = sum(range(10 * step + 10))
            assert line == f"{numbers} {total}"
        if after == 40:
            assert done + len(printed) == 40
            return
        checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        done = checkpoint["loader"]["batches"]
        assert checkpoint["total"] == sum(range(10 * done))


Batch = tuple[int, int, list[int]]
"""Rank, step and indices."""


def run_ranks(path: Path, ranks: int, batch_size: int, kill_after: int | None = None) -> list[Batch]:
    """Run a program by torchrun, kill it when it has printed some number of lines, and return its output."""
    logs = path.parent / f"logs of {ranks}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, "--log-dir", str(logs), "--redirects", "1", "--no-python", *warm_python(), path.name],
        cwd=path.parent,
        env=os.environ | {"BATCH_SIZE": str(batch_size), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + DEADLINE_S
    while process.poll() is None and (kill_after is None or len(printed_by_ranks(logs)) < kill_after):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    if process.poll() is None:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    # Until the programs, which a template kills a moment later, have ended too: they save checkpoints.
    said = process.communicate(timeout=DEADLINE_S)[1]
    if "without libuv support" in said:
        pytest.skip("this torch was built without libuv, which torchrun needs")
    assert (process.returncode == 0) == (kill_after is None), said
    return printed_by_ranks(logs)


def printed_by_ranks(logs: Path) -> list[Batch]:
    lines = [line for log in logs.glob("**/stdout.log") for line in log.read_text().splitlines(keepends=True)]
    found = [re.fullmatch(r"(\d) (\d+) (\[.*\])\n", line) for line in lines]
    return [(int(one[1]), int(one[2]), json.loads(one[3])) for one in found if one]


@pytest.mark.in_ci
def test_three_ranks_go_on_where_two_were_killed(tmp_path: Path) -> None:
    """Batches have another size, and each sample of the epoch comes once over both runs."""
    path = tmp_path / "train.py"
    path.write_text(slowed(program("Several ranks")))
    first = run_ranks(path, 2, 8, kill_after=24)
    batches = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["loader"]["batches"]
    assert batches >= 4
    had = []
    for rank in range(2):
        indices = list(shmloader.ShardedSampler(range(480), 2, rank, seed=7))[: 8 * batches]
        had += indices
        printed = [(step, one) for of_rank, step, one in first if of_rank == rank and step < batches]
        assert len(printed) >= batches - 1  # the last line of the rank that saves nothing may be missing
        assert all(one == indices[8 * step : 8 * step + 8] for step, one in printed)
    path.write_text(program("Several ranks"))
    rest = [index for _, _, indices in run_ranks(path, 3, 5) for index in indices]
    assert set(had + rest) == set(range(480))
    assert len(had + rest) - 480 < 3
