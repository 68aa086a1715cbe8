"""Pickling objects that contain stores, for another process of this host: buffers go by descriptor."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from shmloader.shared_memory.sealed_buffer import SharedBuffer


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[SharedBuffer]) -> None:
        super().__init__(file, 5)
        self._buffers = buffers
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """See ``pickle.Pickler``: buffers stay out of the pickle."""
        if type(value) is not SharedBuffer:  # over a file, it is pickled by the file's path
            return None
        number = self._numbers.setdefault(id(value), len(self._buffers))
        if number == len(self._buffers):
            self._buffers.append(value)
        return number


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[SharedBuffer]) -> None:
        super().__init__(file)
        self._buffers = buffers

    def persistent_load(self, number: Any) -> SharedBuffer:
        """See ``pickle.Unpickler``."""
        buffer: SharedBuffer = self._buffers[number]
        return buffer


def pack(value: Any) -> tuple[bytes, list[SharedBuffer]]:
    """Pickle any object that may contain stores, for a process of this host.

    Returns:
        The pickle, without the shared memory, and the buffers that it refers to. They reach the other
        process by their descriptors.
    """
    file, buffers = io.BytesIO(), list[SharedBuffer]()
    _Packer(file, buffers).dump(value)
    return file.getvalue(), buffers


def unpack(pickled: bytes, buffers: Sequence[SharedBuffer]) -> Any:
    """The object that `pack` pickled, over buffers that are attached here, in the same order."""
    return _Unpacker(io.BytesIO(pickled), buffers).load()
