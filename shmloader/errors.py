"""Exceptions and warnings of shmloader, and how a warning is given.

Every exception inherits from what users of ``torch.utils.data.DataLoader`` already catch, so that an
``except RuntimeError`` written for torch still works.
"""

from __future__ import annotations

import inspect
import warnings


class LoaderError(RuntimeError):
    """Base of all errors that shmloader raises about loading itself."""


class WorkerDied(LoaderError):
    """A worker process ended while the loader still needed it.

    Attributes:
        worker_id: Which worker, 0 to ``num_workers - 1``.
        pid: Its process id.
        exit_code: Exit code as in ``multiprocessing.Process.exitcode`` (a negative number is minus the
            signal's number), or None if it is unknown.
        indices: The index batches that the worker held, oldest first; empty while starting.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_id: int = -1,
        pid: int = -1,
        exit_code: int | None = None,
        indices: tuple[object, ...] = (),
    ) -> None:
        super().__init__(message)
        self.worker_id, self.indices = worker_id, indices
        self.pid, self.exit_code = pid, exit_code


class WorkerTimeout(LoaderError, TimeoutError):
    """No batch came within the loader's ``timeout``."""


class WorkerStartError(LoaderError):
    """A worker process could not be started with the arguments it was given."""


class NotSharedWarning(UserWarning):
    """Something large could not be shared, or is copied into workers: each process has a copy of its own."""


class NotReady(LoaderError, BlockingIOError):
    """The next batch is not here yet; raised by ``try_next()`` of an iterator, which does not wait for it.

    Attributes:
        raised_by: The part of an iterator that has raised it; None after it was sent to another process.
    """

    __slots__ = ("raised_by",)  # a pickle leaves it out

    def __init__(self, message: str = "", raised_by: object = None) -> None:
        super().__init__(message)
        self.raised_by = raised_by


class SharedMemoryExhausted(LoaderError, MemoryError):
    """The host cannot give the shared memory that was asked for.

    Attributes:
        needed_nbytes: Bytes asked for.
        available_nbytes: Bytes the host could still give, or None if unknown.
    """

    def __init__(self, message: str, *, needed_nbytes: int = 0, available_nbytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_nbytes = needed_nbytes
        self.available_nbytes = available_nbytes


class SlotCorrupted(LoaderError):
    """A slot was written to while it was free; found with ``SHMLOADER_DEBUG=1``."""


class LoaderClosed(LoaderError):
    """The iterator was closed, by ``loader.close()`` or by leaving its ``with`` block."""


class PeerDied(LoaderError):
    """The process at the other end of a `Queue` has ended, or every process that could have used that end.

    Attributes:
        pid: Its process id; of several, the last one's.
        exit_code: Exit code as in ``multiprocessing.Process.exitcode`` (a negative number is minus the
            signal's number), or None if this process cannot know it.
    """

    def __init__(self, message: str, *, pid: int = -1, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.pid, self.exit_code = pid, exit_code


class QueueClosed(LoaderError, EOFError):
    """The other end of a `Queue` was closed, and all that it had put was got."""


class ResumeError(LoaderError, ValueError):
    """A loader's state does not fit the loader, cannot be made, or cannot be resumed from."""


class SpillWarning(RuntimeWarning):
    """Memory or slots are short: batches are copied to private memory, or fewer are made in advance."""


class BadSampleWarning(RuntimeWarning):
    """Samples raised and were left out or replaced, as ``on_error`` asks for."""


class NoGoodSample(LoaderError):
    """Too many samples or batches in a row were bad, with ``on_error``; maybe all further ones are, too."""


class ArchiveError(ValueError):
    """A tar archive is damaged, or not as its dataset needs it; names archive and offset."""


class ShareTimeout(LoaderError, TimeoutError):
    """The process that builds an object, or serves a loader, for others of a host was not ready in time."""


class ServerDied(LoaderError):
    """The process that serves a loader to this one has ended.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, message: str, *, pid: int = -1) -> None:
        super().__init__(message)
        self.pid = pid


_OF_THE_LOADER = ("shmloader.", "torch.utils.data.", "contextlib")  # the last where the loader uses it
_said: set[str] = set()


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Give a warning that points to the line of the program that has called the loader."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OF_THE_LOADER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def warn_once(message: str) -> None:
    """Give a ``RuntimeWarning`` once in this process."""
    if message not in _said:
        _said.add(message)
        warn(message)
