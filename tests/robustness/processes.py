"""Functions to run programs in new processes, and to find their workers and leftovers."""

import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from warm_python import STRICT, warm_python

TESTS = Path(__file__).absolute().parents[1]

LONG = os.environ.get("SHMLOADER_LONG") == "1"
"""Whether tests are repeated as often as docs/robustness.md says, if they can be."""

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    "PYTHON_COLORS": "0",  # Python 3.13 colours tracebacks on a terminal
}
"""For programs that import this package."""

HELPERS = ("from multiprocessing.resource_tracker import", "from multiprocessing.forkserver import")
TEMPLATE = "from template import next_program"
"""In the command lines of the template of `warm_python`, and of the programs that it forks."""


def python(code: str, *arguments: str, timeout_s: float = 60.0, wrap: tuple[str, ...] = ()) -> str:
    """Run a program in a new process, which must succeed, and return its output.

    Args:
        code: The program, with any indentation.
        arguments: Its ``sys.argv[1:]``.
        timeout_s: Most seconds it may take.
        wrap: A command that runs the program in an interpreter of its own, as ``("prlimit", "--nofile=64")``.
    """
    command = [
        *((*wrap, sys.executable) if wrap else warm_python()),
        *STRICT,
        "-c",
        textwrap.dedent(code),
        *arguments,
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert result.stderr == ""
    return result.stdout


def start_python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a program in a new session; its output is readable line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def is_helper(process: psutil.Process) -> bool:
    """Whether a process is an interpreter's resource tracker or fork server, or this one's template."""
    try:
        command = " ".join(process.cmdline())
        helps = any(helper in command for helper in HELPERS)
        helps = helps or (TEMPLATE in command and process.ppid() == os.getpid())
        return helps and not _is_forked(process)
    except psutil.Error:
        return False


def _is_forked(process: psutil.Process) -> bool:
    # A fork server's workers and a template's programs have its command line.
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def workers_of(pid: int) -> list[psutil.Process]:
    """Descendants of a process, without its interpreter's helpers."""
    try:
        return [p for p in psutil.Process(pid).children(recursive=True) if not is_helper(p)]
    except psutil.NoSuchProcess:
        return []


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; a zombie has, although its parent has not waited for it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def has_ended(pid: int) -> bool:
    """Whether there is no process of a pid, or only a zombie."""
    try:
        return is_gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> tuple[float, list[psutil.Process]]:
    """Wait until processes have ended: the seconds it took, and those that are still there."""
    began = time.monotonic()
    left = list(processes)
    while left := [process for process in left if not is_gone(process)]:
        if time.monotonic() - began > timeout_s:
            break
        time.sleep(0.005)
    return time.monotonic() - began, left


def descriptors(pid: int | str = "self") -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def mappings(pid: int | str = "self") -> int:
    """Memory mappings of a process."""
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def pss_nbytes(pid: int | str = "self") -> int:
    """Memory of a process: private bytes, and its share of shared ones.

    Memory of files does not count: the share of libraries grows when unrelated programs end.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024


def shared_nbytes() -> int:
    """Shared memory of the whole machine: memfds and /dev/shm."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) * 1024


def assert_dies_with_its_last_reference(loader: Any, batches: int) -> None:
    """An iterator ends its workers when it is dropped after some batches, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        workers = iterator._workers
        del iterator
        assert not workers[0].is_alive()
    finally:
        gc.enable()
