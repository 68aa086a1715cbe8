"""Hosts that are sets of namespaces: network, host name, IPC, mounts, with a /dev/shm of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

HOSTS = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}

# $1 is the host's name, $2 the file with the names of all.
HOLD = """
mount -t tmpfs shm /dev/shm && mount --bind "$2" /etc/hosts && hostname "$1" && ip link set lo up || exit
echo ready
exec sleep infinity
"""


class Host:
    """A set of namespaces, which live as long as a process that holds them."""

    def __init__(self, name: str, names: Path) -> None:
        self.name = name
        namespaces = ["--net", "--uts", "--ipc", "--mount"]
        self.holder = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", HOLD, "hold", name, str(names)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._enter = ["nsenter", f"--target={self.holder.pid}", *namespaces]

    def is_ready(self) -> bool:
        assert self.holder.stdout is not None
        return self.holder.stdout.readline() == "ready\n"

    def start(self, command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (folder / f"{self.name}.log").open("wb") as log:
            return subprocess.Popen(
                [*self._enter, f"--wd={folder}", *command],
                env=os.environ | environment,
                stdout=log,
                stderr=log,
            )

    def output(self, *command: str) -> str:
        return subprocess.run([*self._enter, *command], check=True, capture_output=True, text=True).stdout

    def left(self) -> list[str]:
        """Leftovers: processes except the holder, entries of /dev/shm, and sockets that shmloader made."""
        sockets = [line for line in self.output("cat", "/proc/net/unix").splitlines() if "shmloader" in line]
        return [*map(str, self._processes()), *self.output("ls", "-A", "/dev/shm").split(), *sockets]

    def _processes(self) -> Iterator[psutil.Process]:
        """Processes in the namespaces, except the holder."""
        network = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if (
                    process.pid != self.holder.pid
                    and os.stat(f"/proc/{process.pid}/ns/net").st_ino == network
                ):
                    yield process

    def end(self) -> None:
        """End it, and everything that a failed job left in it."""
        for process in [*self._processes(), self.holder]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.holder.communicate()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.05)
    return condition()
