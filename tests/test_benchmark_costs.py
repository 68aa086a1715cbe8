"""What a batch costs is measured in the processes that pay for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from benchmarks import per_batch  # noqa: E402
from benchmarks.processor_time import costs, functions_of  # noqa: E402


def test_the_cost_of_work_is_that_of_the_processes_that_did_it() -> None:
    code = "import sys, time\nfor _ in sys.stdin:\n    sum(range(10**7)); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        def work() -> int:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write("go\n")
            other.stdin.flush()
            assert other.stdout.readline() == "\n"
            return 10

        own, others = costs([psutil.Process(), psutil.Process(other.pid)], work)
    assert others.user_us > 10 * own.user_us
    assert others.user_us > 1000, "a tenth of a sum over ten million numbers"
    assert own.sleeps >= 0.1, "it waited for the answer"


def test_stacks_are_added_up_by_function() -> None:
    samples = "main (a.py);next (b.py);read (c.py) 6\nmain (a.py);next (b.py);next (b.py) 1\nmain (a.py) 3\n"
    assert functions_of(samples) == {"main (a.py)": 1.0, "next (b.py)": 0.7, "read (c.py)": 0.6}
    assert functions_of("") == {}


def test_the_costs_of_main_process_and_workers_are_told_apart() -> None:
    command = [sys.executable, "-m", "benchmarks.processor_time", "--measure", "--workload", "cpu-2ms"]
    done = subprocess.run(
        [*command, "--seconds", "0.6"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    measured = json.loads(done.stdout)
    rows = measured["rows"]
    assert list(rows) == ["alone", "main process", "workers"]
    assert measured["batches_per_s"] > 1
    for who in ("alone", "workers"):  # 16 samples of 2 ms; the kernel counts in ticks of 10 ms
        assert 16_000 < rows[who]["user_us"] + rows[who]["system_us"] < 160_000
    assert rows["main process"]["user_us"] < 16_000


@pytest.mark.parametrize("case", per_batch.CASES)
def test_the_time_of_next_is_measured_in_the_middle_of_an_epoch(case: str) -> None:
    costs_s = per_batch.load(20, per_batch.CASES[case], timed=True)
    assert len(costs_s) == 20
    assert 0 < min(costs_s) < max(costs_s) < 1
    assert per_batch.python_after_other_work(5, 0.0) > 0


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.long
def test_system_calls_are_those_of_the_main_process() -> None:
    calls = per_batch.count(50, "ready")
    assert calls["write"] == 50
    assert 0 < calls["read"] <= 51
