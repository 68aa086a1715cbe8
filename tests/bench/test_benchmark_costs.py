"""The costs of a batch are measured in the processes that pay them."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

import shmloader  # noqa: E402
from benchmarks import (  # noqa: E402
    checkouts,
    collector,
    in_memory,
    large_batches,
    per_batch,
    resume,
    samplers,
    unasked_states,
)
from benchmarks.checkout_process import Turn  # noqa: E402
from benchmarks.fresh_process import run_fresh  # noqa: E402
from benchmarks.options import NOT_MEASURED  # noqa: E402
from benchmarks.processor_time import costs, functions_of  # noqa: E402


def test_the_cost_of_work_is_that_of_the_processes_that_did_it() -> None:
    code = "import sys, time\nfor _ in sys.stdin:\n    sum(range(5 * 10**7)); print(flush=True)"
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
    assert others.user_us > 1000, "a tenth of a sum over fifty million numbers"
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


def test_the_time_of_next_is_told_apart() -> None:
    spent_us = per_batch.parts(20, per_batch.CASES["ready"])
    assert {"<built-in method posix.write>", "decoder.py: decode"} <= set(spent_us)
    assert list(spent_us.values()) == sorted(spent_us.values(), reverse=True)
    assert 0 < sum(spent_us.values()) < 100_000


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_device_is_asked_seldom() -> None:
    """The calls are the driver's own; what it does is left out."""
    costs = per_batch.device_costs(120, 100_000, 1)
    calls = {way: called for way, (_, called) in costs.items()}
    assert calls["plain"] == 0
    assert 0 < calls["pinned"] <= 2
    assert 5 <= calls["device="] <= 8  # an event, a wait, a copy, an event, a wait


def test_a_collection_in_a_worker_is_measured_where_it_happens() -> None:
    """A collection is expensive only with torch's loader: this one's workers freeze their first objects."""
    seen = collector.measure(1, 200_000)
    ((torch_s, torch_nbytes),), ((own_s, own_nbytes),) = seen["torch"], seen["shmloader"]
    assert torch_nbytes > 10e6, "a header of 16 bytes and more before each list, and its item's page"
    assert own_nbytes < torch_nbytes / 5
    assert own_s < torch_s


def test_a_state_that_nobody_asks_for_costs_no_more_than_a_few_batches() -> None:
    """Read with each of the batches it would take twenty times as long as they do."""
    for took_s in unasked_states.measure(turns=3, batches=400, mb=16, workers=0).values():
        assert took_s["shmloader"] < 6 * took_s["torch"]


def test_data_in_memory_is_not_made_sample_by_sample() -> None:
    x, y = torch.rand(2048, 8), torch.arange(2048)
    for name, dataset in in_memory.make_datasets(x, y).items():
        ways = in_memory.contestants(dataset, x, y, shuffle=True, in_disorder=name == in_memory.IN_DISORDER)
        found = in_memory.measure(ways, turns=5)
        assert found["shmloader"] < found["torch"] / 2


def test_the_order_of_a_rank_takes_a_third_of_torchs_memory() -> None:
    grown = {}
    for loader in samplers.LOADERS:
        words = "--samples", "2000000", "--workers", "0", "--one", "DistributedSampler", loader
        grown[loader] = run_fresh("an order", "benchmarks.samplers", *words)["grown_mb"]
    assert grown["shmloader"] < grown["torch"] / 3


def test_memory_after_large_batches_is_about_torchs() -> None:
    """What is left is that of slots for small batches; while there were large ones it was more."""
    figures = large_batches.play("shmloader", "one", 30_000_000, workers=1, prefetch=2)
    assert figures["left"] < 6e6
    assert figures["peak"] > 30e6


def compare(other: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.checkouts", str(other), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.long
def test_two_checkouts_are_compared_each_with_its_own_loader(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "shmloader", tmp_path / "shmloader", ignore=shutil.ignore_patterns("__pycache__"))
    slow = tmp_path / "shmloader" / "__init__.py"
    slow.write_text(
        slow.read_text(encoding="utf-8")
        + """
import time

class DataLoader(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.02)
            yield batch
""",
        encoding="utf-8",
    )
    done = compare(tmp_path, "--workload", "tiny", "--rounds", "2", "--turns", "1", "--seconds", "0.3")
    assert done.returncode == 0, done.stderr
    assert "tiny: throughput" in done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| tiny"))
    here, there, throughput, in_next, *_ = [float(cell.replace(",", "")) for cell in row.split("|")[2:-1]]
    assert there < 50 < here / 10
    assert throughput > 10
    assert in_next < 0.1


@pytest.mark.long
def test_a_start_is_compared_in_fresh_processes_by_any_method(tmp_path: Path) -> None:
    """Spawned workers import the other checkout's package too."""
    shutil.copytree(ROOT / "shmloader", tmp_path / "shmloader", ignore=shutil.ignore_patterns("__pycache__"))
    loop = tmp_path / "shmloader" / "worker" / "__init__.py"
    loop.write_text(loop.read_text(encoding="utf-8") + "\nimport time\ntime.sleep(10)\n", encoding="utf-8")
    done = compare(tmp_path, "--workload", "startup-1mb-spawn", "--turns", "1", "--workers", "1")
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| startup-1mb-spawn"))
    here, there = [float(cell) for cell in row.split("|")[2:4]]
    assert 1 / there > 1 / here + 6


@pytest.mark.long
def test_a_start_that_was_compared_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed leaves the folder of its fork server."""
    shutil.copytree(ROOT / "shmloader", tmp_path / "shmloader", ignore=shutil.ignore_patterns("__pycache__"))
    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` is too long for a socket
        monkeypatch.setenv("TMPDIR", folder)
        done = compare(tmp_path, "--workload", "startup-1mb-forkserver", "--turns", "1", "--workers", "1")
        assert done.returncode == 0, done.stderr
        assert not os.listdir(folder)


def test_a_process_of_a_checkout_uses_public_names_of_shmloader_only() -> None:
    """The other checkout's modules may lie elsewhere."""
    waiting, seen = ["checkout_process"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                found = [node.module or ""]
                if node.module == "benchmarks":
                    found = [f"benchmarks.{alias.name}" for alias in node.names]
            for module in found:
                assert not module.startswith("shmloader."), f"{name} imports {module}"
                package, _, inner = module.partition(".")
                if package == "benchmarks" and inner not in seen:
                    waiting.append(inner)
    assert {"workloads", "loaders", "reading", "made_data"} <= seen


@pytest.mark.parametrize(
    ("other", "why"), [(ROOT, "that is this checkout"), (ROOT / "docs", "is no checkout")]
)
def test_only_another_checkout_can_be_compared(
    other: Path, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["checkouts", str(other)])
    with pytest.raises(SystemExit):
        checkouts.main()
    assert why in capsys.readouterr().err


def test_a_checkout_that_fails_is_an_error(tmp_path: Path) -> None:
    package = tmp_path / "shmloader"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('not today')", encoding="utf-8")
    done = compare(tmp_path, "--turns", "1")
    assert done.returncode == 1
    assert "not today" in done.stderr
    assert f"the process of {tmp_path} ended with 1" in done.stderr


def test_ratios_are_taken_within_a_turn() -> None:
    """The machine is half as fast in the second turn, which changes no ratio."""
    turns = [
        (Turn(100.0, 10.0, 20.0, 30.0), Turn(50.0, 10.0, 20.0, 15.0)),
        (Turn(50.0, 20.0, 40.0, 60.0), Turn(25.0, 20.0, 40.0, 30.0)),
    ]
    one = checkouts.compare_turns("rows", turns)
    assert (one.here_per_s, one.there_per_s, one.throughput) == (75.0, 37.5, 2.0)
    assert one.in_next == 1.0
    assert (one.here_cpu_us, one.there_cpu_us) == (75.0, 52.5)
    assert (one.processor_time, one.main_time, one.workers_time) == (150 / 105, 1.0, 2.0)


@pytest.mark.parametrize(
    ("here_per_s", "here_us", "ok"), [(98.0, 102.0, True), (96.0, 100.0, False), (100.0, 104.0, False)]
)
def test_a_change_may_cost_three_percent(here_per_s: float, here_us: float, ok: bool) -> None:
    turns = [(Turn(here_per_s, 1.0, here_us, 0.0), Turn(100.0, 1.0, 100.0, 0.0))]
    assert checkouts.compare_turns("rows", turns).ok == ok


def test_the_costs_of_states_are_measured() -> None:
    costs = resume.Costs()
    resume.measure_states(shmloader.DataLoader, 400, 50, costs)
    resume.measure_resume(shmloader.DataLoader, 400, costs)
    resume.measure_throughput(shmloader.DataLoader, 0.01, 3, costs)
    found = costs.medians()
    assert 0 < found["state_s"] < found["first_s"]
    assert 100 < found["nbytes"] < 1024
    assert found["resume_s"] > max(found["skip_s"], 0)
    assert len(costs.throughput) == 3
    assert found["throughput"] > 0
    state = resume.build(shmloader.DataLoader, 400).state_dict()
    assert resume.at_batch(state, 300)["batches"] == 300


def test_dlio_runs_with_both_loaders_or_is_said_to_be_missing() -> None:
    command = [sys.executable, "-m", "benchmarks.dlio", "--turns", "1", "--files", "14", "--nbytes", "100000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if importlib.util.find_spec("dlio_benchmark") is None:
        assert ended.returncode == NOT_MEASURED
        assert "dlio-benchmark (with pip's --no-deps" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
        assert [line.split()[1] for line in ended.stdout.splitlines()[2:]] == ["torch", "shmloader"]
