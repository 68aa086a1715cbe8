"""Python stacks of a worker process that does not answer, asked for by a signal.

``faulthandler`` writes the answer, without the interpreter lock: also in a C function that never returns.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
import traceback
from pathlib import Path

import psutil

from shmloader.memory import Descriptor

# A real-time signal: programs and batch systems use SIGUSR1 and SIGUSR2 themselves.
_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 6
_MOST_CHARACTERS = 8000
_ANSWER_S = 1.0  # how long a worker may take to write its stacks
_ERROR = b"\0process %d was ended by\0"


class StackFile:
    """A file that workers write their stacks to when they are asked; the main process owns it."""

    def __init__(self) -> None:
        self.descriptor = Descriptor(os.memfd_create("shmloader-stacks"))

    def ask(self, pid: int) -> str:
        """The Python stacks of all threads of a worker, or the reason why there are none after a second."""
        fd = self.descriptor.fd
        if fd < 0:
            return ""
        begin = end = os.fstat(fd).st_size
        try:
            status = psutil.Process(pid).status()
            if not answers(pid):  # the signal would end it
                return (
                    f"(it is still starting and can give no stack yet; its process is {status}: it imports "
                    "the program's main module, torch and the modules of the dataset)"
                )
            os.kill(pid, _SIGNAL)
        except (OSError, psutil.Error) as error:
            return f"(its stack could not be read: {error})"
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            size = os.fstat(fd).st_size
            if size == end > begin and not _is_in(pid, "SigBlk"):  # as long as it writes, however slowly
                break
            end = size
        text = os.pread(fd, end - begin, begin).decode("utf-8", "replace").rstrip()
        if not text:
            return f"(its process is {status} and did not answer with its stack within {_ANSWER_S} s)"
        # Without the thread that waits for the end of the main process.
        threads = [thread for thread in text.split("\n\n") if "parent_watch.py" not in thread]
        return "\n\n".join(threads)[:_MOST_CHARACTERS]

    def error_of(self, pid: int) -> str:
        """The traceback that a worker has left by `report_error`, or ""."""
        fd = self.descriptor.fd
        contents = os.pread(fd, os.fstat(fd).st_size, 0) if fd >= 0 else b""
        _, _, rest = contents.partition(_ERROR % pid)
        return rest.partition(b"\0")[0].decode("utf-8", "replace").rstrip()

    def close(self) -> None:
        """Close this process's descriptor of the file."""
        self.descriptor.close()


def answers(pid: int) -> bool:
    """Whether a process has a handler for stack requests, by Linux's list: a worker soon installs it."""
    return _is_in(pid, "SigCgt")


def _is_in(pid: int, mask: str) -> bool:
    """Whether the signal is in one of a process's lists of signals, as Linux names it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    signals = re.search(rf"^{mask}:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return signals is not None and bool(int(signals[1], 16) >> (_SIGNAL - 1) & 1)


def answer_with_stacks(descriptor: Descriptor) -> None:
    """Make this worker write all threads' stacks to the main process's `StackFile` on request."""
    faulthandler.register(_SIGNAL, file=descriptor.fd, all_threads=True, chain=False)


def report_error(descriptor: Descriptor) -> None:
    """Write the present exception to the `StackFile`, in a worker that it ends."""
    text = traceback.format_exc()[-_MOST_CHARACTERS:].encode("utf-8", "replace")
    os.write(descriptor.fd, _ERROR % os.getpid() + text + b"\0")
