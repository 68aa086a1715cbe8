"""One object of shared memory that is filled once, sealed, and read by any number of processes.

A `BufferBuilder` appends to it and grows it in place, so that a stream of unknown length is written
without a second copy; `BufferBuilder.seal` turns it into a `SharedBuffer`. It is a memfd, sealed against
writing. It has no name. The kernel frees it when the last process that maps it has ended, for any reason.

Every process maps it privately and writably, and hands out read-only views. A write that goes round the views
(torch knows no read-only tensors) changes a page of that process alone, and ends nothing.

A view keeps its buffer. `buffer_at` finds the buffer of an address, so that plain arrays over shared memory
can be sent to other processes by handle.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
import weakref
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any, Self

import numpy as np
import torch

from shmloader.errors import SharedMemoryExhausted
from shmloader.memory.huge_pages import make_pages_huge, take_huge_pages
from shmloader.memory.limits import check_headroom, exhausted
from shmloader.memory.mapping import (
    MAP_NORESERVE,
    PAGE_NBYTES,
    READ_WRITE,
    check_memory,
    map_file,
    whole_pages,
)
from shmloader.memory.segment import Descriptor

ALIGNMENT = 64
"""Default alignment of what is appended, in bytes: a cache line, and what Arrow recommends."""

_ADVICE = (
    "Share less of it, raise the limit, or keep the data in a file: shmloader.open(path) maps Arrow IPC "
    "files that may be larger than memory."
)
_MOST_GROWTH_NBYTES = 256 << 20
_LEAST_WORKING_NBYTES = 16 << 20
_MOST_WRITE_NBYTES = 1 << 30  # Linux writes at most 2 GiB at a time
_HUGE_SHARE, _LEAST_HUGE_S = 0.1, 0.05  # of the time that building takes, for huge pages once it is done


class SharedBuffer:
    """Sealed shared memory, as this process maps it.

    Costs one descriptor and one mapping, from 2 MiB on a second one. They live as long as the buffer or any
    view of it; the memory itself as long as any process has either.

    It reaches another process by handle: inherited by fork, or pickled while ``multiprocessing`` starts
    a process or sends through its own queues and pipes. Any other pickling is an error. ``copy.copy`` and
    ``copy.deepcopy`` give the buffer itself.

    Attributes:
        fd: The descriptor; valid while this object lives. To pass it to a process that
            ``multiprocessing`` did not start, send it over a UNIX socket and call `SharedBuffer` there.
        nbytes: Length.
        mapping: The memory as a Python ``mmap``, whose slices are bytes: the quickest way to read some.
            It may begin before ``address`` and end behind ``nbytes``, where nothing can be read; it does not
            keep the descriptor. None if it has no descriptor.
        address: Where it is mapped here.
    """

    __slots__ = ("__weakref__", "address", "fd", "mapping", "nbytes")

    def __init__(self, fd: int, nbytes: int, protection: int = READ_WRITE) -> None:
        """Map a sealed object, whose descriptor this buffer owns from now on.

        Without ``PROT_WRITE`` there is no `private`, and nothing is charged for it.

        Raises:
            SharedMemoryExhausted: If there is no address space for it.
        """
        self.fd = fd
        self.nbytes = nbytes
        os.set_inheritable(fd, False)
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        self.mapping: mmap.mmap | None
        self.mapping, self.address = map_file(max(nbytes, 1), flags, fd, protection=protection)
        _buffers[self.address] = self

    def __del__(self, close: Any = os.close) -> None:
        # A Ctrl-C may have come before there was a descriptor; at exit this module's names may be gone.
        try:  # noqa: SIM105
            close(self.fd)
        except (AttributeError, OSError):
            pass

    def holds(self, address: int, nbytes: int = 1) -> bool:
        """Whether all of so many bytes at an address are of this memory."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    @property
    def private(self) -> memoryview:
        """Writable memoryview of all bytes, which keeps the buffer; writes stay in this process."""
        memory: Any = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        memory.owner = self
        return memoryview(memory).cast("B")

    @property
    def view(self) -> memoryview:
        """Read-only memoryview of all bytes, which keeps the buffer."""
        return SharedBuffer.private.fget(self).toreadonly()  # type: ignore[attr-defined,no-any-return]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise PicklingError(
            f"a store ({self.nbytes:,} bytes) lies in the shared memory of this host's running processes: it "
            "can be pickled to a process that multiprocessing starts or is connected to, but not to disk or "
            "to another machine. Write it to a file instead, with store.save(path), and open it there with "
            "shmloader.open(path); or put lists and dicts back in its place, shmloader.unshare(dataset)."
        )

    def __repr__(self) -> str:
        return f"<SharedBuffer of {self.nbytes:,} bytes>"


_buffers: weakref.WeakValueDictionary[int, SharedBuffer] = weakref.WeakValueDictionary()


def buffer_at(address: int, nbytes: int) -> SharedBuffer | None:
    """The buffer of this process that holds ``nbytes`` bytes at an address; None if none does."""
    # A list of references: another thread may make a buffer meanwhile.
    buffers = (reference() for reference in _buffers.valuerefs())
    return next((one for one in buffers if one is not None and one.holds(address, nbytes)), None)


def may_be_written(value: Any) -> bool:
    """Whether this process can write to an array's memory through it, or through what it is a view of."""
    while not isinstance(value, ctypes.Array):  # that of `view`
        if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.flags.writeable):
            return True
        if isinstance(value, memoryview) and not value.readonly:
            return True
        value = value.obj if isinstance(value, memoryview) else getattr(value, "base", None)
        if value is None:  # another library's object has the memory
            return True
    return False


def _attach(descriptor: Descriptor, nbytes: int) -> SharedBuffer:
    return SharedBuffer(descriptor.fd, nbytes)


# Only multiprocessing's own pickler can pass descriptors, so only it knows how to pickle a buffer.
ForkingPickler.register(SharedBuffer, lambda buffer: (_attach, (Descriptor(buffer.fd), buffer.nbytes)))


class BufferBuilder:
    """Shared memory while it is being filled; a context manager that frees it unless it was sealed.

    Invariant: ``nbytes``, appended so far with padding, ``<= reserved_nbytes``, and there is memory for pages
    below that. Pages are reserved before they are written, after a comparison with what the host has.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.reserved_nbytes = 0
        self._asks_for_huge_pages = True  # until they would take long
        self._began_s = time.process_time()
        check_memory()
        self._fd = os.memfd_create("shmloader-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def reserve(self, nbytes: int) -> None:
        """Make sure that the memory can be ``nbytes`` long in all, or raise `SharedMemoryExhausted`."""
        grow_nbytes = nbytes - self.reserved_nbytes
        if grow_nbytes <= 0:
            return
        already = f", which holds {self.nbytes:,} bytes already," if self.nbytes else ""
        # Memory for the program itself: the kernel kills at the first allocation that does not fit.
        spare = min(max(self.reserved_nbytes // 8, _LEAST_WORKING_NBYTES), _MOST_GROWTH_NBYTES)
        purpose = f"a store{already} needs {grow_nbytes:,} more bytes of shared memory"
        check_headroom(grow_nbytes, purpose, spare=spare, advice=_ADVICE)
        try:
            if self._asks_for_huge_pages:
                self._asks_for_huge_pages = take_huge_pages(self._fd, 0, self.reserved_nbytes, nbytes)
            os.posix_fallocate(self._fd, self.reserved_nbytes, grow_nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.reserved_nbytes)  # gives back what came before the error
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            failed = f"reserving {grow_nbytes:,} bytes of shared memory for a store failed: {error.strerror}"
            raise exhausted(failed, grow_nbytes, spare=spare, advice=_ADVICE, code=error.errno) from error
        self.reserved_nbytes = nbytes

    def append(self, data: Any, alignment: int = ALIGNMENT) -> int:
        """Append the bytes of an object with a contiguous buffer; returns the offset at which they begin."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # a zero in its shape cannot be cast
        offset = -(-self.nbytes // alignment) * alignment
        end = offset + view.nbytes
        if end > self.reserved_nbytes:
            # A sixteenth ahead: few system calls, and little more than what is needed at the peak.
            ahead = min(max(self.reserved_nbytes // 16, PAGE_NBYTES), _MOST_GROWTH_NBYTES)
            try:
                self.reserve(whole_pages(end + ahead))
            except SharedMemoryExhausted:
                self.reserve(whole_pages(end))
        self.nbytes = end
        done = 0
        while done < view.nbytes:
            done += os.pwrite(self._fd, view[done : done + _MOST_WRITE_NBYTES], offset + done)
        return offset

    def seal(self) -> SharedBuffer:
        """Make the memory exactly as long as what was appended, and read-only for everybody, for good."""
        os.ftruncate(self._fd, self.nbytes)
        import fcntl  # not on Windows

        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        fd, self._fd = self._fd, -1
        buffer = SharedBuffer(fd, self.nbytes)
        spent_s = time.process_time() - self._began_s
        make_pages_huge(buffer.address, buffer.nbytes, max(_HUGE_SHARE * spent_s, _LEAST_HUGE_S))
        if buffer.nbytes:
            # The kernel counts a page that only one process has mapped as that process's private memory. One
            # byte of each is read here, so that none ever counts as private to a worker.
            np.frombuffer(buffer.view, np.uint8)[::PAGE_NBYTES].max()
        return buffer

    def close(self) -> None:
        """Free the memory, unless it was sealed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
