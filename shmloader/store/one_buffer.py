"""Several stores in one shared buffer: one descriptor and one mapping for all that a dataset holds.

Each store has a part of the memory, which begins with a page and is complete in itself: offsets count from
the part's begin, and its end says what it holds. The memory is freed when the last of the stores is gone.
"""

from __future__ import annotations

import errno
from types import TracebackType
from typing import Any, NoReturn, Self

from shmloader.limits import open_files
from shmloader.segment import PAGE_NBYTES
from shmloader.shared_buffer import ALIGNMENT, Buffer, BufferBuilder, SharedBuffer
from shmloader.store.base import Written, end_with


class BufferPart(SharedBuffer):
    """A part of a shared buffer, as if it were one of its own; the descriptor stays the whole's.

    Attributes:
        whole: The buffer, which lives as long as any part of it.
        begin: Where the part begins in ``whole.mapping``.
    """

    __slots__ = ("begin", "whole")

    def __init__(self, whole: SharedBuffer, begin: int, nbytes: int) -> None:
        """Look at ``nbytes`` bytes of a buffer from ``begin`` on; nothing is mapped anew."""
        self.whole, self.begin, self.nbytes = whole, begin, nbytes
        self.fd = whole.fd
        self.mapping = whole.mapping
        self.private = whole.private[begin : begin + nbytes]
        self.view = whole.view[begin : begin + nbytes]
        self.address = whole.address + begin

    def __del__(self, close: Any = None) -> None:
        """Close nothing."""

    def __reduce__(self) -> Any:
        return BufferPart, (self.whole, self.begin, self.nbytes)


class _PartBuilder(BufferBuilder):
    """A part while it is filled: offsets count from its begin. The whole owns memory and descriptor."""

    def __init__(self, whole: BufferBuilder) -> None:
        self._whole = whole
        self.begin = whole.append(b"", alignment=PAGE_NBYTES)
        self._follow()

    def _follow(self) -> None:
        self.nbytes = self._whole.nbytes - self.begin
        self.reserved_nbytes = self._whole.reserved_nbytes - self.begin

    def reserve(self, nbytes: int) -> None:
        self._whole.reserve(self.begin + nbytes)
        self._follow()

    def append(self, data: Buffer, alignment: int = ALIGNMENT) -> int:
        return self.append_all([data], alignment)

    def append_all(self, buffers: Any, alignment: int = ALIGNMENT) -> int:
        offset = self._whole.append_all(buffers, alignment) - self.begin
        self._follow()
        return offset

    def forget(self) -> None:
        """Leave the memory to the next part."""
        self._whole.nbytes = self.begin

    def fileno(self) -> int:
        return self._whole.fileno()

    def seal(self) -> NoReturn:
        raise TypeError("only the whole buffer is sealed")

    def close(self) -> None:
        """Free nothing: the whole does."""


class StoreGroup:
    """Builds stores in one buffer; a context manager that frees it unless `finish` was called."""

    def __init__(self) -> None:
        """Make an empty buffer.

        Raises:
            OSError: If the process may open no more descriptors.
        """
        self._out = new_builder()
        self._written: list[tuple[Written, int, int]] = []

    def add(self, write: Any, data: Any, progress: bool | None = None) -> None:
        """Write one store's data.

        Args:
            write: Writes it: `shmloader.store.build.write_store`.
            data: The container.
            progress: As for `shmloader.share`.

        Raises:
            Exception: What ``write`` raises; then nothing was added.
        """
        part = _PartBuilder(self._out)
        try:
            written = write(data, part, progress)
            end_with(part, written)
        except BaseException:
            part.forget()
            raise
        self._written.append((written, part.begin, part.nbytes))

    def finish(self) -> list[Any]:
        """Seal the buffer; returns the stores, in order."""
        whole = self._out.seal()
        return [
            kind(BufferPart(whole, begin, nbytes), layout) for (kind, layout), begin, nbytes in self._written
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._out.close()


def new_builder() -> BufferBuilder:
    """Empty shared memory for one store or a group.

    Raises:
        OSError: If the process may open no more descriptors, with how many it has and what to do.
    """
    try:
        return BufferBuilder()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        files = open_files()
        most = "an unknown number" if files is None or files.most is None else f"{files.most:,}"
        raise OSError(
            error.errno,
            f"a store needs one descriptor, and this process has as many open as it may: {most}. Raise the "
            "limit (ulimit -n), close what is not needed, or share what belongs together in one call: all "
            "attributes of an object that shmloader.share(object) shares take one descriptor",
        ) from error
