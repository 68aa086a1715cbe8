"""Plain arrays, tensors and Arrow buffers, which other processes get by handle.

``share(array)`` is an ordinary ndarray, and so is each view of it. Only ``multiprocessing``'s own pickler can
pass descriptors; so it is told (`register_reducers`) to look at where the items of an ndarray, a tensor or an
Arrow buffer lie:

* in a buffer of shmloader's: the buffer's descriptor is sent, and the view is made anew over it;
* in a file that NumPy or torch has mapped: the file's path is sent to a process that is being started.

All others are pickled as before. ``pickle.dumps``, ``torch.save`` and ``copy.deepcopy`` copy the items, as of
any array.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Sequence
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader import torch_private
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.errors import LoaderError
from shmloader.shared_memory.sealed_buffer import SharedBuffer, buffer_at

_LEAST_NBYTES = 1 << 12  # smaller ones are sent by value: a descriptor costs more


class Fingerprint(NamedTuple):
    """Detects whether a file has changed."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str) -> Fingerprint:
        """Look at a file."""
        status = Path(path).stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self, path: str) -> None:
        """Make sure that a path still means the file that was opened.

        Raises:
            FileNotFoundError: If there is none any more.
            LoaderError: If it is another one, or has been written to.
        """
        try:
            now = Fingerprint.of(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"data was mapped from {path}, which is not there (any more): a process that gets such "
                "data opens the file by its path. Keep it until all workers have started, on a path that "
                "every process sees"
            ) from None
        if now != self:
            raise LoaderError(
                f"{path} has changed since data was mapped from it: then {self.nbytes:,} bytes, inode "
                f"{self.inode}, written at {self.mtime_ns} ns; now {now.nbytes:,} bytes, inode "
                f"{now.inode}, written at {now.mtime_ns} ns. Open it anew in the main process"
            )


class MappedItems(NamedTuple):
    """An array that lies in a mapped file.

    Attributes:
        path: The file.
        fingerprint: Of the file when it was pickled.
        offset: Of the array's lowest byte in the file.
        mode: As of ``numpy.memmap``.
    """

    path: str
    fingerprint: Fingerprint
    offset: int
    mode: str

    def items(self, nbytes: int) -> np.ndarray[Any, Any]:
        """The bytes, mapped anew."""
        self.fingerprint.check(self.path)
        return np.memmap(self.path, np.uint8, self.mode, self.offset, (nbytes,))  # type: ignore[call-overload,no-any-return]


def file_of(value: Any) -> str | None:
    """The path of the file that an array's or a tensor's items are mapped from; None if they are not."""
    if isinstance(value, torch.Tensor):
        found = _mapping_of(value)
        return None if found is None else found[0]
    mapped = _memmap_of(value)
    return None if mapped is None or mapped.filename is None else str(mapped.filename)


def _mapping_of(tensor: torch.Tensor) -> tuple[str, int, str] | None:
    """The file that a tensor's items are mapped from, their offset in it, and the mode; None if from none.

    torch keeps no path of a file that it has mapped for this process alone, so the system is asked.
    """
    if not _is_dense(tensor):
        return None
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights, offset, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        # torch's own shared memory has names in /dev/shm, of which most are deleted.
        if begin <= address < end and path and not path[0].startswith("/dev/shm") and Path(path[0]).is_file():
            return path[0], int(offset, 16) + address - begin, "r+" if "s" in rights else "c"
    return None


def _memmap_of(array: Any) -> np.memmap[Any, Any] | None:
    """The memmap at the end of the chain of views that an array is one of."""
    found = None
    while isinstance(array, np.ndarray):
        found = array if isinstance(array, np.memmap) and array.filename is not None else found
        array = array.base
    return found


def is_shared(value: Any) -> bool:
    """Whether an ndarray or a tensor lies in shared memory of shmloader's, or in a mapped file."""
    if isinstance(value, np.ndarray):
        low, high = _bounds(value)
    elif _is_dense(value):
        low = high = value.data_ptr()
    else:
        return False
    return buffer_at(low, high - low) is not None or file_of(value) is not None


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The addresses of an array's lowest byte, and of the first one behind it."""
    low = high = array.__array_interface__["data"][0]
    for size, step in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (size - 1) * step), high + max(0, (size - 1) * step)
    return low, high + array.itemsize


def _sends_handles() -> bool:
    """Whether a pickle is for a process that is being started, or comes from the main one.

    What a worker sends back is sent by value: a handle would take a descriptor, and a thread that serves it.
    """
    return get_spawning_popen() is not None or parent_process() is None


def reduce_shared_array(array: np.ndarray[Any, Any]) -> Any:
    """The pickle of an array over shared memory, by handle; None for any other, and for small ones."""
    return _reduce_by_handle(array, None)


def _reduce_by_handle(array: np.ndarray[Any, Any], mapped: Any) -> Any:
    if array.nbytes < _LEAST_NBYTES or array.dtype.hasobject:
        return None
    low, high = _bounds(array)
    handle = _handle(low, high, mapped)
    if handle is None:
        return None
    begin = array.__array_interface__["data"][0] - low
    layout = array.dtype, array.shape, array.strides
    return _array_over, (handle, high - low, begin, *layout, array.flags.writeable)


def _reduce_array(array: np.ndarray[Any, Any], by_path: bool | None = None) -> Any:
    """See ``ForkingPickler``. Files are sent ``by_path``; None: while a process is being started."""
    if by_path is None and not _sends_handles():
        return array.__reduce_ex__(4)
    by_path = get_spawning_popen() is not None if by_path is None else by_path
    reduced = _reduce_by_handle(array, _memmap_of(array) if by_path else None)
    return array.__reduce_ex__(4) if reduced is None else reduced


def _handle(low: int, high: int, mapped: Any) -> Any:
    """A handle of some memory: a buffer and an offset, or a file; None if there is none."""
    buffer = buffer_at(low, high - low)
    if buffer is not None:
        return buffer, low - buffer.address
    if mapped is not None:
        path = os.path.realpath(mapped.filename)
        offset = mapped.offset + low - mapped.__array_interface__["data"][0]
        mode = "c" if mapped.mode == "w+" else mapped.mode
        return MappedItems(path, Fingerprint.of(path), offset, "r+" if mapped.mode == "w+" else mode)
    return None


def _bytes_over(handle: Any, nbytes: int, *, writable: bool) -> np.ndarray[Any, Any]:
    if isinstance(handle, MappedItems):
        return np.asarray(handle.items(nbytes))
    buffer, offset = handle
    return np.frombuffer(buffer.private if writable else buffer.view, np.uint8, nbytes, offset)


def _array_over(
    handle: Any,
    nbytes: int,
    begin: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writable: bool,
) -> np.ndarray[Any, Any]:
    octets = _bytes_over(handle, nbytes, writable=writable)
    # Over an array, not over the memory: it cannot be made writeable then.
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, octets, begin, strides)
    array.flags.writeable = array.flags.writeable and writable
    return array


def _reduce_tensor(tensor: torch.Tensor, by_path: bool | None = None) -> Any:
    """See `_reduce_array`."""
    nbytes = tensor.numel() * tensor.element_size()
    plain = tensor.dtype in CODE_OF_TORCH_DTYPE and not (
        tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    )
    sends = by_path is not None or _sends_handles()
    if nbytes < _LEAST_NBYTES or not plain or not sends or not _is_dense(tensor):
        return torch_private.reduce_tensor(tensor)
    size = tensor.element_size()
    span = size * int(1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
    low = tensor.data_ptr()
    buffer = buffer_at(low, span)
    handle: Any = None if buffer is None else (buffer, low - buffer.address)
    by_path = get_spawning_popen() is not None if by_path is None else by_path
    found = _mapping_of(tensor) if handle is None and by_path else None
    if found is not None:
        path, offset, mode = found
        handle = MappedItems(path, Fingerprint.of(path), offset, mode)
    if handle is None:
        return torch_private.reduce_tensor(tensor)
    return _tensor_over, (
        handle,
        span,
        CODE_OF_TORCH_DTYPE[tensor.dtype],
        tuple(tensor.shape),
        tensor.stride(),
    )


def _tensor_over(
    handle: Any, nbytes: int, code: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    dtype = DTYPES[code]
    flat = wrap_tensor(_bytes_over(handle, nbytes, writable=True).view(dtype.carrier), dtype.torch_dtype)
    return flat.as_strided(shape, strides).detach()


def reduce_arrow_buffer(buffer: Any) -> Any:
    """See ``ForkingPickler``: tables and arrays of Arrow's are pickled by their buffers."""
    reduced = _reduce_arrow_buffer_by_handle(buffer) if _sends_handles() else None
    return buffer.__reduce_ex__(4) if reduced is None else reduced  # no reducer is told the protocol


def _reduce_arrow_buffer_by_handle(buffer: Any) -> Any:
    found = buffer_at(buffer.address, buffer.size) if buffer.is_cpu and buffer.size >= _LEAST_NBYTES else None
    if found is None:
        return None
    return _arrow_buffer_over, (found, buffer.address - found.address, buffer.size)


def _arrow_buffer_over(buffer: SharedBuffer, offset: int, nbytes: int) -> Any:
    import pyarrow as pa

    return pa.py_buffer(buffer.view[offset : offset + nbytes])


def register_reducers() -> None:
    """Have ``multiprocessing``'s pickler send arrays and tensors by handle.

    Done by the modules of stores, so that a program without any pickles as it always did.
    """
    for kind in (np.ndarray, np.memmap):
        ForkingPickler.register(kind, _reduce_array)
    ForkingPickler.register(torch.Tensor, _reduce_tensor)


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

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if type(value) in (np.ndarray, np.memmap):
            return _reduce_array(value, by_path=True)
        if type(value) is torch.Tensor:
            reduced = _reduce_tensor(value, by_path=True)
            return reduced if reduced[0] is _tensor_over else NotImplemented
        pyarrow = sys.modules.get("pyarrow")
        is_arrow = pyarrow is not None and type(value) is pyarrow.Buffer
        reduced = _reduce_arrow_buffer_by_handle(value) if is_arrow else None
        return NotImplemented if reduced is None else reduced


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
