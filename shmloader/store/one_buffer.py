"""Several stores in one shared buffer: one descriptor and one mapping for all that a dataset holds.

Each store has a part of the memory, which begins with a page, and whose end says what it holds. What several
of them hold is there once: a later part refers to an earlier one. The memory is freed when the last of the
stores is gone.
"""

from __future__ import annotations

import errno
from types import TracebackType
from typing import Any, Self

from shmloader.host.limits import open_files
from shmloader.shared_memory import PAGE_NBYTES
from shmloader.shared_memory.sealed_buffer import BufferBuilder
from shmloader.store.base import Written, end_with
from shmloader.store.kept import Kept
from shmloader.store.parts import BufferPart


class StoreGroup:
    """Builds stores in one buffer; a context manager that frees it unless `finish` was called."""

    def __init__(self, most: int) -> None:
        """Make an empty buffer.

        Args:
            most: How many stores there will be at most.

        Raises:
            OSError: If the process may open no more descriptors.
        """
        self._out = new_builder()
        self._kept = Kept(self._out)
        self._to_come = most
        self._written: list[tuple[Written, int, int, bool]] = []

    def add(self, write: Any, data: Any, progress: bool | None = None) -> None:
        """Write one store's data.

        Args:
            write: Writes it: `shmloader.store.build.write_store`.
            data: The container. It and what it holds must live, unchanged, until all stores are written.
            progress: As for `shmloader.share`.

        Raises:
            Exception: What ``write`` raises; then nothing was added.
        """
        self._to_come -= 1
        begin = self._out.append(b"", alignment=PAGE_NBYTES)
        kept = Kept(self._out, earlier=self._kept, remembers_columns=self._to_come > 0)
        try:
            written = write(data, self._out, progress, kept)
            end_with(self._out, written, begin)
        except BaseException:
            self._out.nbytes = begin  # its memory is the next one's
            raise
        self._kept.take_over(kept)
        self._written.append((written, begin, self._out.nbytes - begin, not kept.refers_back))

    def finish(self) -> list[Any]:
        """Seal the buffer; returns the stores, in order."""
        whole = self._out.seal()
        return [
            kind(BufferPart(whole, begin, nbytes, is_alone=is_alone), layout)
            for (kind, layout), begin, nbytes, is_alone in self._written
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
