"""Files that a benchmark writes at its end: a bad path is refused at once, and one failure costs one file."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shmloader.cli import main as command_line

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from quick_specs import tiny  # noqa: E402

from benchmarks import autotune, comparison, contest, machine, memory, result_files, stores, summary  # noqa: E402
from benchmarks.measure import measure  # noqa: E402
from benchmarks.records import Measurement  # noqa: E402
from benchmarks.report import Outcome  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

FULL = Path("/dev/full")
needs_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@pytest.fixture(scope="module")
def measured() -> Measurement:
    return measure(tiny("tiny", "limit"))


@pytest.fixture
def outcome(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The outcome of every run of the comparison, without measuring anything."""
    runs = {"shmloader": [replace(measured, contestant="shmloader")], "limit": [measured]}
    made = Outcome(WORKLOADS["tiny"], summary.make_rows("tiny", runs), runs, [])

    def run_all(run: contest.Run, workloads: list[str], loaders: list[str]) -> None:
        run.outcomes.append(made)

    monkeypatch.setattr(contest, "run_all", run_all)
    return made


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_all(*arguments: Any) -> None:
        raise AssertionError("measured before the paths were tried")

    monkeypatch.setattr(contest, "run_all", run_all)


def bench(*words: str) -> int:
    return command_line(["bench", "--quick", "--workload", "tiny", "--loader", "shmloader", *words])


# In /proc no user may make files, root included.
@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("--json", "absent/x.json"),
        ("--json", "file/x.json"),
        ("--json", "."),
        ("--json", "/proc/shmloader-x"),
        ("--plot", "file/x"),
        ("--plot", "file"),
        ("--plot", "/proc/shmloader-x"),
    ],
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_a_path_of_no_use_is_said_in_one_line_before_anything_is_measured(
    option: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("kept", encoding="utf-8")
    path = tmp_path / place
    assert bench(option, str(path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {option}: {path} ")
    assert file.read_text(encoding="utf-8") == "kept"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.usefixtures("nothing_is_measured")
def test_a_folder_without_the_right_to_write_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert bench(option, str(tmp_path / "x")) == 2
    assert "Permission denied" in capsys.readouterr().err
    tmp_path.chmod(0o700)


@pytest.mark.usefixtures("nothing_is_measured")
def test_without_matplotlib_pictures_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.plots", raising=False)
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert bench("--plot", str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --plot: pictures need matplotlib")
    assert line.endswith("pip install -c constraints.txt -e '.[plots]'")
    with pytest.raises(SystemExit) as ended:
        memory.parse(["--picture", str(tmp_path / "memory.png")])
    assert ended.value.code == 2
    assert "argument --picture: pictures need matplotlib" in capsys.readouterr().err


def test_trying_a_path_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    result_files.check_file(file)
    result_files.check_folder(tmp_path / "pictures" / "of today")
    assert not list(tmp_path.iterdir())
    file.write_text("kept", encoding="utf-8")
    before_ns = file.stat().st_mtime_ns
    result_files.check_file(file)
    assert file.read_text(encoding="utf-8") == "kept"
    assert file.stat().st_mtime_ns == before_ns
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result_files.check_file(pipe)  # opening a pipe waits for a reader


@pytest.mark.parametrize("script", [autotune, memory, stores])
def test_every_script_tries_its_path_first(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, "--json", "/nonexist/x.json"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert "argument --json: /nonexist/x.json cannot be written" in capsys.readouterr().err


class Pictures(ModuleType):
    """Replaces `benchmarks.plots`, whose matplotlib keeps files open."""

    def __init__(self, failure: str | None = None) -> None:
        super().__init__("benchmarks.plots")
        self.failure = failure

    def draw_all(self, folder: Path, described: Any, outcomes: list[Outcome]) -> Iterator[Path]:
        yield folder / "tiny.png"
        if self.failure:
            raise OSError(self.failure)


@needs_a_full_disk
@pytest.mark.usefixtures("outcome")
def test_where_the_json_cannot_be_written_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.plots", Pictures())
    assert bench("--json", str(FULL), "--plot", str(tmp_path)) == 3
    captured = capsys.readouterr()
    assert "| tiny     | shmloader |" in captured.out
    assert f"plot: {tmp_path / 'tiny.png'}" in captured.out
    assert "every measurement" not in captured.out
    (line,) = captured.err.splitlines()
    assert line == f"error: --json {FULL} could not be written: [Errno 28] No space left on device"


@pytest.mark.usefixtures("outcome")
def test_where_a_picture_cannot_be_written_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.plots", Pictures("1 of 2 pictures failed: x.png"))
    path = tmp_path / "x.json"
    assert bench("--json", str(path), "--plot", str(tmp_path)) == 3
    assert list(json.loads(path.read_text(encoding="utf-8"))["workloads"]) == ["tiny"]
    captured = capsys.readouterr()
    assert f"plot: {tmp_path / 'tiny.png'}" in captured.out
    (line,) = captured.err.splitlines()
    assert line == f"error: --plot {tmp_path} could not be written: 1 of 2 pictures failed: x.png"


def test_where_the_tables_cannot_be_printed_the_rest_is_written(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    path = tmp_path / "x.json"
    run = contest.Run(argparse.Namespace(json=path, plot=None), machine.describe())
    run.outcomes.append(outcome)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Closed())
        unwritten = comparison.publish(run)
    assert unwritten == ["the report", "the list of files"]
    assert list(json.loads(path.read_text(encoding="utf-8"))["workloads"]) == ["tiny"]
    assert "error: the report could not be written: [Errno 32] Broken pipe" in capsys.readouterr().err


@needs_a_full_disk
def test_a_failure_of_this_loader_counts_more_than_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "run_all", lambda run, *_: run.fail("tiny", "shmloader", "hung"))
    assert bench("--json", str(FULL)) == 1
    assert "No space left" in capsys.readouterr().err


def test_one_picture_that_fails_costs_no_other(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    def draw(path: Path, described: dict[str, Any], outcome: Outcome) -> None:
        if path.name == "tiny.png":
            raise OSError(28, "No space left on device")
        path.touch()

    monkeypatch.setattr(plots, "draw", draw)
    other = replace(outcome, workload=WORKLOADS["rows"])
    drawn = plots.draw_all(tmp_path / "pictures", {}, [outcome, other])
    assert next(drawn) == tmp_path / "pictures" / "rows.png"
    with pytest.raises(OSError, match=r"1 of 2 pictures failed: tiny\.png \(No space left on device\)"):
        next(drawn)
