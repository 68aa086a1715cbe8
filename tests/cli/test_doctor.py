"""The doctor: it is right about places that really are small or broken, and never hangs there."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from small_places import entering, memory_cgroup, run_in, with_shm

import shmloader
from shmloader.cli import main
from shmloader.cli.doctor import NOT_WRITTEN, Report, as_text, checks, examine
from shmloader.cli.doctor.advice import Advice, Room, advise
from shmloader.cli.doctor.checks import CHECKS, Check, Finding, Host
from shmloader.cli.doctor.trial import Trial, try_cuda, try_loading
from shmloader.memory.limits import Cores, Headroom

REPOSITORY = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "shmloader", "doctor"]
MIB = 2**20
OWN = multiprocessing.get_all_start_methods()[0]


def _documented(heading: str) -> set[str]:
    """The names in backticks in the first column of the table under a heading of docs/doctor.md."""
    text = (REPOSITORY / "docs" / "doctor.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}")[1].split("\n## ")[0]
    cells = re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def _run_json(setup: str = "true", *words: str, prefix: tuple[str, ...] = (), **environment: str) -> Any:
    """The doctor's report from a process of its own, with its exit status under ``status``."""
    done = run_in(setup, [*prefix, *DOCTOR, "--json", *words], **environment)
    assert done.stdout, done.stderr
    return json.loads(done.stdout) | {"status": done.returncode}


# --- the whole doctor, for real


def test_this_host_is_found_able_to_load(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--batch-bytes", "1MB", "--workers", "2"])
    report = json.loads(capsys.readouterr().out)
    found = report["checks"]
    assert [name for name, check in found.items() if check["status"] == "fail"] == []
    assert (status, report["loading_works"]) == (0, True)
    for name in {OWN, "spawn"}:
        values = found[f"loading_{name}"]["values"]
        assert (values["batches"], values["batch_nbytes"]) == (4, 10**6)
    assert set(found) <= _documented("What it looks at")
    assert set(found) >= {name for name in _documented("What it looks at") if "loading" not in name}
    named = {"version", "loading_works", "checks", *(f"advice.{key}" for key in report["advice"])}
    named |= {f"checks.*.{key}" for check in found.values() for key in check}
    assert named == _documented("Keys of `--json`")
    assert set(report) == {"version", "loading_works", "checks", "advice"}
    assert report["version"] == shmloader.__version__


def test_loading_works_with_a_small_shm_and_64_files() -> None:
    report = _run_json("ulimit -n 64", prefix=tuple(with_shm("16m")))
    files = report["checks"]["open_files"]
    assert (report["status"], report["loading_works"]) == (0, True)
    assert files["values"]["limit"] == 64
    assert files["status"] == "warning"
    assert "little is left" in files["change"]


def test_loading_works_without_shm() -> None:
    report = _run_json(prefix=tuple(with_shm(None)))
    assert (report["status"], report["loading_works"]) == (0, True)


def test_a_small_memory_cgroup_is_survived_and_named() -> None:
    with memory_cgroup("200M") as folder:
        report = _run_json(entering(folder), "--batch-bytes", "100MB")
        assert (report["status"], report["loading_works"]) == (1, False)
        assert report["checks"][f"loading_{OWN}"]["values"]["out_of_memory"] is True
        assert "raise the memory limit" in report["checks"]["loading_spawn"]["change"]
        memory = report["checks"]["memory"]
        assert memory["status"] == "fail"
        assert str(folder) in memory["found"]
        assert memory["values"]["limit_nbytes"] == 200 * MIB
        assert memory["values"]["oom_kills"] >= 1


def test_what_makes_loaders_fail_is_a_failure_here() -> None:
    report = _run_json(prefix=("prlimit", "--fsize=4096", "--"))
    assert (report["status"], report["loading_works"]) == (1, False)
    assert report["checks"][f"loading_{OWN}"]["status"] == "fail"
    assert report["checks"]["loading_spawn"]["status"] == ("fail" if OWN == "spawn" else "warning")
    assert "ulimit -f" in report["checks"]["loading_spawn"]["found"]


# --- trials never hang


def _hang(folder: Path, where: str) -> None:
    """Make every interpreter hang that has ``folder`` on its path and ``where`` in its command."""
    code = f"import sys, time\nif {where!r} in ' '.join(sys.orig_argv):\n    time.sleep(600)\n"
    (folder / "sitecustomize.py").write_text(code)


@pytest.mark.parametrize(
    ("where", "limit_s", "grace_s", "said"),
    [
        ("multiprocessing.spawn", 8, 60, "it hung, and was ended after 8 s; last seen in .*shmloader"),
        ("doctor.probe", 1, 0.5, "it was still not done after 1.5 s"),
    ],
)
def test_a_hang_is_an_answer(
    where: str, limit_s: float, grace_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hang(tmp_path, where)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began_s = time.monotonic()
    trial = try_loading("spawn", MIB, limit_s, grace_s)
    assert not trial.works
    assert re.search(said, trial.error)
    assert time.monotonic() - began_s < 100  # and not the ten minutes of the sleep


def test_a_trial_that_cannot_work_says_why() -> None:
    trial = try_loading("teleport", MIB, limit_s=60)
    assert not trial.works
    assert "ValueError" in trial.error
    assert "teleport" in trial.error


def test_interrupted_it_leaves_nothing_behind(tmp_path: Path) -> None:
    _hang(tmp_path, "doctor.probe")
    process = subprocess.Popen(
        DOCTOR,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    assert "loading with" in process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")


@pytest.mark.parametrize("works", [True, False])
def test_a_report_that_cannot_be_written_does_not_say_that_loading_fails(works: bool, tmp_path: Path) -> None:
    if not works:
        _hang(tmp_path, "doctor.probe")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*DOCTOR, "--timeout", "60" if works else "1"],
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == NOT_WRITTEN
    assert "error: the report could not be written to standard output: No space left on device" in done.stderr
    assert done.stderr.endswith(f"Loading {'works' if works else 'does not work'} here.\n")
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_changes_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(DOCTOR, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.replace("loading with", "").split()) == (
        0,
        ["fork", "...", "spawn", "..."],
    )


@pytest.mark.parametrize("width", [40, 59, 80])
def test_no_line_is_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    finding = Finding(
        "warning", "8 cores of 16, by the affinity of this process", "start with 8 workers or fewer"
    )
    text = as_text(Report([(CHECKS[0], finding)], _advice()))
    assert max(map(len, text.splitlines()[1:])) <= width
    assert CHECKS[0].title in text


# --- single checks


def _host(**changes: Any) -> Host:
    """A host that lacks nothing, but for the changes."""
    values = {
        "cores": Cores(4, 4, None),
        "memory": Headroom(2**33, 2**34, "the machine's memory"),
        "open_files": (5, 20_000),
        "default_start_method": "fork",
        "advice": _advice(),
        "num_workers": 4,
        "loading": {},
    }
    return Host(**values | changes)


def _advice(batch_nbytes: int = MIB, available_nbytes: int = 2**33) -> Advice:
    return advise(Room(4, available_nbytes), batch_nbytes, 4)


def test_the_versions_are_held_to_what_the_package_declares() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = sorted(text.split(">=")[0] for text in project["dependencies"])
    assert list(checks.LIBRARIES) == declared
    finding = checks.check_versions(_host())
    assert finding.status == "ok"
    assert finding.values.keys() == {"python", *declared}
    assert finding.values["torch"] == torch.__version__


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # makes Python's import fail
    finding = checks.check_versions(_host())
    assert finding.status == "warning"
    assert "pyarrow" in finding.change
    assert "reinstall shmloader" in finding.change
    assert "pip" not in finding.change  # it is not on the package index: it was installed from a checkout
    assert finding.values["pyarrow"] is None


@pytest.mark.parametrize(
    ("cores", "workers", "said"),
    [
        (Cores(machine=64, affinity=64, quota=None), 64, None),
        (Cores(machine=64, affinity=64, quota=None), 65, "65 workers share 64"),
        (Cores(machine=64, affinity=64, quota=0.5), 1, r"torch\.set_num_threads\(1\)"),
    ],
)
def test_cores_are_held_against_workers_and_threads(cores: Cores, workers: int, said: str | None) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        finding = checks.check_cores(_host(cores=cores, num_workers=workers))
    finally:
        torch.set_num_threads(threads)
    assert finding.status == ("warning" if said else "ok")
    assert re.search(said or "^$", finding.change)


@pytest.mark.parametrize(
    ("available_nbytes", "status"), [(2**33, "ok"), (5 * MIB, "warning"), (3 * MIB - 1, "fail")]
)
def test_memory_is_held_against_the_slots(
    available_nbytes: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "oom_kills", lambda: 0)  # this host's, which tests add to
    room = Headroom(available_nbytes, 2**33, "a memory cgroup")
    finding = checks.check_memory(_host(memory=room, advice=_advice(available_nbytes=available_nbytes)))
    assert finding.status == status
    assert bool(finding.change) == (status != "ok")


def test_without_memfd_it_says_that_the_loader_loads_torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    finding = checks.check_loading(_host(loading={"fork": Trial(True)}), "fork")
    assert finding.status == "warning"
    assert "loads as torch does, with the same batches" in finding.found


CUDA = {
    "no cuda in torch": (None, "ok", "no CUDA"),
    "no device": (Trial(True, {"available": False}), "ok", "no device"),
    "works": (
        Trial(
            True,
            {
                "available": True,
                "device": "H",
                "registered": True,
                "is_pinned": True,
                "driver": 12080,
                "tried_nbytes": 50_000_000,
                "register_s": 0.005,
                "copy_s": 0.001,
            },
        ),
        "ok",
        "H, driver for CUDA 12.8: slots are page-locked at 10.0 GB/s, once, and copied at 50.0 GB/s",
    ),
    "refused": (
        Trial(
            True,
            {
                "available": True,
                "device": "H",
                "registered": False,
                "error": "out of memory",
                "refused": True,
            },
        ),
        "warning",
        "slots cannot be page-locked",
    ),
    "an old driver": (
        Trial(
            True, {"available": True, "device": "H", "registered": False, "error": "old", "refused": False}
        ),
        "warning",
        "slots cannot be page-locked",
    ),
    "crashed": (Trial(False, error="signal 11"), "warning", "signal 11"),
}


@pytest.mark.parametrize("case", CUDA)
def test_what_cuda_answered_is_judged(case: str) -> None:
    trial, status, said = CUDA[case]
    finding = checks.check_cuda(_host(cuda=trial))
    assert finding.status == status
    assert said in finding.found
    assert ("memlock" in (finding.change or "")) == (case == "refused")


def test_cuda_is_really_asked() -> None:
    trial = try_cuda(limit_s=120)
    assert trial.works, trial.error
    assert trial.answer["available"] == torch.cuda.is_available()
    assert trial.answer.get("registered", True)


def test_only_the_platforms_own_start_method_is_needed() -> None:
    broken = Trial(False, error="it broke")
    host = _host(loading={"spawn": broken, "fork": broken})
    assert checks.check_loading(host, "spawn").status == "warning"
    assert checks.check_loading(host, "fork").status == "fail"


@pytest.mark.parametrize(("batch_nbytes", "tried"), [(None, MIB), (5 * MIB, 5 * MIB), (10**15, MIB)])
def test_batches_of_the_size_that_was_given_are_tried_if_they_fit(
    batch_nbytes: int | None, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def try_loading(start_method: str, nbytes: int, limit_s: float) -> Trial:
        given.append((start_method, nbytes))
        return Trial(True, {"batches": 4, "batch_nbytes": nbytes, "first_batch_s": 0.1})

    monkeypatch.setattr("shmloader.cli.doctor.try_loading", try_loading)
    report = examine(batch_nbytes, None, 60.0)
    assert dict(given) == {OWN: tried, "spawn": tried}
    assert report.advice.fits == (batch_nbytes != 10**15)


def test_where_only_spawn_works_it_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Trial(True, {"batches": 4, "batch_nbytes": 1, "first_batch_s": 0.1})
    trials = {"fork": Trial(False, error="broken"), "spawn": works}
    monkeypatch.setattr("shmloader.cli.doctor.try_loading", lambda method, *rest: trials[method])
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["fork", "spawn"])
    report = examine(None, None, 60.0)
    assert report.advice.multiprocessing_context == "spawn"
    assert "multiprocessing_context='spawn'" in as_text(report)


def test_one_failure_is_a_verdict_and_warnings_are_not() -> None:
    def row(name: str, finding: Finding) -> tuple[Check, Finding]:
        return Check(name, f"thing {name}", lambda host: finding), finding

    good = row("a", Finding("ok", "fine"))
    sore = row("b", Finding("warning", "not so fine", "do better"))
    bad = row("c", Finding("fail", "broken", "mend it"))
    works, fails = Report([good, sore], _advice()), Report([good, sore, bad], _advice())
    assert (works.loading_works, fails.loading_works) == (True, False)
    assert as_text(works).endswith("Loading works here, with 1 warning(s).")
    assert as_text(fails).endswith("Loading does not work here: see thing c.")
    for words in ("thing a", "not so fine", "-> mend it", "num_workers=4"):
        assert words in as_text(fails)
