"""File descriptors that reach worker processes."""

from __future__ import annotations

from multiprocessing import reduction
from typing import Any


class Descriptor:
    """A file descriptor that reaches a worker under every start method.

    Under fork it is inherited as it is; under spawn and forkserver ``multiprocessing`` passes it while the
    process is being started.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _received_descriptor, (reduction.DupFd(self.fd),)


def _received_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())
