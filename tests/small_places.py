"""Places with less room than this machine: cgroups and mount namespaces, made for one test."""

import contextlib
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


def _hierarchy(controller: str) -> tuple[Path, int]:
    """The folder for cgroups of a controller, and the version."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        mount = Path(fields.split()[4])
        if kind == "cgroup" and controller in options.split(","):
            return mount, 1
        if kind == "cgroup2" and controller in (mount / "cgroup.controllers").read_text().split():
            return mount, 2
    pytest.skip(f"no {controller} cgroups here")


@contextlib.contextmanager
def cgroup(controller: str, version_1: dict[str, str], version_2: dict[str, str]) -> Iterator[Path]:
    """A new cgroup with these files written, of the version that this machine has."""
    mount, version = _hierarchy(controller)
    folder = mount / f"shmloader-test-{uuid.uuid4().hex[:8]}"
    try:
        if version == 2:
            (mount / "cgroup.subtree_control").write_text(f"+{controller}")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a {controller} cgroup: {error}")
    try:
        for name, value in (version_1 if version == 1 else version_2).items():
            try:
                (folder / name).write_text(value)
            except OSError as error:
                pytest.skip(f"cannot set {name}: {error}")
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            folder.rmdir()
        except OSError:  # a process in it has ended and was not reaped yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextlib.contextmanager
def memory_cgroup(limit: str) -> Iterator[Path]:
    """A memory cgroup with a limit such as ``64M``."""
    with cgroup("memory", {"memory.limit_in_bytes": limit}, {"memory.max": limit}) as folder:
        yield folder


def run_in(setup: str, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell that has run ``setup`` before, in the same process."""
    return subprocess.run(
        ["bash", "-c", f"{setup} && exec {shlex.join(command)}"],
        check=False,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def entering(folder: Path) -> str:
    """The shell command that moves the shell into a cgroup."""
    return f"echo $$ > {folder}/cgroup.procs"


def with_shm(size: str | None) -> list[str]:
    """The beginning of a command that runs in a mount namespace with a small /dev/shm, or none."""
    script = "while umount -l /dev/shm; do :; done 2>/dev/null; "
    if size is not None:
        script += f"mount -t tmpfs -o size={size} none /dev/shm && "
    attempt = ["unshare", "-m", "bash", "-c", f"{script} true"]
    if subprocess.run(attempt, check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    return ["unshare", "-m", "bash", "-c", script + 'exec "$@"', "place"]
