"""Readings of real processes, and what is made of readings: growth, time to the limit, findings, text."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from warm_python import warm_python

import shmloader
from shmloader.memory.limits import Headroom, memory_headroom
from shmloader.memory.process_memory import read_memory
from shmloader.monitor import Monitor, ProcessMemory, Reading
from shmloader.monitor.findings import find
from shmloader.monitor.inside import Report
from shmloader.monitor.processes import ProcessTree, shared_nbytes
from shmloader.monitor.testing import check_growth
from shmloader.monitor.view import render

pytestmark = pytest.mark.skipif("Pss" not in read_memory(os.getpid()), reason="there is no smaps_rollup")

MB = 1_000_000
HOLDS = "import sys; data = bytearray(b'x') * 60_000_000; print('ready', flush=True); sys.stdin.read()"
ORPHANS = (
    "import signal, subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=0, stdout=1)\n"
    "signal.pause()\n"  # only the child reads the pipe
)

IMPORTS_SLOWLY = """
import importlib.machinery, sys, threading, time
import torch, shmloader, shmloader.monitor

class Slowly:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: [time.sleep(2), run(module)]
            return spec

sys.meta_path.insert(0, Slowly)
options = dict(num_workers=1, worker_max_nbytes=10**9, multiprocessing_context="fork", timeout=10)
with shmloader.monitor.Monitor():
    time.sleep(0.1)
    print(len(list(shmloader.DataLoader(torch.arange(8), **options))))
"""


def test_a_worker_that_is_forked_during_the_first_reading_loads() -> None:
    """One that was forked while the thread imported a module that it needs too would wait for ever."""
    command = [sys.executable, "-c", IMPORTS_SLOWLY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "8\n", done.stderr


def test_a_grandchild_is_followed_after_its_parent_has_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS, HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        tree = ProcessTree([parent.pid])
        one, other = tree.read()
        assert (one.pid, one.depth, other.parent, other.depth) == (parent.pid, 0, parent.pid, 1)
        assert 60 * MB <= other.private_nbytes < 80 * MB
        assert one.private_nbytes < 40 * MB
        assert 60 * MB <= other.pss_nbytes < 80 * MB
        parent.terminate()
        parent.wait()
        (orphan,) = tree.read()
        assert (orphan.pid, orphan.depth) == (other.pid, 0)
        parent.stdin.close()
        end_s = time.monotonic() + 60
        while tree.read() and time.monotonic() < end_s:
            time.sleep(0.05)
        assert tree.read() == []


def test_pss_agrees_with_psutil() -> None:
    own = next(one for one in ProcessTree([os.getpid()]).read() if one.pid == os.getpid())
    assert own.pss_nbytes == pytest.approx(psutil.Process().memory_full_info().pss, rel=0.05)


def test_shared_memory_is_counted_once_and_by_owner() -> None:
    before = shared_nbytes([os.getpid()])
    tensor = torch.zeros(5 * MB, dtype=torch.uint8).share_memory_()
    store = shmloader.share([{"text": f"{number:01000d}"} for number in range(3000)])
    fork = multiprocessing.get_context("fork")
    wait, ready = fork.Event(), fork.Event()

    def hold() -> None:
        ready.set()
        wait.wait()

    child: Any = fork.Process(target=hold)
    child.start()
    try:
        ready.wait()
        found = shared_nbytes([os.getpid(), child.pid])
    finally:
        wait.set()
        child.join()
    more = {owner: nbytes - before.get(owner, 0) for owner, nbytes in found.items()}
    assert 5 * MB <= more["torch's tensors"] < 5.1 * MB
    assert 3 * MB <= more["stores"] < 3 * MB + (4 << 20)
    assert len(store) == 3000
    assert tensor.is_shared()


def test_slots_are_counted() -> None:
    batches = iter(
        shmloader.DataLoader(
            list(torch.zeros(8, MB)), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
    )
    next(batches)
    assert shared_nbytes([os.getpid()])["slots"] >= 8 * MB


def process(private: int, pid: int = 7, parent: int = 1, name: str = "python train.py") -> ProcessMemory:
    return ProcessMemory(pid, parent, int(parent > 1), name, private, 3 * MB, private + MB)


ROOM = Headroom(600 * MB, 1000 * MB, "the memory cgroup /sys/fs/cgroup/job")


def grown(*private: int, every_s: float = 10.0) -> tuple[Monitor, Reading]:
    """A monitor of made-up readings of one worker beside a process that does not grow."""
    monitor = Monitor(os.getpid())
    for number, nbytes in enumerate(private):
        both = (process(50 * MB), process(nbytes, pid=8, parent=7))
        monitor.add(Reading(number * every_s, both, {"slots": 4 * MB}, ROOM))
    return monitor, monitor.readings[-1]


def test_a_file_that_is_removed_meanwhile_hides_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = (Path("/dev/shm", f"shmloader-test-{os.getpid()}-{name}") for name in ("gone", "kept"))
    scandir = os.scandir

    @contextlib.contextmanager
    def removing(folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name != gone.name)
        gone.unlink()
        yield iter(found)

    gone.touch()
    kept.write_bytes(bytes(8 * MB))
    try:
        monkeypatch.setattr(os, "scandir", removing)
        assert shared_nbytes([os.getpid()])["in /dev/shm, mapped by none of these"] >= 8 * MB
    finally:
        kept.unlink()


def test_growth_is_that_of_the_last_minute() -> None:
    monitor, last = grown(10 * MB, *[20 * MB] * 10, 40 * MB)
    growth = monitor.growths(last)[8]
    assert (growth.nbytes, growth.nbytes_per_min) == (30 * MB, 20 * MB)
    assert monitor.growths(last)[7].nbytes == 0


def test_the_time_to_the_limit_is_what_is_left_by_the_growth_of_all() -> None:
    monitor, last = grown(10 * MB, 20 * MB, 30 * MB)
    assert monitor.time_to_limit_s(last) == pytest.approx(600)
    monitor, last = grown(10 * MB, 10 * MB)
    assert monitor.time_to_limit_s(last) is None
    monitor, last = grown(10 * MB, 20 * MB, 30 * MB, every_s=2.0)  # a start grows too
    assert monitor.time_to_limit_s(last) is None


def test_the_interval_grows_with_the_cost_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(os.getpid(), every_s=0.5)
    monitor.read()
    assert monitor.wait_s >= 0.5
    assert monitor.cost_s <= 0.015 * monitor.wait_s * 1.001 or monitor.wait_s == 0.5
    times = iter([0.0, 0.3])
    monkeypatch.setattr("shmloader.monitor.monitor.time.thread_time", lambda: next(times))
    monitor.read()
    assert monitor.wait_s == pytest.approx(20)


def test_threads_may_read_at_once_while_processes_come_and_go() -> None:
    monitor, interval_s = Monitor(), sys.getswitchinterval()

    def read_often() -> int:
        return sum(bool(monitor.read().processes) for _ in range(60))

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            reading = [pool.submit(read_often) for _ in range(3)]
            while not all(one.done() for one in reading):
                subprocess.run(["sleep", "0.01"], check=True)
    finally:
        sys.setswitchinterval(interval_s)
    assert [one.result() for one in reading] == [60, 60, 60]


REPORT = Report(7, 1, "train", "fork", (8,), "train.samples", 614 * MB, is_shareable=True)


def texts(report: Report, *private: int, looks_inside: bool = True) -> list[str]:
    monitor, last = grown(*private)
    return [one.text for one in find([report], monitor.growths(last), looks_inside=looks_inside)]


def test_growth_is_told_with_cause_and_cure() -> None:
    (text,) = texts(REPORT, 10 * MB, 50 * MB, 90 * MB)
    assert text == (
        "the worker's private memory grows by 240 MB/min towards the 614 MB of `train.samples` (90 MB so "
        "far): a forked worker copies the objects that it reads. Cure: train.samples = "
        "shmloader.share(train.samples)"
    )


def test_loaders_that_are_made_anew_for_each_epoch_are_one_finding() -> None:
    monitor, last = grown(10 * MB, 50 * MB, 90 * MB)
    reports = [replace(REPORT, loader=number, original="rows", original_nbytes=588 * MB) for number in (1, 2)]
    reports.append(replace(REPORT, loader=3, owner="validation.samples"))
    found = find(reports, monitor.growths(last), looks_inside=True)
    assert len({one.about for one in found}) == 3, "train.samples, rows, validation.samples"


def test_loaders_of_one_name_over_different_data_are_findings_of_their_own() -> None:
    """And so is one whose dataset could not be looked at, beside a process that grows unexplained."""
    monitor, last = grown(*(40 * MB * number for number in range(8)))
    growths = monitor.growths(last)
    one = replace(REPORT, owner="loader.dataset.samples", owned=1)
    failed = replace(REPORT, owner="", nbytes=0, error="RecursionError('too deep')", owned=3)
    reports = [one, replace(one, loader=2, owned=2), replace(failed, loader=3), replace(failed, loader=4)]
    about = {found.about for found in find(reports, growths, looks_inside=True)}
    assert len(about) == 3
    alone = {found.about for found in find([], {7: growths[8]}, looks_inside=True)}
    assert len(about | alone) == 4


def test_an_owner_that_is_too_small_is_not_the_cause() -> None:
    small = Report(7, 1, "train", "fork", (8,), "train.samples", 10 * MB, is_shareable=True)
    growing = [40 * MB * number for number in range(8)]
    assert texts(small, *growing[:3]) == []  # as when a worker's first batches are made
    (text,) = texts(small, *growing)
    assert "The cause cannot be told: `train.samples`, the largest in train, has only 10 MB" in text
    assert "Cure" not in text


def test_a_list_that_was_shared_and_is_still_held_is_told() -> None:
    holds = Report(7, 1, "train", "fork", (8,), original="samples", original_nbytes=588 * MB)
    (text,) = texts(holds, 10 * MB)
    assert text == (
        "process 7 still holds `samples`, about 588 MB of Python objects that it has shared: the store has "
        "them too. Cure: del samples"
    )


def test_small_growth_is_no_finding() -> None:
    assert texts(REPORT, 10 * MB, 20 * MB) == []


def test_what_spawned_workers_rebuild_is_told_before_they_run() -> None:
    spawned = Report(7, 1, "train", "spawn", (), "train.samples", 614 * MB, is_shareable=False)
    (text,) = texts(spawned, 10 * MB)
    assert (
        "each worker of train is sent, and rebuilds, the 614 MB of `train.samples`: spawn shares no" in text
    )
    assert "shmloader.share() does not take `train.samples`" in text


@pytest.mark.parametrize(("looks_inside", "why"), [(True, "no loader"), (False, "from outside")])
def test_growth_that_nobody_reported_is_told_after_a_minute(looks_inside: bool, why: str) -> None:
    other = Report(9, 1, "train")
    growing = [40 * MB * number for number in range(8)]
    assert texts(other, *growing[:3], looks_inside=looks_inside) == []
    (text,) = texts(other, *growing, looks_inside=looks_inside)
    assert text.startswith("process 8 (python train.py) grows by 240 MB/min: ")
    assert why in text


def test_what_a_process_no_longer_shares_with_its_children_is_no_growth() -> None:
    monitor = Monitor(os.getpid())
    for number in range(8):
        private = 10 * MB + 200 * MB * (number > 6)
        alone = ProcessMemory(7, 1, 0, "python train.py", private, 300 * MB - private, 300 * MB)
        monitor.add(Reading(10.0 * number, (alone,), {}, ROOM))
    growths = monitor.growths(monitor.readings[-1])
    assert growths[7].nbytes_per_min == pytest.approx(200 * MB)
    assert list(find([], growths, looks_inside=True)) == []


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_fits_in_any_width(width: int) -> None:
    monitor, last = grown(10 * MB, 50 * MB, 90 * MB)
    lines = render(monitor, last, width).splitlines()
    assert max(map(len, lines)) <= width
    columns = lines[0].split()
    assert columns[:3] == ["MB", "private", "MB/min"]
    assert ("grown" in columns) == (width > 40)
    assert "together:" in "\n".join(lines)
    assert "\x1b" not in "\n".join(lines)
    assert [line.split()[-1 - (len(columns) - 2)] for line in lines[1:3]] == ["50", "90"]


def test_the_peak_is_shown_after_its_processes_have_ended() -> None:
    monitor, _ = grown(10 * MB, 50 * MB, 90 * MB)
    monitor.add(Reading(40.0, (process(50 * MB),), {}, ROOM))
    monitor.add(Reading(50.0, (process(50 * MB), process(5 * MB, pid=8, parent=7)), {}, ROOM))
    assert monitor.growths(monitor.last)[8].nbytes == 0  # another process with an old number
    assert monitor.peak.time_s == 20
    assert " 90 " in render(monitor, monitor.peak, 200)


def test_more_processes_than_lines_are_counted() -> None:
    monitor, last = grown(10 * MB, 20 * MB)
    assert "and 1 more" in render(monitor, last, 80, most_rows=1)


def test_the_headroom_of_another_process_is_that_of_its_cgroup() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        own, other = memory_headroom(), memory_headroom(child.pid)
        child.kill()
    assert (other.limit_nbytes, other.source) == (own.limit_nbytes, own.source)
    assert memory_headroom(1).limit_nbytes > 0


class Samples(torch.utils.data.Dataset[int]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return int(self.samples[index]["label"])


def rows(count: int) -> list[dict[str, Any]]:
    return [{"path": f"folder/image-{number}.jpeg", "label": number + 1000} for number in range(count)]


def test_a_program_that_follows_itself_is_told_the_cause() -> None:
    train = Samples(rows(200_000))
    loader = TorchLoader(
        train, 256, shuffle=True, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    )
    with Monitor(every_s=0.2) as monitor:
        end_s = time.monotonic() + 60
        while not monitor.findings() and time.monotonic() < end_s:
            for _ in loader:
                pass
    (finding,) = monitor.findings()
    assert "Cure: train.samples = shmloader.share(train.samples)" in finding.text
    assert "worker 0 of train" in monitor.names().values()


def test_a_dataset_of_python_objects_exceeds_a_bound_and_a_store_does_not() -> None:
    data = rows(100_000)
    train = Samples(data)
    with pytest.raises(
        AssertionError, match=r"`train\.samples`, with \d+ MB\. Cure: train\.samples = shmloader"
    ):
        check_growth(train, 10 * MB)
    shared = Samples(shmloader.share(data))
    check_growth(shared, 10 * MB)


def test_the_fixture_is_the_function(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['shmloader.monitor.testing']", encoding="utf-8")
    code = "def test_it(check_growth):\n    check_growth([1, 2, 3, 4], 50_000_000, num_workers=1)\n"
    (tmp_path / "test_it.py").write_text(code, encoding="utf-8")
    words = [*warm_python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "1 passed" in done.stdout, done.stdout


def test_loading_never_imports_monitor_profile_and_commands() -> None:
    code = (
        "import sys, shmloader\n"
        "list(shmloader.DataLoader(list(range(8)), num_workers=1, multiprocessing_context='fork'))\n"
        "never = tuple('shmloader.' + name for name in ('monitor', 'profiling', 'cli', 'slots.holders'))\n"
        "print([name for name in sys.modules if name.startswith(never)])"
    )
    done = subprocess.run([*warm_python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
