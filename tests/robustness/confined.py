"""Small machines: commands that run a program with little memory, /dev/shm, descriptors or address space.

Each is a tuple of words to put before a command. Run as a program, this runs the whole test suite with a
16 MB /dev/shm and with 64 descriptors: ``python -m robustness.confined``.
"""

import argparse
import contextlib
import errno
import importlib.util
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from robustness.processes import TESTS

SMALL_SHM = (
    "unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh"
)  # fmt: skip
"""A mount namespace with a /dev/shm of 16 MB. Needs root."""

NO_PROC = (
    *("unshare", "-m", "sh", "-c"),
    'cores=$(cat /proc/cpuinfo) && mount -t tmpfs tmpfs /proc && echo "$cores" > /proc/cpuinfo && exec "$@"',
    "sh",
)
"""A mount namespace with nothing in /proc but the cores, without which torch prints an error. Needs root."""

FEW_DESCRIPTORS = ("prlimit", "--nofile=64:1024", "--")
"""At most 64 open files. A program may allow itself more, as tests do while torch's own loader runs."""


_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def works(wrap: tuple[str, ...]) -> bool:
    """Whether a command of this module can be run here."""
    with contextlib.suppress(OSError):
        return subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode == 0
    return False


class MemoryCgroup(NamedTuple):
    """A memory cgroup of our own, version 1 or 2.

    Attributes:
        folder: Where it is mounted.
        limit_name: The file of its limit.
        wrap: Runs a command in it.
    """

    folder: Path
    limit_name: str
    wrap: tuple[str, ...]

    def limit(self, nbytes: int) -> None:
        """Change its limit of memory."""
        (self.folder / self.limit_name).write_text(str(nbytes))

    def oom_kills(self) -> int:
        """The number of processes that the kernel has killed in it."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                lines = (self.folder / name).read_text().splitlines()
                return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        raise LookupError(f"{self.folder} counts no kills")


def _parent_cgroup() -> tuple[Path, str]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
    pytest.skip("this process has no memory cgroup")


def read_libraries() -> None:
    """Read the libraries that programs import into the page cache.

    The first program to read a page is charged for it. In a cgroup that may be 100 MB and more, or nothing if
    the libraries were read lately.
    """
    for name in ("torch", "numpy", "pyarrow"):
        (folder,) = importlib.util.find_spec(name).submodule_search_locations  # type: ignore[union-attr, misc]
        for path in Path(folder).parent.glob(f"{name}*/**/*"):
            if path.suffix == ".pyc" or ".so" in path.suffixes:
                path.read_bytes()


@contextlib.contextmanager
def memory_cgroup(limit_nbytes: int) -> Iterator[MemoryCgroup]:
    """Make a memory cgroup below this process's own; its programs find torch's libraries in memory.

    Where this process has none, or may not make one, the test is skipped.
    """
    try:
        parent, limit_name = _parent_cgroup()
        folder = parent / f"shmloader-test-{secrets.token_hex(4)}"
        folder.mkdir()
    except OSError as error:
        if error.errno not in _NOT_ALLOWED:
            raise
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (folder / limit_name).write_text(str(limit_nbytes))
        except OSError as error:
            if error.errno not in _NOT_ALLOWED:
                raise
            pytest.skip(f"a memory cgroup can have no limit here: {error}")
        read_libraries()
        enter = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
        yield MemoryCgroup(folder, limit_name, ("sh", "-c", enter, str(folder)))
    finally:
        deadline = time.monotonic() + 60
        while True:
            try:
                folder.rmdir()
                break
            except OSError:  # a killed process is still being removed
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def main() -> int:
    """Run the suite, or what pytest arguments select, once per confinement; exit status 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pytest", nargs="*", help="arguments for pytest instead of the whole suite")
    arguments = parser.parse_args()
    failed = False
    for name, wrap in (("a 16 MB /dev/shm", SMALL_SHM), ("64 descriptors", FEW_DESCRIPTORS)):
        print(f"--- the suite with {name}", flush=True)
        command = [*wrap, sys.executable, "-m", "pytest", "-q", *(arguments.pytest or [str(TESTS)])]
        failed |= subprocess.run(command, check=False, cwd=TESTS.parent, env=os.environ).returncode != 0
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
