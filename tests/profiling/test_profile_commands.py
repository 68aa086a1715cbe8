"""``python -m shmloader profile`` and ``top``: for any program that loads through shmloader."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm_python

from shmloader.cli import main
from shmloader.cli.profile import render_all
from shmloader.cli.programs import terminal_width
from shmloader.profiling.program import FOLDER
from shmloader.profiling.report import MAIN, WORKERS, Spread

FIGURES: dict[str, Any] = {
    "title": "/home/somebody/project/train.py, epoch 3: DataLoader over SomeLongNameOfADataset",
    "verdict": {"text": "The program waits for its workers: 61% of the time; give it num_workers=8, say."},
    "batches": 10_000,
    "total_s": 100.0,
    "num_workers": 2,
    "bound_batches_per_s": 212.5,
    "main": {name: Spread(0.25, 0.1, 0.2, 0.3, 0.4)._asdict() for name in MAIN},
    "workers": {name: Spread(0.25, 0.1, 0.2, 0.3, 0.4)._asdict() for name in WORKERS},
    "by_worker": {"0": (5_000, 0.1)},
    "slowest": {"dataset['a key that is rather long']": 0.4},
}


@pytest.mark.parametrize(("width", "columns"), [(40, 1), (50, 2), (69, 4), (200, 4)])
def test_no_line_is_wider_than_the_terminal(width: int, columns: int) -> None:
    lines = render_all([FIGURES], width).splitlines()
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if line.startswith("main process"))
    assert head.split()[2:] == ["share", "p50", "p95", "p99", "most"][: 1 + columns]
    assert "".join("".join(lines).split()) != ""
    words = " ".join(" ".join(lines).split())
    assert FIGURES["verdict"]["text"] in words
    assert sum("100 ms" in line for line in lines) == len(MAIN) + len(WORKERS) + 1  # with worker 0


def test_without_a_terminal_lines_are_whole() -> None:
    assert FIGURES["verdict"]["text"] in render_all([FIGURES], None).splitlines()


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal, ours = os.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
        assert terminal_width(ours) == 57
    finally:
        os.close(terminal)
        os.close(ours)
    read, write = os.pipe()
    assert terminal_width(write) is None
    os.close(read)
    os.close(write)
    monkeypatch.setenv("COLUMNS", "7")
    assert terminal_width(2) == 40


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
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
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
    with subprocess.Popen(["sleep", "60"]) as other:  # process 1 may have profiled ones, of other tests
        assert main(["top", "--once", str(other.pid)]) == 1
        other.kill()
    assert "python -m shmloader profile" in capsys.readouterr().err


def test_top_ends_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env=os.environ | {FOLDER: str(tmp_path)}) as other:
        command = [sys.executable, "-m", "shmloader", "top", str(other.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as top:
            assert top.stdout.readline()
            top.stdout.close()
            errors = top.stderr.read()
            assert (top.wait(60), b"Error" in errors) == (0, False), errors
        other.kill()


def test_a_program_without_a_loader_is_told_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--", sys.executable, "-c", "raise SystemExit(4)"]) == 4
    assert "No loader of shmloader has returned a batch" in capfd.readouterr().err


def test_a_program_that_does_not_exist_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--", "/no/such/program"]) == 127
    assert "No such file" in capfd.readouterr().err


def test_a_python_file_in_place_of_a_program_is_told_how_to_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "train.py", "--lr", "1"]) == 127
    assert capfd.readouterr().err == (
        "error: train.py: No such file or directory. Start it by: python train.py\n"
    )


def profiled(tmp_path: Path, code: str, *options: str) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """Profile a program; returns its end, and the batches of each report."""
    path, figures = tmp_path / "program.py", tmp_path / "figures.json"
    path.write_text(
        f"import os, sys, multiprocessing\nimport shmloader\nfrom loading import Numbered\n{code}"
    )
    words = ["-m", "shmloader", "profile", "--json", str(figures), *options, "--", sys.executable, str(path)]
    done = subprocess.run([*warm_python(), *words], capture_output=True, text=True, check=False, timeout=120)
    reports = json.loads(figures.read_text()) if figures.exists() else []
    return done, sorted(report["batches"] for report in reports)


FORKED = """
loader = shmloader.DataLoader(Numbered(80), 8)
list(loader)
pids = []
for rank in range(2):
    pids.append(os.fork())
    if not pids[-1]:
        list(loader), list(loader)
        sys.exit(0)
sys.exit(max(os.waitpid(pid, 0)[1] for pid in pids))
"""
GLOBAL = """
def rank():
    global loader
    loader = shmloader.DataLoader(Numbered(80), 8)
    list(loader)

if __name__ == "__main__":
    child = multiprocessing.get_context(METHOD).Process(target=rank)
    child.start()
    child.join()
"""
CHILD = """
loader = shmloader.DataLoader(Numbered(80), 8)
list(loader)
child = multiprocessing.get_context("fork").Process(target=list, args=(loader,))
child.start()
child.join()
"""
DEAD = """
def evaluate():
    list(shmloader.DataLoader(Numbered(80), 8))

evaluate()
loader = shmloader.DataLoader(Numbered(80), 8)
if not os.fork():
    list(loader), list(loader)
    sys.exit()
os.wait()
"""
INLINE = """
for _ in range(10):
    for _ in shmloader.DataLoader(Numbered(80), 8):
        pass
"""
OWN = """
loader = shmloader.DataLoader(Numbered(80), 8)
with loader.profile():
    list(loader)
list(loader)
"""


@pytest.mark.parametrize(
    ("code", "batches"),
    [
        (FORKED, [10, 20, 20]),
        pytest.param(f"METHOD = 'fork'\n{GLOBAL}", [10], marks=pytest.mark.long),
        (f"METHOD = 'forkserver'\n{GLOBAL}", [10]),
        (OWN, [20]),
        (INLINE, [10] * 8),
        (CHILD, [10, 10]),
        (DEAD, [10, 20]),
    ],
    ids=["forked", "fork", "forkserver", "own", "inline", "child", "dead"],
)
@pytest.mark.usefixtures("program")
def test_each_process_reports_on_what_it_has_loaded(tmp_path: Path, code: str, batches: list[int]) -> None:
    done, found = profiled(tmp_path, code)
    assert (done.returncode, found) == (0, batches), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("program")
def test_of_a_killed_program_the_last_second_is_missing_and_the_trace_is_not(tmp_path: Path) -> None:
    code = """
loader = shmloader.DataLoader(Numbered(800, delay_s=0.002), 8)
for number, _ in enumerate(loader):
    if number == 90:
        os.kill(os.getpid(), 9)
"""
    done, (batches,) = profiled(tmp_path, code, "--trace", str(tmp_path / "trace.json"))
    assert done.returncode == 128 + 9
    assert 0 < batches <= 90
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"step", "fetch"} <= {event["name"] for event in events}


@pytest.mark.usefixtures("program")
def test_each_loader_of_a_program_is_replayed(tmp_path: Path) -> None:
    code = "print(len({float(batch[0, 0]) for batch in shmloader.DataLoader(Numbered(80), 8)}))"
    done, batches = profiled(tmp_path, code, "--replay")
    assert (done.returncode, done.stdout, batches) == (0, "1\n", [10]), done.stderr


def test_a_picture_of_another_form_is_refused_before_the_program_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["profile", "--picture", "batches.foo", "--", "true"])
    assert end.value.code == 2
    assert "has to end in one of .png, .svg, .pdf" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile", "memory"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_command_that_is_started_without_streams_runs_the_program_to_its_end(
    command: str, closed: str
) -> None:
    """And the program is started without them too; what the command says goes to no other stream.

    A warm interpreter would have files of its own in their places.
    """
    program = "import sys; raise SystemExit(5 if sys.stdout is None else 7 if sys.stderr is None else 1)"
    words = [sys.executable, "-m", "shmloader", command, "--", sys.executable, "-c", program]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == (7 if closed == "2>&-" else 5)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (closed == ">&-")


@pytest.mark.parametrize("command", ["profile", "memory"])
def test_the_exit_status_is_the_programs_also_when_nobody_reads_the_report(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [*warm_python(), "-m", "shmloader", command, "--", sys.executable, "-c", "raise SystemExit(3)"]
    with open(write, "wb") as closed:
        assert subprocess.run(words, stderr=closed, check=False, timeout=120).returncode == 3
