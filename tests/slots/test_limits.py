"""Limits of this host are read correctly, compared with limits that are really set."""

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_places import cgroup, entering, memory_cgroup, run_in

from shmloader import DataLoader, SharedMemoryExhausted
from shmloader.memory import limits

MIB = 2**20


@contextlib.contextmanager
def soft_limit(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_open_files_counts_descriptors_and_reads_the_limit() -> None:
    used, _ = limits.open_files()
    with soft_limit(resource.RLIMIT_NOFILE, 512), open(os.devnull), open(os.devnull):
        during = limits.open_files()
    assert used == len(os.listdir("/proc/self/fd")) - 1
    assert during == (used + 2, 512)


def test_open_files_tells_the_limit_where_no_descriptor_is_left_to_count_with() -> None:
    (used, _), held = limits.open_files(), contextlib.ExitStack()
    assert used
    with held, soft_limit(resource.RLIMIT_NOFILE, used + 20):
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        during = limits.open_files()
    assert during == (None, used + 20)


def test_cores_follow_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        cores = limits.cores()
    finally:
        os.sched_setaffinity(0, allowed)
    assert (cores.machine, cores.affinity, cores.usable) == (os.cpu_count(), 1, 1)


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (0.5, 1), (2.5, 2), (64.0, 8)])
def test_usable_cores_are_whole_and_at_least_one(quota: float | None, usable: int) -> None:
    assert limits.Cores(machine=16, affinity=8, quota=quota).usable == usable


@pytest.mark.parametrize(
    ("own", "launchers", "quota", "usable"),
    [
        (128, 128, None, 32),  # the whole machine
        (32, 32, None, 8),  # a job's part of it, or a container's
        (32, 128, None, 32),  # the launcher has bound each rank
        (128, 128, 32.0, 8),
        (2, 2, None, 1),
    ],
)
def test_ranks_share_the_cores_that_their_launcher_has_given_them_all(
    own: int, launchers: int, quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {0: own, os.getppid(): launchers}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(counts[pid])))
    monkeypatch.setattr(limits, "_cpu_quota", lambda folder: quota)
    monkeypatch.setattr(limits, "_cgroups", lambda controller, pid=None: [Path("/")])
    monkeypatch.setattr(limits, "_launchers_cores", limits._launchers_cores.__wrapped__)
    assert limits.cores().usable == usable


BIND = """
import os, sys
if sys.argv[1] == "bound":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["LOCAL_WORLD_SIZE"] = "4"
os.execvp(sys.argv[2], sys.argv[2:])
"""
RANKS = "from shmloader.memory import limits; print(limits.cores().ranks)"
IN_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a launcher cannot bind ranks to one core")
@pytest.mark.parametrize(("bound", "ranks"), [("bound", 1), ("together", 4)])
@pytest.mark.parametrize("between", ["nothing", "a shell", "the rank itself"])
def test_ranks_keep_cores_of_their_own_whatever_stands_between_them_and_the_launcher(
    between: str, bound: str, ranks: int
) -> None:
    rank = {
        "nothing": [sys.executable, "-c", RANKS],
        "a shell": ["bash", "-c", '"$@"; exit', "bash", sys.executable, "-c", RANKS],
        "the rank itself": [sys.executable, "-c", IN_CHILD, RANKS],
    }
    out = subprocess.check_output([sys.executable, "-c", BIND, bound, *rank[between]], text=True)
    assert int(out) == ranks


PROCESSOR_TIMES = """cpu  9000 900 900 9000 900 90 90 90 0 0
cpu0 100 10 10 5000 500 1 1 1 0 0
cpu1 200 20 20 5000 500 2 2 2 50 5
cpu10 400 40 40 5000 500 4 4 4 0 0
intr 1 2 3
"""


def test_busy_time_is_that_of_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(PROCESSOR_TIMES)
    monkeypatch.setattr(limits, "_PROCESSOR_TIMES", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 10})
    monkeypatch.setattr(limits, "_cgroups", lambda controller, pid=None: [])
    use = limits.processor_use()
    assert use.busy_s == pytest.approx(3 * (200 + 20 + 20 + 6) / os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize("shared", ["by a quota", "by ranks", "not"])
def test_what_others_use_is_unknown_where_this_process_has_a_part_of_its_cores_time(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = limits.Cores(8, 8, 2.0 if shared == "by a quota" else None, 8)
    monkeypatch.setattr(limits, "_cores", lambda affinity, quotas: cores)
    if shared == "by ranks":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    before = limits.processor_use()
    assert (before.busy_s is None) == (shared != "not")
    later = before._replace(at_s=before.at_s + 2.0, busy_s=before.busy_s and before.busy_s + 6.0)
    assert later.shares_since(before)["foreign_cores"] == (3.0 if shared == "not" else 0.0)


def test_what_others_use_is_unknown_since_a_moment_at_which_this_process_had_other_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time of a core that it had not then began with the machine."""
    monkeypatch.setattr(limits, "_cgroups", lambda controller, pid=None: [])
    before = limits.processor_use()
    assert before.busy_s is not None
    wider = before._replace(at_s=before.at_s + 2.0, busy_s=before.busy_s + 9e6, affinity=frozenset({1 << 20}))
    assert wider.shares_since(before)["foreign_cores"] == 0.0
    assert wider._replace(at_s=wider.at_s + 2.0).shares_since(wider)["foreign_cores"] == 0.0


def test_a_reading_of_processor_time_reads_each_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with DataLoader([1, 2, 3, 4], num_workers=1) as loader:
        list(loader)
        read: list[str] = []
        of_path = Path.read_text

        def counted(path: Path, *args: Any, **kwargs: Any) -> str:
            read.append(str(path))
            return of_path(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", counted)
        loader.statistics()
    assert "/proc/self/cgroup" in read
    assert len(read) == len(set(read))


def _ask(setup: str, expression: str) -> object:
    """Evaluate an expression in a new process, after a shell command."""
    script = f"import json; from shmloader.memory import limits; print(json.dumps({expression}))"
    done = run_in(setup, [sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_tightest_quota_of_nested_cgroups_counts() -> None:
    files = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    with cgroup("cpu", files, {"cpu.max": "150000 100000"}) as outer:
        inner = outer / "inner"
        inner.mkdir()
        try:
            assert _ask(entering(inner), "limits.cores().quota") == 1.5
        finally:
            inner.rmdir()


# The kernel's files, for the version that this machine does not have. "no quota" in both.
CPU_FILES = {
    "version 2": ({"cpu.max": "250000 100000\n"}, 2.5),
    "version 2, no quota": ({"cpu.max": "max 100000\n"}, None),
    "version 1": ({"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 0.5),
    "version 1, no quota": ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
    "no such controller": ({}, None),
}


@pytest.mark.parametrize("case", CPU_FILES)
def test_quotas_of_both_versions(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, quota = CPU_FILES[case]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(limits, "_cgroups", lambda controller, pid=None: [tmp_path])
    assert limits.cores().quota == quota


def test_the_smallest_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "inner", tmp_path / "outer", tmp_path / "outermost"]
    for folder, quota in zip(folders, ("300000", "150000", "max"), strict=True):
        folder.mkdir()
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(limits, "_cgroups", lambda controller, pid=None: folders)
    assert limits.cores().quota == 1.5


OOM_FILES = {
    "memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 7\noom_group_kill 0\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
}


@pytest.mark.parametrize("name", OOM_FILES)
def test_oom_kills_of_both_versions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text(OOM_FILES[name])
    empty = tmp_path / "leaf-without-the-controller"
    empty.mkdir()
    monkeypatch.setattr(limits, "_cgroups", lambda controller, pid=None: [empty, tmp_path])
    assert limits.oom_kills() == 7


def test_oom_kills_of_the_machine_where_there_are_no_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_cgroups", lambda controller, pid=None: [])

    def counted() -> int:
        words = Path("/proc/vmstat").read_text().split()
        if "oom_kill" not in words:
            pytest.skip("this kernel does not count them")
        return int(words[words.index("oom_kill") + 1])

    assert counted() <= limits.oom_kills() <= counted()


KILLS = """
import subprocess, sys
kills = [limits.oom_kills()]
victim = "open('/proc/self/oom_score_adj', 'w').write('1000'); bytearray(2**30)"
died = subprocess.run([sys.executable, "-c", victim]).returncode
kills += [limits.oom_kills()]
room = limits.memory_headroom()
"""


def test_a_memory_cgroup_bounds_the_headroom_and_counts_its_victims() -> None:
    with memory_cgroup(f"{512 * MIB}") as folder:
        script = (
            f"import json; from shmloader.memory import limits{KILLS}print(json.dumps([kills, died, room]))"
        )
        done = run_in(entering(folder), [sys.executable, "-c", script])
        assert done.returncode == 0, done.stderr
        kills, died, (available, limit, source) = json.loads(done.stdout)
        assert (kills, died) == ([0, 1], -9)
        assert limit == 512 * MIB
        assert 0 < available < 512 * MIB
        assert str(folder) in source


READS_A_FILE = """
import json, os, pathlib, sys
from shmloader.memory import limits
path, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
with path.open("wb", buffering=0) as file:
    for _ in range(320):
        file.write(bytes(1 << 20))
    os.fsync(file.fileno())
for _ in range(3):
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
stat = (folder / "memory.stat").read_text().split()
name = "total_active_file" if "total_active_file" in stat else "active_file"  # cgroups of version 1, or 2
active = int(stat[stat.index(name) + 1])
room = limits.memory_headroom()
kills = [limits.oom_kills()]
fd = os.memfd_create("taken")
os.posix_fallocate(fd, 0, 300 << 20)
print(json.dumps([active, room, [*kills, limits.oom_kills()]]))
"""


def test_pages_of_files_that_were_read_more_than_once_are_room_in_a_memory_cgroup(tmp_path: Path) -> None:
    with memory_cgroup(f"{512 * MIB}") as folder:
        script = [sys.executable, "-c", READS_A_FILE, str(tmp_path / "read"), str(folder)]
        done = run_in(entering(folder), script)
        (tmp_path / "read").unlink()
        assert done.returncode == 0, done.stderr
    active, (available, _, source), kills = json.loads(done.stdout)
    if active < 200 * MIB:
        pytest.skip(f"{tmp_path} is on a file system whose pages do not count: {active:,} bytes")
    assert str(folder) in source
    assert available > 300 * MIB
    assert kills == [0, 0]  # so it was there


def test_after_a_refusal_the_next_request_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is refused room in advance asks for less at once, which may also be too much."""
    monkeypatch.setattr(limits, "memory_headroom", lambda: limits.Headroom(MIB, 1 << 30, "a test"))
    monkeypatch.setattr(limits, "_unchecked_nbytes", limits.SURE_NBYTES - 1)
    for nbytes in (3 * MIB, 2 * MIB):
        with pytest.raises(SharedMemoryExhausted, match=f"{nbytes:,} bytes, but only 1,048,576 of"):
            limits.check_headroom(nbytes, f"a test needs {nbytes:,} bytes")


def test_memory_that_is_free_and_refused_is_told_so() -> None:
    room = limits.Headroom(5 << 30, 8 << 30, "a test")
    error = limits.exhausted("reserving 1 MiB failed: No space left on device", MIB, room, code=errno.ENOSPC)
    assert "failed: No space left on device, though 5,368,709,120 of 8,589,934,592 bytes" in str(error)
    assert "(sysctl vm.overcommit_memory)" in str(error)
    error = limits.exhausted(
        "reserving 6 GiB failed: No space left on device", 6 << 30, room, code=errno.ENOSPC
    )
    assert ", but only 5,368,709,120 of 8,589,934,592 bytes" in str(error)
    assert "vm.overcommit_memory" not in str(error)
