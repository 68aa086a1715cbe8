"""The leak guard of conftest.py fails tests that leak, and no others.

Each case runs a small test file under a copy of the real conftest.py, in its own pytest process.
"""

import os
import textwrap
import threading
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8")

# Each body leaks one thing. The names in `_kept` live as long as the inner pytest does.
LEAKS = {
    "child": (
        "_kept.append(subprocess.Popen(['sleep', '60']))",
        "process * sleep 60",
    ),
    "zombie": (
        "_ended(['true'])",
        "process * (zombie: *): true",
    ),
    "forked_child": (
        "_start_worker('fork')",
        "process *",
    ),
    "forkserver_child": (
        "_start_worker('forkserver')",
        "process *from multiprocessing.forkserver import main*",
    ),
    "orphan": (
        "subprocess.run(['sh', '-c', 'sleep 60 >/dev/null 2>&1 &'], check=True)",
        "process * sleep 60",
    ),
    "descriptor": (
        "os.open('/proc/self/status', os.O_RDONLY)",
        "descriptor * -> /proc/*/status",
    ),
    "reused_descriptor_number": (
        "fd = os.open('/proc/self/status', os.O_RDONLY); os.dup2(fd, _early); os.close(fd)",
        "descriptor * -> /proc/*/status",
    ),
    "memfd": (
        "os.memfd_create('planted')",
        "descriptor * -> /memfd:planted (deleted)",
    ),
    "mapping_without_descriptor": (
        "_map_and_close(os.memfd_create('planted'))",
        "mapping /memfd:planted (deleted) *",
    ),
    "shm_entry": (
        "pathlib.Path(_shm_name).write_bytes(b'x')",
        "shared memory /dev/shm/shmloader-planted-*",
    ),
    "thread": (
        "threading.Thread(target=_stop.wait, daemon=True, name='planted').start()",
        "thread 'planted' (Thread)",
    ),
}

HEADER = """
import atexit, ctypes, gc, mmap, multiprocessing, os, pathlib, subprocess, sys, threading, time
import pytest
_kept, _stop = [], threading.Event()
_early = os.open("/dev/null", os.O_RDONLY)
_shm_name = f"/dev/shm/shmloader-planted-{os.getpid()}"
atexit.register(lambda: pathlib.Path(_shm_name).unlink(missing_ok=True))
_libc = ctypes.CDLL(None)

def _map_and_close(fd):
    os.ftruncate(fd, 4096)
    assert _libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0) != -1
    os.close(fd)

def _ended(command):
    _kept.append(subprocess.Popen(command))
    os.waitid(os.P_PID, _kept[-1].pid, os.WEXITED | os.WNOWAIT)

def _start_worker(method):
    _kept.append(multiprocessing.get_context(method).Process(target=time.sleep, args=(60,)))
    _kept[-1].start()
"""


@pytest.fixture
def guarded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run a test file under the guard and return how it went."""
    monkeypatch.setenv("SHMLOADER_TEST_GRACE_S", "3")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the test
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # which would give it another /dev/shm than ours
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of what the conftest imports
    pytester.makeconftest(CONFTEST)

    def run(tests: str) -> pytest.RunResult:
        pytester.makepyfile(HEADER + textwrap.dedent(tests))
        # A process that was left would hold the pipes open, and this would wait for it.
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=280)

    return run


@pytest.mark.parametrize("leak", LEAKS)
def test_what_a_test_leaves_behind_fails_it(guarded, leak: str) -> None:
    body, message = LEAKS[leak]
    result = guarded(f"def test_leaks():\n    {body}\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["the test left behind:", f"  {message}"])


def test_only_the_test_that_leaks_is_blamed(guarded) -> None:
    result = guarded("""
        def test_before(): pass
        def test_leaks(): os.open("/proc/self/status", os.O_RDONLY)
        def test_after(): pass
    """)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["ERROR *::test_leaks*"])


def test_a_leaked_process_is_ended(guarded) -> None:
    result = guarded("""
        def test_leaks(): _kept.append(subprocess.Popen(["sleep", "60"]))
        def test_after(): assert not pathlib.Path(f"/proc/{_kept[0].pid}").exists()
    """)
    result.assert_outcomes(passed=2, errors=1)


def test_clean_tests_pass(guarded) -> None:
    result = guarded("""
        def test_nothing(): pass

        def test_everything_is_put_back(tmp_path):
            subprocess.run(["true"], check=True)
            with open(tmp_path / "file", "w"): pass
            thread = threading.Thread(target=time.sleep, args=(0.01,))
            thread.start()
            thread.join()
            pathlib.Path(_shm_name).write_bytes(b"x")
            pathlib.Path(_shm_name).unlink()
            memory = mmap.mmap(-1, 4096)
            memory.close()

        @pytest.fixture
        def descriptor():
            fd = os.open("/proc/self/status", os.O_RDONLY)
            yield fd
            os.close(fd)

        def test_a_fixture_puts_it_back(descriptor): pass

        def test_it_goes_within_the_grace():
            threading.Thread(target=time.sleep, args=(0.2,)).start()
    """)
    result.assert_outcomes(passed=4)


def test_what_a_wider_fixture_keeps_between_two_tests_is_no_leak(guarded) -> None:
    result = guarded("""
        def test_before(): pass

        @pytest.fixture(scope="module")
        def kept():
            fd = os.open("/proc/self/status", os.O_RDONLY)
            yield fd
            os.close(fd)

        def test_with_it(kept): pass
        def test_leaks(kept): os.open("/proc/self/status", os.O_RDONLY)
    """)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["ERROR *::test_leaks*"])


def test_garbage_in_a_cycle_is_no_leak(guarded) -> None:
    result = guarded("""
        class Holder:
            def __init__(self):
                self.me, self.fd = self, os.open("/proc/self/status", os.O_RDONLY)
            def __del__(self):
                os.close(self.fd)

        def test_holds_a_descriptor_in_a_cycle():
            gc.disable()
            Holder()
    """)
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_joined_workers_and_the_interpreters_helpers_are_no_leak(guarded, method: str) -> None:
    result = guarded(f"""
        def test_workers():
            context = multiprocessing.get_context("{method}")
            value = context.Value("i", 0)
            workers = [context.Process(target=time.sleep, args=(0,)) for _ in range(2)]
            for worker in workers: worker.start()
            for worker in workers: worker.join()
            assert [worker.exitcode for worker in workers] == [0, 0]
    """)
    result.assert_outcomes(passed=1)


def test_shared_memory_of_another_program_is_no_leak(guarded, pytester: pytest.Pytester) -> None:
    """The other program is this process, which makes two entries while the inner test runs."""
    held = Path(f"/dev/shm/shmloader-stranger-{os.getpid()}")
    named = Path(f"/dev/shm/torch_{os.getpid()}_shmloader_stranger")
    asked, done = pytester.path / "asked", threading.Event()

    def stranger() -> None:
        while not asked.exists() and not done.wait(0.01):
            pass
        named.touch()
        with held.open("wb"):
            done.wait()
        held.unlink()
        named.unlink()

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        result = guarded(f"""
            def test_during_which_a_stranger_makes_entries():
                pathlib.Path({str(asked)!r}).touch()
                while not pathlib.Path({str(held)!r}).exists(): time.sleep(0.01)
        """)
    finally:
        done.set()
        thread.join()
    result.assert_outcomes(passed=1)


def test_a_test_that_failed_is_not_blamed_twice(guarded) -> None:
    result = guarded("""
        def test_fails_with_an_open_file():
            kept = os.open("/proc/self/status", os.O_RDONLY)
            assert not kept
    """)
    result.assert_outcomes(failed=1)
