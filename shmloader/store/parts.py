"""Parts of a shared buffer that several stores lie in.

Offsets count from the begin of the whole buffer, also in a part: so what a part holds can refer to what an
earlier one has written. A part that refers to nothing outside of itself can be saved as it is; its offsets
stay what they were, and the file's buffer says with which one it begins.
"""

from __future__ import annotations

from typing import Any

from shmloader.shared_memory.sealed_buffer import SharedBuffer


class BufferPart(SharedBuffer):
    """What one store holds of a buffer; the descriptor stays the whole's.

    ``view`` and ``private`` are of everything from the whole's begin to the part's end. ``nbytes`` and
    ``address`` are the part's own.

    Attributes:
        whole: The buffer, which lives as long as any part of it.
        begin: Where the part's own bytes begin in ``view``.
        first: The offset that stands for the first byte of ``view``.
        is_alone: Whether the part refers to nothing before ``begin``.
    """

    __slots__ = ("begin", "first", "is_alone", "whole")

    def __init__(
        self, whole: SharedBuffer, begin: int, nbytes: int, first: int = 0, is_alone: bool = True
    ) -> None:
        """Look at ``nbytes`` bytes of a buffer from ``begin`` on; nothing is mapped anew."""
        self.whole, self.begin, self.nbytes = whole, begin, nbytes
        self.first, self.is_alone = first, is_alone
        self.fd = whole.fd
        self.mapping = whole.mapping
        self.private = whole.private[: begin + nbytes]
        self.view = whole.view[: begin + nbytes]
        self.address = whole.address + begin

    @property
    def own(self) -> memoryview:
        """The part's own bytes, read-only."""
        return self.view[self.begin :]

    def __del__(self, close: Any = None) -> None:
        """Close nothing."""

    def __reduce__(self) -> Any:
        return BufferPart, (self.whole, self.begin, self.nbytes, self.first, self.is_alone)


def first_offset(memory: SharedBuffer) -> int:
    """The offset that stands for the first byte of a memory's ``view``, ``private`` and ``mapping``."""
    return memory.first if isinstance(memory, BufferPart) else 0


def bytes_at(memory: SharedBuffer, offset: int, nbytes: int) -> memoryview:
    """Some bytes of shared memory, read-only."""
    begin = offset - first_offset(memory)
    return memory.view[begin : begin + nbytes]
