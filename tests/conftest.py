"""Fixtures for every test: the leak guard, and the start methods and cores that tests run under.

The leak guard checks one promise in the whole suite: everything that a test starts, opens or allocates
is gone when the test ends. It compares the process before and after, and names what is left.
`project/test_leak_guard.py` runs this file against tests that do leak.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from warm_python.cheap_forks import collapse_pages

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Ignored in the background of a shell; the programs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Python 3.14's default is forkserver, whose workers import what they unpickle. Tests that name no method
# have datasets of their own, which only forked workers can import; `start_method` tries the others.
multiprocessing.set_start_method("fork")

# Without this every worker of the fork server imports these anew, which takes seconds. Spawned workers do.
multiprocessing.set_forkserver_preload(["torch.utils.data", "shmloader"])


# Tests that start many programs or confine them take minutes: SHMLOADER_LONG=1 runs them (`make test-all`).
LONG = os.environ.get("SHMLOADER_LONG") == "1"
IN_CI = LONG or "CI" in os.environ
# Of tests that name no number, a sample of the random runs; each may take as long as a busy machine needs.
_sample = {} if LONG else {"max_examples": 30 if IN_CI else 10}
settings.register_profile("sample", deadline=None, suppress_health_check=[HealthCheck.too_slow], **_sample)
settings.load_profile("sample")
LONG_TIMEOUT_S = 1800  # of a test with all its random runs
LONG_FILES = frozenset(
    """
    robustness/test_interrupt.py robustness/test_main_death.py robustness/test_small_machine.py
    robustness/test_soak.py robustness/test_fork_with_threads.py
    bench/test_benchmark_memory.py bench/test_benchmarks.py
    cli/test_demo.py cli/test_doctor.py project/test_leak_guard.py
    store/test_store_host.py store/test_store_host_refusals.py
    store/test_store_processes.py store/test_store_buffer.py
    """.split()
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long files and tests, unless the file is named or all are asked for."""
    here = Path(__file__).parent
    named = {Path(argument.split("::")[0]).resolve() for argument in config.args}
    if LONG:
        for item in items:
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        return
    rest = [
        item
        for item in items
        if item.path in named
        or not (os.path.relpath(item.path, here) in LONG_FILES or item.get_closest_marker("long"))
    ]
    products: dict[str, list[pytest.Function]] = {}
    for item in rest:
        if item.path not in named and item.get_closest_marker("each_value"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for name, product in products.items() for item in product} - {
        item for name, product in products.items() for item in _with_each_value(product, name)
    }
    if not IN_CI:
        left_out.update(
            _left_to_ci([item for item in rest if item.path not in named and item not in left_out])
        )
    kept = [item for item in rest if item not in left_out]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept


def _left_to_ci(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of heavy tests beyond those that run everywhere; always the same."""
    heavy: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("in_ci"):
            heavy.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in heavy.items():
        random.Random(name).shuffle(cases)
        marker = cases[0].get_closest_marker("in_ci")
        yield from cases[marker.args[0] if marker and marker.args else 0 :]


def _with_each_value(product: list[pytest.Function], seed: str) -> Iterator[pytest.Function]:
    """So few of a test's combinations that each value of each parameter is in one; always the same."""
    values = {item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in product}
    left = set().union(*values.values())
    random.Random(seed).shuffle(product)
    while left:
        best = max(product, key=lambda item: len(values[item] & left))
        left -= values[best]
        yield best


def pytest_collection_finish() -> None:
    """Freeze modules and tests, so that the many garbage collections of tests and guard leave them out.

    Their memory is most of this process, and each test's workers are forks of it.
    """
    gc.collect()
    gc.freeze()
    collapse_pages()


# Seconds that a process, thread or descriptor may take to go away after its test, also on a loaded machine.
GRACE_S = float(os.environ.get("SHMLOADER_TEST_GRACE_S", "20"))

SHM_DIR = Path("/dev/shm")
SHM_MAPPED = (b"/memfd:", b"%b/" % os.fsencode(SHM_DIR))  # in lines of /proc/PID/maps
TORCH_NAME = re.compile(r"torch_(\d+)_")  # how torch names a shared file, with its maker's pid

# Every process started from here inherits this variable, which is how the guard knows a process
# whose parent has died. The pid keeps a pytest run inside a test apart from the run around it.
MARK = f"SHMLOADER_TEST_RUN_{os.getpid()}"
os.environ[MARK] = "1"

# Files that a library opens when it first needs them and then keeps until the process ends.
LAZY_FILES = (
    "/dev/urandom",  # Python and C libraries keep one descriptor where getrandom() is missing
    "/dev/nvidia",  # the CUDA driver keeps its devices open from the first call on
    "/dev/shm/pym-",  # multiprocessing's heap for Value and Array keeps its first arena for reuse
    "/dev/shm/sem.",  # the page of a semaphore: tqdm keeps one lock for all progress bars
)
# Threads of the same kind. tqdm's monitor serves all progress bars from the first one on.
LAZY_THREADS = ("TMonitor",)

# In the command lines of processes that live as long as the interpreter.
OWN_PROCESSES = (
    "from multiprocessing.resource_tracker import main",
    "from multiprocessing.forkserver import main",
    "from template import next_program",
)

_passed = pytest.StashKey[bool]()
_latest = pytest.StashKey["Snapshot | None"]()  # of the end of the test before, if it left nothing

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000  # <sched.h>, <sys/mount.h>


def _take_own_shm_dir() -> None:
    """Give a process of pytest-xdist a /dev/shm of its own: the guard then sees no entry of the others.

    Only root may. Without, an entry that another process makes and removes may be blamed on a test.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        libc.mount(b"tmpfs", bytes(SHM_DIR), b"tmpfs", 0, b"size=50%,mode=1777")


if "PYTEST_XDIST_WORKER" in os.environ:
    _take_own_shm_dir()


@dataclass(frozen=True)
class Snapshot:
    """Everything that this process holds at one moment.

    Attributes:
        pids: All processes of the machine.
        descriptors: Target of each open descriptor: path or kind, device and inode.
        shm_entries: The names in /dev/shm.
        shm_mappings: Mapped shared memory, by path and inode: it outlives descriptor and name.
        threads: The live threads, as objects, since idents are used again.
    """

    pids: frozenset[int]
    descriptors: dict[int, tuple[str, int, int]]
    shm_entries: frozenset[str]
    shm_mappings: frozenset[tuple[str, int]]
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls) -> "Snapshot":
        return cls(
            pids=_pids(),
            descriptors=_descriptors(),
            shm_entries=_shm_entries(),
            shm_mappings=_shm_mappings(),
            threads=frozenset(threading.enumerate()),
        )


def _pids() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal())


def _processes(known: frozenset[int] = frozenset()) -> frozenset[psutil.Process]:
    """Our descendants and marked orphans, except `known` pids: the guard looks at new ones only."""
    me = os.getpid()
    began = _origin(me)[1]  # an older process was not started from here
    pids = _pids() - known - {me}
    ours = {pid for pid in pids if _descends(pid, me) or (_origin(pid)[1] >= began and _is_marked(pid))}
    found = [process for pid in ours if (process := _process(pid))]
    return frozenset(process for process in found if not _is_interpreters_own(process, me))


def _origin(pid: int) -> tuple[int, int]:
    """A process's parent and start time, in a third of psutil's time; zeros if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        # pid (name) state parent ... start, the 22nd field: the name may have blanks and brackets
        fields = file.read().rpartition(b")")[2].split(maxsplit=20)
        return int(fields[1]), int(fields[19])
    return 0, 0


def _descends(pid: int, ancestor: int) -> bool:
    while pid and pid != ancestor:
        pid = _origin(pid)[0]
    return pid == ancestor


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _is_marked(pid: int) -> bool:
    # A process that cannot be read is gone, or not ours.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return f"{MARK}=".encode() in file.read()
    return False


def _is_interpreters_own(process: psutil.Process, parent: int) -> bool:
    """Whether a process is one that lives as long as the interpreter, and not as a test.

    They are the resource tracker, the fork server and the template of `warm_python`. Only a direct child can
    be one of them: what these processes fork has the same command line, but counts as a leak; so do helpers
    of another interpreter that a test killed.
    """
    try:
        if process.ppid() != parent:
            return False
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(start in command for start in OWN_PROCESSES)


def _descriptors() -> dict[int, tuple[str, int, int]]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target, status = os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name))
        except OSError:  # the descriptor that listed the directory
            continue
        found[int(name)] = (target, status.st_dev, status.st_ino)
    return found


def _shm_entries() -> frozenset[str]:
    return frozenset(os.listdir(SHM_DIR)) if SHM_DIR.is_dir() else frozenset()


def _shm_mappings() -> frozenset[tuple[str, int]]:
    """The memfds and /dev/shm files that this process has mapped.

    A line of the file is: address, permissions, offset, device, inode and, after blanks, the path.
    """
    maps = Path("/proc/self/maps").read_bytes()  # thousands of lines, and mostly none of them is one
    if not any(part in maps for part in SHM_MAPPED):
        return frozenset()
    lines = [line for line in maps.splitlines() if any(part in line for part in SHM_MAPPED)]
    fields = [os.fsdecode(line).split(maxsplit=5) for line in lines]
    return frozenset((field[5], int(field[4])) for field in fields)


def _helper_descriptors() -> set[int | None]:
    """The pipes that keep the resource tracker and the fork server alive, one write end each."""
    tracker, server = resource_tracker._resource_tracker, forkserver._forkserver
    return {tracker._fd, server._forkserver_alive_fd}


def _strangers_entries(names: frozenset[str]) -> set[str]:
    """The /dev/shm entries among `names` that belong to a process that is not ours.

    Another program on the machine may make an entry while a test runs, and blaming the test would
    make the suite fail at random. An entry is another's if torch named it after the pid of a living
    process that is not ours, or if such a process has it open or mapped.
    """
    ours = {process.pid for process in _processes()} | {os.getpid()}
    strangers = set(psutil.pids()) - ours
    held = set()
    for pid in strangers:
        try:
            held.update(str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # gone meanwhile, or not ours to read
            continue
        held.update(line.split(maxsplit=5)[-1] for line in maps.splitlines())
    named = {name for name in names if (m := TORCH_NAME.match(name)) and int(m[1]) in strangers}
    return named | {name for name in names if str(SHM_DIR / name) in held}


def find_leaks(before: Snapshot, now: Snapshot, new_entries: frozenset[str]) -> list[str]:
    """Describe everything that exists now and did not when `before` was taken.

    Args:
        before: The snapshot from before the test.
        now: The one from after it.
        new_entries: The /dev/shm entries that may be the test's: those that exist at its end. Later ones are
            another program's.
    """
    leaks = [f"process {_describe(process)}" for process in _processes(before.pids)]
    leaks += [
        f"thread {thread.name!r} ({type(thread).__name__})"
        for thread in now.threads - before.threads
        if thread.is_alive() and type(thread).__name__ not in LAZY_THREADS
    ]
    helpers = _helper_descriptors()
    leaks += [
        f"descriptor {fd} -> {entry[0]}"
        for fd, entry in now.descriptors.items()
        if before.descriptors.get(fd) != entry and fd not in helpers and not entry[0].startswith(LAZY_FILES)
    ]
    if left := new_entries & now.shm_entries:
        leaks += [f"shared memory {SHM_DIR / name}" for name in left - _strangers_entries(left)]
    leaks += [
        f"mapping {path} (inode {inode})"
        for path, inode in now.shm_mappings - before.shm_mappings
        if not path.startswith(LAZY_FILES)
    ]
    return sorted(leaks)


def _describe(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:  # its command line is gone
            return f"{process.pid} (zombie: it ended and nobody joined it): {process.name()}"
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}"


def wait_for_no_leaks(before: Snapshot) -> tuple[list[str], Snapshot]:
    """Return the leaks that are still there when the grace has run out, and the last snapshot."""
    deadline = time.monotonic() + GRACE_S
    new_entries = _shm_entries() - before.shm_entries
    while leaks := find_leaks(before, now := Snapshot.take(), new_entries):
        if time.monotonic() > deadline:
            break
        gc.collect()  # closes what reference cycles hold; too slow to do always
        time.sleep(0.02)
    return leaks, now


def _kill_leaked(before: Snapshot) -> None:
    """End the processes that a test left, so that they cannot disturb later tests."""
    leaked = _processes(before.pids)
    for process in leaked:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(leaked, timeout=GRACE_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[_passed] = report.passed
    return report


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    if fixturedef.scope != "function":  # what it starts between two tests is there before the next one
        request.config.stash[_latest] = None


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor or /dev/shm entry behind.

    It is set up before all other fixtures of a test and torn down after them, so what a fixture
    closes is not a leak. A test that has already failed is not examined: its traceback keeps its
    locals alive.
    """
    stash = request.config.stash
    before = stash.get(_latest, None) or Snapshot.take()
    stash[_latest] = None
    yield
    if not request.node.stash.get(_passed, False):
        return
    leaks, now = wait_for_no_leaks(before)
    if leaks:
        _kill_leaked(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)
    stash[_latest] = now


@pytest.fixture(scope="session")
def warm_helpers() -> None:
    """Start the interpreter's resource tracker and fork server once, outside any one test.

    Fork-server workers inherit the environment as it is now, not as a test sets it later.
    """
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture
def late_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a fork server that tells exit codes late: a busy machine may let it sleep for seconds."""
    monkeypatch.setattr("shmloader.workers.deaths._DEATH_S", 30.0)
    monkeypatch.setattr("shmloader.workers.processes._EXIT_CODE_S", 30.0)


@pytest.fixture(params=["fork", pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def start_method(request: pytest.FixtureRequest, warm_helpers: None) -> str:
    """Each way of starting a worker that this platform has.

    A spawned worker imports torch anew, and has its dataset as one of the fork server has it. `make test`
    spawns where a test names all three as parameters of this fixture: batches, starting and descriptors.
    """
    if request.param not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {request.param} here")
    return request.param


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that claims to have three cores: sleeping workers need none."""
    from shmloader.memory.limits import Cores

    monkeypatch.setattr("shmloader.order.auto.cores", lambda: Cores(3, 3, None))
