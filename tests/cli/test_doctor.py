"""The doctor: right about places that really are small or broken, and never hanging in one."""

import json
import os
import re
import resource
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

from shmloader.cli import doctor_checks, main
from shmloader.cli.doctor import Report, as_text
from shmloader.cli.doctor_advice import Advice, Room, advise
from shmloader.cli.doctor_trial import Trial, try_out
from shmloader.host.limits import Cores, Headroom

REPOSITORY = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "shmloader", "doctor"]
MIB = 2**20


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


# --- the whole, for real


def test_this_host_is_found_able_to_load(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--batch-bytes", "1MB", "--workers", "2"])
    report = json.loads(capsys.readouterr().out)
    checks = report["checks"]
    assert [name for name, check in checks.items() if check["status"] == "fail"] == []
    assert (status, report["loading_works"]) == (0, True)
    for name in {doctor_checks.default_start_method(), "spawn"}:
        assert checks[f"loading_{name}"]["values"]["batches"] == 8
    assert set(checks) <= _documented("What it looks at")
    assert set(checks) >= {name for name in _documented("What it looks at") if "loading" not in name}
    named = {"version", "loading_works", "checks", *(f"advice.{key}" for key in report["advice"])}
    named |= {f"checks.*.{key}" for check in checks.values() for key in check}
    assert named == _documented("Keys of `--json`")
    assert set(report) == {"version", "loading_works", "checks", "advice"}


def test_loading_works_with_a_small_shm_and_64_files() -> None:
    report = _run_json("ulimit -n 64", prefix=tuple(with_shm("16m")))
    checks = report["checks"]
    assert (report["status"], report["loading_works"]) == (0, True)
    assert (checks["shm_mount"]["status"], checks["shm_mount"]["values"]["total_nbytes"]) == ("ok", 16 * MIB)
    assert checks["open_files"]["values"]["limit"] == 64
    assert checks["open_files"]["status"] == "warning"
    assert "little is left" in checks["open_files"]["change"]


def test_loading_works_without_shm() -> None:
    report = _run_json(prefix=tuple(with_shm(None)))
    assert (report["status"], report["loading_works"]) == (0, True)
    mount = report["checks"]["shm_mount"]
    assert (mount["status"], mount["values"]["mounted"]) == ("warning", False)


def test_a_small_memory_cgroup_is_survived_and_named() -> None:
    with memory_cgroup("200M") as folder:
        report = _run_json(entering(folder), "--batch-bytes", "100MB")
        own = doctor_checks.default_start_method()
        assert (report["status"], report["loading_works"]) == (1, False)
        assert report["checks"][f"loading_{own}"]["values"]["out_of_memory"] is True
        assert "raise the memory limit" in report["checks"]["loading_spawn"]["change"]
        memory = report["checks"]["memory"]
        assert memory["status"] == "fail"
        assert str(folder) in memory["found"]
        assert memory["values"]["limit_nbytes"] == 200 * MIB
        assert memory["values"]["oom_kills"] >= 1


def test_what_makes_loaders_fail_is_a_failure_here() -> None:
    report = _run_json(prefix=("prlimit", "--fsize=4096", "--"))
    own = doctor_checks.default_start_method()
    assert (report["status"], report["loading_works"]) == (1, False)
    assert report["checks"]["segment"]["status"] == "fail"
    assert report["checks"][f"loading_{own}"]["status"] == "fail"
    assert report["checks"]["loading_spawn"]["status"] == ("fail" if own == "spawn" else "warning")
    assert "ulimit -f" in report["checks"]["loading_spawn"]["found"]


# --- trials never hang


def _hang(folder: Path, where: str) -> None:
    """Let every interpreter that runs with ``folder`` on its path, and ``where`` in its command, hang."""
    code = f"import sys, time\nif {where!r} in ' '.join(sys.orig_argv):\n    time.sleep(600)\n"
    (folder / "sitecustomize.py").write_text(code)


@pytest.mark.parametrize(
    ("where", "limit_s", "grace_s", "said"),
    [
        ("multiprocessing.spawn", 3, 60, "it hung, and was ended after 3 s; last seen in .*shmloader"),
        ("doctor_probe", 1, 0.5, "it was still not done after 1.5 s"),
    ],
)
def test_a_hang_is_an_answer(
    where: str, limit_s: float, grace_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hang(tmp_path, where)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began_s = time.monotonic()
    trial = try_out("load", "spawn", limit_s, grace_s)
    assert not trial.works
    assert re.search(said, trial.error)
    assert time.monotonic() - began_s < 100  # and not the ten minutes of the sleep


def test_a_trial_that_cannot_work_says_why() -> None:
    trial = try_out("load", "teleport", limit_s=60)
    assert not trial.works
    assert "ValueError" in trial.error
    assert "teleport" in trial.error


def test_interrupted_it_leaves_nothing_behind(tmp_path: Path) -> None:
    _hang(tmp_path, "doctor_probe")
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


# --- single checks


def _advice(**changes: Any) -> Advice:
    return advise(Room(cores=4, available_nbytes=2**33, **changes), batch_nbytes=MIB, asked_workers=4)


def test_the_versions_are_held_to_what_the_package_declares() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = dict(text.split(">=") for text in project["dependencies"])
    assert doctor_checks._requirements() == declared
    check = doctor_checks.check_versions()
    assert check.status == "ok"
    assert check.values.keys() == {"python", *declared}
    assert check.values["torch"] == torch.__version__


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what makes Python's import fail
    check = doctor_checks.check_versions()
    assert check.status == "warning"
    assert "pyarrow" in check.change
    assert "reinstall shmloader" in check.change
    assert "pip" not in check.change  # it is not on the package index: a checkout is what was installed
    assert check.values["pyarrow"] is None


def test_an_old_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_requirements", lambda: {"numpy": "99.1", "psutil": "1.0"})
    check = doctor_checks.check_versions()
    assert check.status == "warning"
    assert "is older than 99.1" in check.change
    assert "psutil" not in check.change


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
        check = doctor_checks.check_cores(cores, workers)
    finally:
        torch.set_num_threads(threads)
    assert check.status == ("warning" if said else "ok")
    assert re.search(said or "^$", check.change)


@pytest.mark.parametrize(
    ("available_nbytes", "status"), [(2**33, "ok"), (5 * MIB, "warning"), (3 * MIB - 1, "fail")]
)
def test_memory_is_held_against_the_slots(
    available_nbytes: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "oom_kills", lambda: 0)  # this host's, which tests add to
    room = Headroom(available_nbytes, 2**33, "a memory cgroup")
    advice = advise(Room(cores=4, available_nbytes=available_nbytes), MIB, 4)
    check = doctor_checks.check_memory(room, advice)
    assert check.status == status
    assert bool(check.change) == (status != "ok")


def test_a_segment_is_really_made() -> None:
    check = doctor_checks.check_segment()
    assert check.status == "ok"
    assert check.values["tried_nbytes"] > 0


def test_a_segment_that_cannot_be_reserved_fails() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        check = doctor_checks.check_segment()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert check.status == "fail"
    assert "SharedMemoryExhausted" in check.found


def test_address_space_is_held_against_the_slots() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    large = advise(Room(4, 2**50), batch_nbytes=2**45, asked_workers=1)
    assert doctor_checks.check_address_space(large).status == "ok"
    resource.setrlimit(resource.RLIMIT_AS, (2**44, before[1]))
    try:
        statuses = [doctor_checks.check_address_space(advice).status for advice in (_advice(), large)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert statuses == ["warning", "fail"]


def test_mappings_are_held_against_the_slots() -> None:
    many = advise(Room(10**6, 2**50), batch_nbytes=1, asked_workers=10**6)
    assert doctor_checks.check_mappings(_advice()).status == "ok"
    assert doctor_checks.check_mappings(many).status == "fail"


def test_this_process_can_be_watched() -> None:
    check = doctor_checks.check_pidfd()
    assert check.status == ("ok" if hasattr(os, "pidfd_open") else "warning")


CUDA = {
    "no cuda in torch": (None, "ok", "no CUDA"),
    "no device": (Trial(True, {"available": False}), "ok", "no device"),
    "works": (
        Trial(True, {"available": True, "device": "H", "registered": True, "is_pinned": True}),
        "ok",
        "registered",
    ),
    "refused": (
        Trial(True, {"available": True, "device": "H", "registered": False, "error": "out of memory"}),
        "warning",
        "cannot be registered",
    ),
    "crashed": (Trial(False, error="signal 11"), "warning", "signal 11"),
}


@pytest.mark.parametrize("case", CUDA)
def test_what_cuda_answered_is_judged(case: str) -> None:
    trial, status, said = CUDA[case]
    check = doctor_checks.check_cuda(trial)
    assert check.status == status
    assert said in check.found


def test_cuda_is_really_asked() -> None:
    trial = try_out("cuda", "-", limit_s=120)
    assert trial.works, trial.error
    assert trial.answer["available"] == torch.cuda.is_available()
    assert trial.answer.get("registered", True)


def test_only_the_platforms_own_start_method_is_needed() -> None:
    trial = Trial(False, error="it broke")
    assert doctor_checks.check_loading("spawn", trial, needed=False).status == "warning"
    assert doctor_checks.check_loading("fork", trial, needed=True).status == "fail"


def test_one_failure_is_a_verdict_and_warnings_are_not() -> None:
    good = doctor_checks.Check("a", "thing a", "ok", "fine")
    sore = doctor_checks.Check("b", "thing b", "warning", "not so fine", "do better")
    bad = doctor_checks.Check("c", "thing c", "fail", "broken", "mend it")
    works, fails = Report([good, sore], _advice()), Report([good, sore, bad], _advice())
    assert (works.loading_works, fails.loading_works) == (True, False)
    assert as_text(works).endswith("Loading works here, with 1 warning(s).")
    assert as_text(fails).endswith("Loading does not work here: see thing c.")
    for words in ("thing a", "not so fine", "-> mend it", "num_workers=4"):
        assert words in as_text(fails)
