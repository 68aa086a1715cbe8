"""Fresh processes answer, fail with a reason, and leave nothing behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from benchmarks.fresh_process import FreshProcess, MeasurementFailedError, run_fresh  # noqa: E402

CHILD = """
import json, subprocess, sys, time
from benchmarks.fresh_process import claim_output

answer = claim_output()
print("this is no answer")
what = sys.argv[1]
if what == "fail":
    raise ValueError("not today")
if what == "hang":
    time.sleep(600)
if what == "start":
    answer(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
if what == "start-late-end":
    ends = "import sys, time; time.sleep(0.7); open(sys.argv[1], 'w')"
    subprocess.Popen([sys.executable, "-c", ends, sys.argv[2]])
    answer(1)
if what == "echo":
    for line in sys.stdin:
        answer(json.loads(line))
if what == "fail-at-the-end":
    answer(1)
    sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def test_it_answers_each_question_and_what_else_it_prints_is_no_answer(folder: Path) -> None:
    with FreshProcess("the echo", "child", "echo", folder=folder) as fresh:
        for question in (1, {"a": [None, "b"]}):
            fresh.ask(question)
            assert fresh.answer(60) == question
        fresh.finish()
    assert fresh.process.returncode == 0


def test_the_rest_of_its_session_may_end_by_itself(folder: Path) -> None:
    """As a resource tracker must, which removes shared memory that the process has left."""
    run_fresh("the starter", "child", "start-late-end", str(folder / "ended"))
    assert (folder / "ended").exists()


@pytest.mark.usefixtures("folder")
def test_a_failure_says_what_failed_and_why() -> None:
    with pytest.raises(MeasurementFailedError, match=r"(?s)^the thing ended with 1:.*ValueError: not today"):
        run_fresh("the thing", "child", "fail", timeout_s=60)
    with pytest.raises(MeasurementFailedError, match=r"^the thing ended with 7"):
        run_fresh("the thing", "child", "fail-at-the-end", timeout_s=60)


@pytest.mark.usefixtures("folder")
def test_one_that_hangs_is_killed() -> None:
    began_s = time.monotonic()
    with pytest.raises(MeasurementFailedError, match=r"^the thing hung"):
        run_fresh("the thing", "child", "hang", timeout_s=1)
    assert time.monotonic() - began_s < 60


@pytest.mark.usefixtures("folder")
def test_what_it_started_ends_with_it() -> None:
    with FreshProcess("the thing", "child", "start") as fresh:
        child = psutil.Process(fresh.answer(60))
        assert child.is_running()
    deadline_s = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
