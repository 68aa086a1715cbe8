"""What a worker that does not answer is doing: its Python stack, asked for by a signal.

The worker's answer is written by ``faulthandler``, which needs neither the interpreter lock nor the
worker's cooperation: it works in the middle of a C function that never returns.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time

import psutil

from shmloader.shared_memory import Descriptor

# A real-time signal where there are such: programs and batch systems use SIGUSR1 and SIGUSR2 themselves.
_SIGNAL = int(getattr(signal, "SIGRTMIN", getattr(signal, "SIGUSR2", 0))) + (
    6 if hasattr(signal, "SIGRTMIN") else 0
)
_MOST_CHARACTERS = 8000


class StackFile:
    """A file that workers write their stacks to when they are asked; the main process owns it."""

    def __init__(self) -> None:
        self.descriptor = Descriptor(os.memfd_create("shmloader-stacks"))

    def ask(self, pid: int, wait_s: float = 1.0) -> str:
        """The Python stacks of all threads of a worker, or why there are none.

        Args:
            pid: The worker's process id.
            wait_s: Most seconds to wait for its answer.
        """
        fd = self.descriptor.fd
        if fd < 0 or not _SIGNAL:
            return ""
        begin = end = os.fstat(fd).st_size
        try:
            status = psutil.Process(pid).status()
            os.kill(pid, _SIGNAL)
        except (OSError, psutil.Error) as error:
            return f"(its stack could not be read: {error})"
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(0.05)
            size = os.fstat(fd).st_size
            if size == end > begin:
                break
            end = size
        text = os.pread(fd, end - begin, begin).decode("utf-8", "replace").rstrip()
        if not text:
            return f"(its process is {status} and did not answer with its stack within {wait_s} s)"
        return text[:_MOST_CHARACTERS]

    def close(self) -> None:
        """Close this process's descriptor of the file."""
        if self.descriptor.fd >= 0:
            os.close(self.descriptor.fd)
            self.descriptor.fd = -1


def answer_with_stacks(descriptor: Descriptor) -> None:
    """In a worker: write all threads' stacks to the main process's `StackFile` whenever it asks."""
    if _SIGNAL:
        faulthandler.register(_SIGNAL, file=descriptor.fd, all_threads=True, chain=False)
