"""A process that has opened as many files as it may."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors_left(spare: int) -> Iterator[None]:
    """Let this process open only so many files more."""
    filled = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]  # no gap below the last
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1, limits[1]))
    for fd in filled[len(filled) - spare :]:
        os.close(fd)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in filled[: len(filled) - spare]:
            os.close(fd)
