"""The memory benchmark, made small: every part runs, prints its figures, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import memory, memory_cgroup, memory_command  # noqa: E402
from benchmarks.memory_datasets import CONTESTANTS, Nothing, PickledBytes, Rows, expected_sum, records  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads smaps_rollup")

OURS = "shmloader, share(list)"


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, Any]:
    report = tmp_path / "report.json"
    assert memory.main(["--quick", "--json", str(report), *arguments]) == 0
    return capsys.readouterr().out, json.loads(report.read_text(encoding="utf-8"))


def test_growth_is_compared_with_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--contestant", "torch, list", "--contestant", OURS, "--workers", "1"]
    output, report = run(tmp_path, capsys, "--part", "growth", *chosen)
    theirs, ours = report["growth"]
    assert theirs["list_nbytes"] > 20_000 * 100  # a dict, a string and two references at the least
    assert len(ours["growth_nbytes"]) == 1
    assert "of the list" in output
    assert "a worker grows by under 1% of the list" in output
    assert report["targets"][0]["figure"].endswith("%")
    assert report["machine"]["cores"] >= 1


def test_growth_of_one_contestant_is_compared_with_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = run(tmp_path, capsys, "--part", "growth", "--contestant", OURS, "--workers", "1")
    (ours,) = report["growth"]
    assert ours["list_nbytes"] > 20_000 * 200  # a store of these records is smaller
    share = max(ours["growth_nbytes"]) / ours["list_nbytes"]
    assert report["targets"][0]["figure"] == f"{share:.1%}"


def test_memory_over_time_is_drawn_as_a_png(tmp_path: Path) -> None:
    """The picture is drawn in a process of its own: matplotlib keeps its font files open."""
    pytest.importorskip("matplotlib")
    program = (
        "import sys; from pathlib import Path; from benchmarks.memory_picture import draw\n"
        "from benchmarks.memory_samples import MemorySample\n"
        "samples = [MemorySample(time, 1000 * time) for time in range(5)]\n"
        "draw(Path(sys.argv[1]), {'torch, list': samples}, 'title')\n"
    )
    environment = os.environ | {"MPLCONFIGDIR": str(tmp_path)}
    picture = tmp_path / "memory.png"
    subprocess.run([sys.executable, "-c", program, str(picture)], cwd=ROOT, env=environment, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ranks_are_summed_together_with_what_serves_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, report = run(tmp_path, capsys, "--part", "ranks", "--contestant", OURS)
    nothing, ours = report["ranks"]
    assert nothing["contestant"] == "shmloader, nothing"
    assert nothing["processes"] == 2 * 3
    assert ours["processes"] == 2 * 3 + 1  # the server
    assert ours["store_nbytes"] > 20_000 * 10
    assert "2 ranks x 2 workers" in output


def test_what_a_spawned_worker_is_sent_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report = run(tmp_path, capsys, "--part", "spawn", "--contestant", OURS)
    assert [one["rows"] for one in report["spawn"]] == [1_000, 10_000]
    assert all(0 < one["message_nbytes"] < 64_000 for one in report["spawn"])
    assert "message to a worker under 64,000 bytes" in output


def test_without_cgroups_the_limited_runs_are_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Any:
        raise memory_cgroup.NoCgroupError("no memory cgroup controller is mounted")

    monkeypatch.setattr(memory_cgroup, "own_folder", none)
    output, report = run(tmp_path, capsys, "--part", "limited", "--cgroup-limit", "1000000000")
    assert "skipped the runs under a memory limit: no memory cgroup controller" in output
    assert report["limited"] == "no memory cgroup controller is mounted"


def test_a_process_that_exceeds_its_cgroup_is_killed_and_counted() -> None:
    try:
        with memory_cgroup.limited(64 << 20) as folder:
            done = subprocess.run(
                [sys.executable, "-c", "bytearray(b'x') * (256 << 20)"],
                preexec_fn=lambda: memory_cgroup.join(folder),
                check=False,
            )
            assert done.returncode == -9
            assert memory_cgroup.was_killed(folder) == 1
            assert memory_cgroup.peak_nbytes(folder) <= 64 << 20
        assert not folder.exists()
    except memory_cgroup.NoCgroupError as error:
        pytest.skip(str(error))


def test_a_failed_measurement_says_which_and_why(tmp_path: Path) -> None:
    with pytest.raises(memory.MeasurementFailedError, match=r"(?s)growth, none such ended with 1:.*KeyError"):
        memory.run(memory.Spec("growth", "none such", 10, 1))


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, one in CONTESTANTS.items() for shape in one.shapes]
)
def test_all_contestants_give_the_same_samples(name: str, shape: str) -> None:
    pytest.importorskip(CONTESTANTS[name].package)
    dataset = Rows(CONTESTANTS[name].make(300, shape))
    assert len(dataset) == 300
    assert sum(dataset[index] for index in range(300)) == expected_sum(300, shape)
    assert list(map(CONTESTANTS[name].make(300, shape).__getitem__, range(300))) == list(records(300, shape))


def test_shapes_are_compared_by_start_method_and_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--shape", "coco", "--method", "fork", "--shape-workers", "0", "--shape-workers", "1"]
    output, report = run(tmp_path, capsys, "--part", "shapes", "--contestant", "torch, list", *chosen)
    assert [(one["contestant"], one["workers"]) for one in report["shapes"]] == [
        (name, workers) for workers in (0, 1) for name in ("torch, nothing", "torch, list")
    ]
    assert [one["worker_private_nbytes"] > 0 for one in report["shapes"]] == [False, False, True, True]
    assert "| coco    | torch, list    | 1 fork  |" in output
    words = [str(tmp_path / name) for name in ("workers.png", "report.json")]
    subprocess.run([sys.executable, "-m", "benchmarks.memory_picture", *words], cwd=ROOT, check=True)
    assert (tmp_path / "workers.png").read_bytes().startswith(b"\x89PNG")


def test_first_batches_are_compared_with_a_loader_without_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, report = run(tmp_path, capsys, "--part", "start")
    assert [(one["contestant"], one["method"]) for one in report["start"]] == [
        (name, method)
        for method in ("spawn", "forkserver")
        for name in ("shmloader, nothing", "shmloader, share(list)", "torch, list")
    ]
    nothing, shared, *_ = (one["first_batch_s"] for one in report["start"])
    assert report["targets"][0]["figure"] == f"{shared - nothing:+.2f} s"
    assert "first batch under 1 s later than without data" in output


def test_the_memory_command_is_measured_over_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    memory_command.main(["--rows", "200000", "--workers", "1", "--seconds", "20", "--method", "fork"])
    output = capsys.readouterr().out
    assert "Cure: train.samples = shmloader.share(train.samples)" in output
    assert re.search(r"^\| fork +\| +\d+\.\d \| +\d+ \| +\d\.\d\d% \|", output, re.MULTILINE), output


def test_the_trick_gives_back_any_row() -> None:
    rows = PickledBytes(records(10))
    assert [rows[index] for index in (9, 0, 4)] == [Nothing(10)[index] for index in (9, 0, 4)]
