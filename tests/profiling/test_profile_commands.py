"""``python -m shmloader profile`` and ``top``: for any program that loads through shmloader."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm_python import warm_python

from shmloader.cli import main

PROGRAM = """
import sys, time
import torch
import shmloader
from loading import Numbered

if __name__ == "__main__":
    shmloader.install()
    loader = torch.utils.data.DataLoader(Numbered(800), 8, num_workers=1, multiprocessing_context=sys.argv[1])
    for _ in range(int(sys.argv[2])):
        for batch in loader:
            time.sleep(0.002)
    print("trained")
    sys.exit(3)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_loaders_of_a_program_are_reported_when_it_ends(
    tmp_path: Path, program: Path, method: str
) -> None:
    out = {name: tmp_path / name for name in ("picture.png", "trace.json", "figures.json")}
    options = ["--picture", out["picture.png"], "--trace", out["trace.json"], "--json", out["figures.json"]]
    command = [
        *warm_python(),
        "-m",
        "shmloader",
        "profile",
        *options,
        "--",
        sys.executable,
        program,
        method,
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "trained\n"), done.stderr
    (figures,) = json.loads(out["figures.json"].read_text())
    assert figures["batches"] == 100
    assert f": DataLoader over Numbered\n{figures['verdict']['text']}\n" in done.stderr
    events = json.loads(out["trace.json"].read_text())["traceEvents"]
    assert {"step", "wait", "fetch", "collate"} <= {event["name"] for event in events}
    assert sum(event["dur"] for event in events if event["name"] == "step") >= 99 * 0.002 * 1e6
    assert out["picture.png"].read_bytes().startswith(b"\x89PNG")


def test_top_shows_the_figures_so_far(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "shmloader",
        "profile",
        "--",
        sys.executable,
        str(program),
        "fork",
        "500",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        deadline = time.monotonic() + 60
        shown = ""
        while "batches/s" not in shown and time.monotonic() < deadline:
            time.sleep(0.3)
            main(["top", "--once", str(running.pid)])
            shown = capsys.readouterr().out
        running.terminate()
        running.communicate()
    assert ": DataLoader over Numbered" in shown
    assert "waiting for a batch" in shown
    assert running.returncode == 128 + 15


def test_a_program_that_is_not_profiled_has_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "1"]) == 1
    assert "python -m shmloader profile" in capsys.readouterr().err


def test_a_program_without_a_loader_is_told_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--", sys.executable, "-c", "raise SystemExit(4)"]) == 4
    assert "No loader of shmloader has returned a batch" in capfd.readouterr().err


def test_a_program_that_does_not_exist_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--", "/no/such/program"]) == 127
    assert "No such file" in capfd.readouterr().err
