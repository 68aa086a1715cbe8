"""Processes that share an object on their host, functions that build it, and the servers that hold it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from shmloader.store import host_server
from shmloader.store.host import share_on_host

FORK = multiprocessing.get_context("fork")
ROWS = [{"path": f"image {number}", "label": number} for number in range(5000)]


class Building:
    """Builds by any function; all have the same fingerprint, so ranks may build differently."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    def __call__(self) -> Any:
        return self.build()


class Rank:
    """A process that calls share_on_host, reports its result, and stays until it is told to end."""

    def __init__(self, name: str, build: Callable[[], Any], **arguments: Any) -> None:
        self._ours, theirs = FORK.Pipe()
        self.process = FORK.Process(target=self._run, args=(theirs, name, build, arguments))
        self.process.start()
        theirs.close()

    def _run(self, pipe: Any, name: str, build: Callable[[], Any], arguments: dict[str, Any]) -> None:
        self._ours.close()
        built: list[bool] = []

        def counted() -> Any:
            built.append(True)
            pipe.send("building")
            return build()

        try:
            shared = share_on_host(Building(counted), name=name, **arguments)
        except Exception as error:
            pipe.send((error, getattr(error, "__notes__", [])))
        else:
            inode = os.fstat(shared.buffer.fd).st_ino
            pipe.send({"built": bool(built), "inode": inode, "equal": shared == ROWS})
        pipe.recv()

    def hear(self, timeout_s: float = 60) -> Any:
        """The rank's next message; "building" comes first from the rank that builds."""
        assert self._ours.poll(timeout_s), "the rank says nothing"
        return self._ours.recv()

    def result(self) -> Any:
        """The rank's result."""
        while (heard := self.hear()) == "building":
            pass
        return heard

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._ours.send("end")
        self._ours.close()
        self.process.join()
        self.process.close()


def build() -> Any:
    return ROWS


def build_slowly() -> Any:
    time.sleep(0.3)
    return ROWS


def build_never() -> Any:
    time.sleep(600)


def servers() -> list[psutil.Process]:
    """The serving processes that belong to this test run."""
    script = str(host_server.__file__)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if script in process.cmdline() and process.environ().get(f"SHMLOADER_TEST_RUN_{os.getpid()}"):
                found.append(process)
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


class Box:
    """An object with one attribute."""

    def __init__(self, content: Any) -> None:
        self.content = content
