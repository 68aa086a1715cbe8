"""A run of `bench` measures everything that it claims, and no loader can win by wrong data."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

LONG = os.environ.get("SHMLOADER_LONG") == "1"
ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = {"images", "rows", "tiny", "dicts", "dicts-cut"}
LOADERS = {"torch-file_descriptor", "torch-file_system", "shmloader"}

sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from benchmarks import comparison, contest, reading  # noqa: E402
from benchmarks.limit import collate_into, outputs_like  # noqa: E402
from benchmarks.records import Measurement, Spec  # noqa: E402
from benchmarks.workloads import WORKLOADS as REGISTERED  # noqa: E402

PLUGIN = '''
"""Loaders whose data are wrong."""
import torch
from torch.utils.data import DataLoader

from benchmarks.loaders import Loader, register_loader


class Wrong:
    def __init__(self, loader, first_wrong):
        self.loader, self.first_wrong = loader, first_wrong

    def __iter__(self):
        for number, batch in enumerate(self.loader):
            if number == self.first_wrong:
                batch.view(-1)[0] += 1
            yield batch


def build(first_wrong):
    def build_it(dataset, batch_size, workers, prefetch_factor):
        return Wrong(DataLoader(dataset, batch_size=batch_size, num_workers=workers), first_wrong)

    return build_it


register_loader(Loader("wrong-at-once", build(0), is_own=True))
register_loader(Loader("wrong-later", build(12), is_own=True))
'''


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmloader", "bench", "--quick", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


# The others work the same way; `test_benchmark_comparison` runs them all.
@pytest.fixture(scope="module", params=sorted(WORKLOADS) if LONG else ["dicts", "tiny"])
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """One workload at a time: each measurement imports torch anew, and all of them take minutes."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 256:
        pytest.skip("torch's loader needs a descriptor for each tensor (ulimit -n)")
    path = tmp_path_factory.mktemp("benchmark") / "report.json"
    chosen = [word for name in sorted(LOADERS) for word in ("--loader", name)]
    done = run("--json", str(path), "--workload", request.param, *chosen)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert list(report["workloads"]) == [request.param]
    return done.stdout, report


def contestants(report: Any) -> dict[str, Any]:
    (workload,) = report["workloads"].values()
    found: dict[str, Any] = workload["contestants"]
    return found


def test_all_loaders_and_the_limit_are_measured(quick: tuple[str, Any]) -> None:
    assert set(contestants(quick[1])) == LOADERS | {"limit"}


def test_every_figure_is_positive(quick: tuple[str, Any]) -> None:
    for contestant in contestants(quick[1]).values():
        for name in ("samples_per_s", "batches_per_s", "nbytes_per_s", "of_limit", "vs_torch"):
            assert contestant[name] > 0
        assert contestant["cpu_s"] >= 0  # counted in ticks of 10 ms
        assert all(one["batches"] > 0 for one in contestant["runs"])


def test_all_checksums_are_compared_and_equal(quick: tuple[str, Any]) -> None:
    output, report = quick
    assert "all loaders in the tables delivered the same data" in output
    (workload,) = report["workloads"].values()
    runs = [one for row in contestants(report).values() for one in row["runs"]]
    assert {one["checksum"] for one in runs} == {workload["checksum"]}
    assert {one["wrong_batches"] for one in runs} == {0}


def test_slot_memory_and_descriptors_are_reported(quick: tuple[str, Any]) -> None:
    output, report = quick
    (workload,) = report["workloads"].values()
    row = contestants(report)["shmloader"]
    assert row["reserved_nbytes"] >= workload["batch_nbytes"]
    assert 0 < row["descriptors_min"] <= row["descriptors_max"]
    assert any("slots at most" in target["target"] for target in workload["targets"])
    for heading in ("of limit", "vs torch", "verdict", "descriptors", "slots / bound, MB"):
        assert heading in output


def test_the_machine_is_described_without_its_name(quick: tuple[str, Any]) -> None:
    machine = quick[1]["machine"]
    assert machine["cores"] >= 1
    assert machine["versions"]["torch"]
    assert "node" not in machine


@pytest.mark.parametrize(
    ("loader", "message"),
    [("wrong-at-once", "checksum"), ("wrong-later", "not the ones due")],
)
def test_a_loader_of_this_project_with_wrong_data_is_an_error(
    tmp_path: Path, loader: str, message: str
) -> None:
    plugin = tmp_path / "wrong_loaders.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    done = run("--plugin", str(plugin), "--loader", loader, "--workload", "rows")
    assert done.returncode == 1
    assert message in done.stderr
    assert loader in done.stderr


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_the_limit_collates_what_torch_collates(name: str) -> None:
    workload = REGISTERED[name].quick()
    dataset = workload.make_dataset()
    expected = workload.reference_batch(dataset, 1)
    samples = [dataset[index] for index in workload.index_batch(1)]
    made = collate_into(samples, outputs_like(workload.reference_batch(dataset, 0)))
    for leaf, other in zip(reading.leaves(made), reading.leaves(expected), strict=True):
        assert torch.equal(torch.as_tensor(leaf), torch.as_tensor(other))
    assert reading.touch(made) == reading.touch(expected)


@pytest.mark.parametrize("start", [0, 64, 4032])
@pytest.mark.parametrize("nbytes", [16, 4096, 4097, 20_000])
def test_touching_reads_every_page(start: int, nbytes: int) -> None:
    page = reading.PAGE_NBYTES
    memory = np.zeros(nbytes + 3 * page, np.uint8)
    start += -memory.ctypes.data % page
    array = memory[start : start + nbytes]
    first_page, last_page = start // page, (start + nbytes - 1) // page
    for number in range(first_page, last_page + 1):
        memory[:] = 0
        memory[number * page : (number + 1) * page] = 1
        assert reading.touch_array(array) > 0


@pytest.mark.parametrize(("check", "code"), [((), 0), (("--check",), 1)])
def test_a_missed_target_fails_only_a_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], check: tuple[str, ...], code: int
) -> None:
    def slow(spec: Spec) -> Measurement:
        return Measurement(
            contestant=spec.contestant,
            batches=1,
            window_s=1.0,
            batches_per_s=1.0,
            samples_per_s=1.0,
            nbytes_per_s=1.0,
            cpu_s=1.0,
            foreign_share=0.0,
            batch_nbytes=16,
            checksum="same",
        )

    monkeypatch.setattr(contest, "run_measurement", slow)
    assert comparison.main(["--quick", "--workload", "tiny", "--loader", "shmloader", *check]) == code
    assert "missed" in capsys.readouterr().out
