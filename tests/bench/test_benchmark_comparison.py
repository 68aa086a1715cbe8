"""The comparison with others: every workload runs, wrong data is left out, nothing stops the run."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from quick_specs import tiny  # noqa: E402

from benchmarks import comparison, contest, peers, real_files, summary, training  # noqa: E402
from benchmarks.contest import run_measurement  # noqa: E402
from benchmarks.loaders import LOADERS, Loader  # noqa: E402
from benchmarks.made_data import CyclicBatches, Records, Uneven, make_record_arrays  # noqa: E402
from benchmarks.measure import measure  # noqa: E402
from benchmarks.numpy_collate import numpy_collate  # noqa: E402
from benchmarks.reading import leaves, touch  # noqa: E402
from benchmarks.records import Measurement, Spec  # noqa: E402
from benchmarks.verdicts import compare_startups, judge  # noqa: E402
from benchmarks.workloads import STARTUP, TRAINING, WORKLOADS, Workload, uneven_rate  # noqa: E402

PEERS = [name for name, loader in LOADERS.items() if loader.build.__module__ == "benchmarks.peers"]

PLUGIN = '''
"""Loaders that fail in every way."""
from benchmarks.loaders import Loader, register_loader


def build_broken(*arguments, **options):
    raise OSError("no loader today")


register_loader(Loader("other-broken", build_broken))
register_loader(Loader("other-absent", build_broken, packages=("no_such_package",)))
register_loader(Loader("other-unfit", build_broken, cannot=lambda workload: "knows no " + workload.name))
register_loader(Loader("other-beside", build_broken, meant_for=lambda workload: False))
'''


@pytest.fixture
def start_method() -> Iterator[None]:
    """Restore the start method, which a measurement sets: here it has no process to itself."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(real_files.FOLDER, str(tmp_path))
    return tmp_path


# Starting two interpreters takes seconds: once for each start method is enough.
WITHOUT_REPETITION = [
    name
    for name, workload in WORKLOADS.items()
    if workload.start_method in (None, "fork") or name.startswith("startup-1mb-")
]


@pytest.mark.parametrize("name", WITHOUT_REPETITION)
@pytest.mark.usefixtures("start_method", "folder")
def test_each_workload_gives_the_same_with_the_loader_and_without(name: str) -> None:
    workload = WORKLOADS[name]
    if workload.missing and (missing := workload.missing()):
        pytest.skip(missing)
    loaded, plain = measure(tiny(name, "shmloader")), measure(tiny(name, "limit"))
    assert loaded.checksum == plain.checksum
    assert loaded.wrong_batches == 0
    assert min(loaded.samples_per_s, plain.samples_per_s) > 0
    assert (loaded.first_batch_s is not None) == (workload.kind == STARTUP)
    assert (loaded.wait_share is not None) == (workload.kind == TRAINING)


def test_every_kind_of_start_is_a_workload() -> None:
    methods = {one.start_method for one in WORKLOADS.values() if one.kind == STARTUP}
    assert methods == set(multiprocessing.get_all_start_methods())
    sizes = {one.dataset_nbytes for one in WORKLOADS.values() if one.kind == STARTUP}
    assert sizes == {10**6, 10**9, 10**10}


def assert_delivers(name: str, workload: str) -> None:
    # Others change settings of the whole process.
    run = measure if LOADERS[name].is_own else run_measurement
    made, plain = run(tiny(workload, name)), measure(tiny(workload, "limit"))
    assert made.checksum == plain.checksum
    assert made.wrong_batches == 0


@pytest.mark.parametrize("workload", ["dicts-arrays", "rows-table"])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_delivers_what_is_due_or_says_what_it_lacks(name: str, workload: str) -> None:
    missing = LOADERS[name].missing()
    if missing:
        assert "not installed: pip install" in missing
        pytest.skip(missing)
    if not LOADERS[name].meant_for(WORKLOADS[workload]):
        pytest.skip(f"{name} is not for {workload}")
    assert_delivers(name, workload)


MODES = {
    "torch-file_descriptor": "dicts",
    "torch-file_system": "rows-table",
    "torch-bulk": "rows-table",
    "torch-numpy": "rows-arrays",
    "shmloader-threads": "rows-table",
    "shmloader-dynamic": "slow-batch",
    "shmloader-shared": "startup-1mb-fork",
}


# Torch's loaders have a process of their own each, like peers.
@pytest.mark.parametrize(
    "name", [name if LOADERS[name].is_own else pytest.param(name, marks=pytest.mark.long) for name in MODES]
)
@pytest.mark.usefixtures("start_method", "folder")
def test_torch_and_this_loader_deliver_the_same_in_every_mode(name: str) -> None:
    assert LOADERS[name].meant_for(WORKLOADS[MODES[name]])
    assert_delivers(name, MODES[name])


def test_every_loader_is_tried() -> None:
    assert {*PEERS, *MODES, "shmloader"} == set(LOADERS)


def bench(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shmloader", "bench", "--quick", *arguments]
    settings: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 200}
    return subprocess.run(command, check=False, **(settings | options))


@pytest.mark.long
def test_one_command_measures_draws_and_says_who_is_left_out(tmp_path: Path) -> None:
    plugin = tmp_path / "failing_loaders.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    path, pictures = tmp_path / "report.json", tmp_path / "pictures"
    outputs = ["--json", str(path), "--plot", str(pictures)]
    done = bench(
        "--plugin",
        str(plugin),
        "--workload",
        "ti*y",
        "--loader",
        "shmloader",
        "--loader",
        "other-*",
        *outputs,
    )
    assert done.returncode == 0, done.stderr  # failures of others do not make the run fail
    report = json.loads(path.read_text(encoding="utf-8"))
    assert list(report["workloads"]) == ["tiny"]
    assert set(report["workloads"]["tiny"]["contestants"]) == {"shmloader", "limit"}
    assert report["memcpy_nbytes_per_s"] > 0
    reasons = {one["contestant"]: one["reason"] for one in report["left_out"]}
    assert set(reasons) == {"other-broken", "other-absent", "other-unfit"}
    assert "no loader today" in reasons["other-broken"]
    assert "no_such_package not installed: pip install" in reasons["other-absent"]
    assert reasons["other-unfit"] == "knows no tiny"
    for text in (*reasons, "memcpy", "vs best peer", "of limit", "Left out", report["machine"]["release"]):
        assert text in done.stdout
    assert (pictures / "tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"checksum": "other"}, "checksum other"), ({"wrong_batches": 3}, "delivered 3 batches")],
)
def test_a_loader_with_wrong_data_is_left_out(change: dict[str, Any], reason: str) -> None:
    right = measure(tiny("tiny", "limit"))
    run = contest.Run(argparse.Namespace(), {})
    runs = {"shmloader": [right], "spdl": [right, replace(right, **change)], "limit": [right]}
    assert set(contest.without_wrong_data(run, "tiny", runs)) == {"shmloader", "limit"}
    (left_out,) = run.left_out
    assert left_out.contestant == "spdl"
    assert reason in left_out.reason
    assert not run.wrong


def test_the_run_fails_only_where_this_loader_does() -> None:
    run = contest.Run(argparse.Namespace(), {})
    run.fail("tiny", "torch-file_system", "hung")
    assert not run.wrong
    run.fail("tiny", "shmloader", "hung")
    assert run.wrong
    assert [one.contestant for one in run.left_out] == ["torch-file_system", "shmloader"]


def test_a_data_set_that_memory_has_no_room_for_is_left_out() -> None:
    huge = Workload("huge", 1, 1, lambda samples: Records([]), dataset_nbytes=10**15, start_method="spawn")
    assert contest.too_large(WORKLOADS["images"], LOADERS["shmloader"], 2) is None
    reason = contest.too_large(huge, LOADERS["torch-file_system"], 2)
    assert reason is not None
    assert "needs 6,600,000.0 GB" in reason
    assert "6.0 times the data set" in reason


def test_an_absent_package_of_a_package_is_found_out() -> None:
    assert "no_such_package" in (Loader("x", print, packages=("no_such_package.part",)).missing() or "")
    assert Loader("x", print, packages=("json.decoder",)).missing() is None


def test_collating_with_numpy_gives_what_torch_gives() -> None:
    dataset = make_record_arrays(8)
    samples = [(dataset[number], np.arange(3) + number) for number in range(4)]
    made, expected = numpy_collate(samples), default_collate(samples)
    assert touch(made) == touch(expected)
    assert made[0]["name"] == expected[0]["name"]
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves(made))


@pytest.mark.parametrize(("batch_size", "workers"), [(4, 2), (3, 3), (1, 2), (5, 1)])
def test_samples_dealt_to_workers_come_back_in_batches_in_order(batch_size: int, workers: int) -> None:
    dealt = peers.Dealt(Records(list(range(10_000))), batch_size, workers)

    def batches_of(worker: int) -> Iterator[list[int]]:
        places = iter(range(worker, len(dealt), workers))
        while True:
            yield [dealt[next(places)] for _ in range(batch_size)]

    together = iter(peers.InTurn([batches_of(worker) for worker in range(workers)]))
    samples = [sample for _ in range(4 * workers) for sample in next(together)]
    assert samples == list(range(4 * workers * batch_size))


def test_batches_as_a_sequence_equal_those_of_a_loader() -> None:
    table = TensorDataset(torch.arange(12), torch.arange(12) * 2)
    batches = peers.make_batches(table, 4, default_collate, {"batch_sampler": CyclicBatches(12, 4)})
    first, fourth = batches[0], batches[3]
    assert first[1].tolist() == [0, 2, 4, 6]
    assert fourth[0].tolist() == first[0].tolist()  # the indices began again
    every_other = iter(peers.EveryNth(batches, 1, 2))
    assert [next(every_other)[0][0].item() for _ in range(3)] == [4, 0, 8]
    plain = peers.make_batches(Records([torch.tensor(n) for n in range(8)]), 2, default_collate, {})
    assert plain[3].tolist() == [6, 7]


def test_a_loop_that_waits_says_so() -> None:
    def slow() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.01)
            yield torch.ones(4)

    loop = training.train(slow(), seconds=0.05, min_batches=4, compute_s=0.002)
    count = len(loop.touched)
    assert count >= 4
    assert loop.wait_s >= 0.01 * count
    assert loop.window_s >= 0.012 * count


def test_one_in_twenty_is_slow() -> None:
    uneven = Uneven(torch.zeros(20, 1), usual_s=0.0, slow_s=0.02, every=20)
    took_s = []
    for index in range(20):
        start_s = time.perf_counter()
        uneven[index]
        took_s.append(time.perf_counter() - start_s)
    assert took_s[10] >= 0.02
    # One worker makes at most one sample per ms, since a sleep is never shorter than asked for.
    assert 2_000 < uneven_rate(uneven, 100) <= 100_000


def test_written_files_are_written_once_and_whole(folder: Path) -> None:
    files = real_files.make_npy(3)
    before = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    again = real_files.make_npy(3)
    assert [path.stat().st_mtime_ns for path in sorted(folder.iterdir())] == before
    assert len(before) == 3
    assert files[1].shape == (3, 64, 64)
    assert torch.equal(files[4], again[1])
    assert not torch.equal(files[0], files[1])


def test_the_documentation_has_every_loader_and_workload() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in (*LOADERS, *WORKLOADS):
        family = name.rpartition("-")[0] if name.startswith("startup-") else name
        assert f"`{name}`" in text or f"`{family}-" in text, name


def test_a_measurement_survives_its_way_between_processes() -> None:
    made = measure(tiny("tiny", "limit"))
    assert Measurement(**json.loads(json.dumps(asdict(made)))) == made


def judged(name: str, **figures: dict[str, float]) -> dict[str, tuple[str, bool]]:
    """The verdicts for a workload's targets with these figures of one loader; others have plain figures."""
    measured = replace(measure(tiny("tiny", "limit")), cpu_s=1.0, batches=1000, first_batch_s=1.0)
    runs = {"limit": [measured]}
    runs |= {
        contestant.replace("_", "-", 1): [replace(measured, **known)] for contestant, known in figures.items()
    }
    verdicts = judge(WORKLOADS[name], summary.make_rows(name, runs), runs)
    return {verdict.target: (verdict.figure, verdict.ok) for verdict in verdicts}


def test_torch_alone_is_no_peer_to_be_compared_with() -> None:
    quicker, cheaper = "at least 6 times the best peer", "processor time below all others'"
    alone = judged("images", torch_file_system={}, shmloader={})
    assert not {quicker, cheaper} & set(alone)
    assert {quicker, cheaper} <= set(judged("images", torch_file_system={}, seqtools={}, shmloader={}))


@pytest.mark.parametrize("cpu_s", [1.0, 0.999])
def test_processor_time_is_compared_with_the_most_frugal_peer(cpu_s: float) -> None:
    verdicts = judged(
        "rows", torch_file_system={"cpu_s": 2.0}, spdl={"cpu_s": 3.0}, seqtools={}, shmloader={"cpu_s": cpu_s}
    )
    figure, ok = verdicts["processor time below all others'"]
    assert figure == f"{cpu_s * 1000:,.0f} us a batch, seqtools 1,000"
    assert ok == (cpu_s < 1)


@pytest.mark.parametrize(("first_s", "ok"), [(4.0, True), (6.0, False)])
def test_a_start_is_compared_with_the_quicker_of_torchs(first_s: float, ok: bool) -> None:
    verdicts = judged(
        "startup-1gb-fork",
        torch_file_system={"first_batch_s": 9.0},
        torch_file_descriptor={"first_batch_s": 5.0},
        seqtools={"first_batch_s": 1.0},
        shmloader={"first_batch_s": first_s},
    )
    assert verdicts == {"the first batch before torch's": (f"{first_s:.2f} s, torch 5.00 s", ok)}


@pytest.mark.parametrize(("first_s", "ok"), [(2.4, True), (2.5, False)])
def test_a_large_start_is_compared_with_the_small_one_of_the_same_run(first_s: float, ok: bool) -> None:
    measured = measure(tiny("tiny", "limit"))
    rows = {
        name: summary.make_rows(
            name, {"limit": [measured], "shmloader": [replace(measured, first_batch_s=seconds)]}
        )
        for name, seconds in {"startup-1mb-spawn": 2.0, "startup-1gb-spawn": first_s}.items()
    }
    assert compare_startups(WORKLOADS["startup-1mb-spawn"], rows) == []
    (verdict,) = compare_startups(WORKLOADS["startup-1gb-spawn"], rows)
    assert verdict.ok == ok
    assert verdict.figure == f"{first_s:.2f} s, startup-1mb-spawn 2.00 s ({first_s / 2 - 1:+.0%})"
    del rows["startup-1mb-spawn"]
    assert compare_startups(WORKLOADS["startup-1gb-spawn"], rows) == []


def test_each_turn_begins_with_the_next_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure(tiny("tiny", "limit"))
    order: list[str] = []

    def note(spec: Spec, max_foreign: float | None) -> Measurement:
        order.append(spec.contestant)
        return replace(measured, contestant=spec.contestant)

    monkeypatch.setattr(contest, "run_undisturbed", note)
    arguments = comparison.parse(["--repeats", "4", "--seconds", "1"])
    runs: dict[str, list[Measurement]] = {"shmloader": [], "spdl": [], "limit": []}
    contest.measure_in_turns(contest.Run(arguments, {}), WORKLOADS["tiny"], runs, tqdm(disable=True))
    assert [len(measurements) for measurements in runs.values()] == [4, 4, 4]
    assert order[::3] == ["shmloader", "spdl", "limit", "shmloader"]
    assert order[3:6] == ["spdl", "limit", "shmloader"]


def test_interrupted_it_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = measure(tiny("tiny", "limit"))
    turns = iter(["limit of copying", "shmloader", "torch", "limit", "torch again"])

    def note(spec: Spec, max_foreign: float | None) -> Measurement:
        if next(turns) == "torch again":
            raise KeyboardInterrupt
        return replace(measured, contestant=spec.contestant)

    monkeypatch.setattr(contest, "run_undisturbed", note)
    monkeypatch.setattr(contest, "measure_memcpy", lambda run: next(turns))
    names = ["--workload=tiny", "--loader=shmloader", "--loader=torch-file_descriptor", "--repeats=2"]
    with pytest.raises(KeyboardInterrupt):
        comparison.main([*names, "--json", str(tmp_path / "figures.json")])
    kept = json.loads((tmp_path / "figures.json").read_text())["workloads"]["tiny"]
    assert kept["contestants"].keys() == {"shmloader", "torch-file_descriptor", "limit"}
    out, err = capsys.readouterr()
    assert "6 measurements, each in a fresh process: 1 workload(s), 2 loader(s)" in err
    assert "| tiny" in out
