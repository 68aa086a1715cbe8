"""Plain arrays, tensors and Arrow buffers, which other processes get by handle.

``share(array)`` is an ordinary ndarray, and so is each view of it. Only ``multiprocessing``'s own pickler can
pass descriptors; so it is told (`register`) to look at where the items of an ndarray, a tensor or an
Arrow buffer lie:

* in a buffer of shmloader's: the buffer's descriptor is sent, and the view is made anew over it;
* in a mapped file (`MappedFiles`): the file's path is sent to a process that is being started. A process that
  maps the same file takes no memory for it beyond the system's file cache.

All others are pickled as before. ``pickle.dumps``, ``torch.save`` and ``copy.deepcopy`` copy the items, as
for any array.

| mapped | elsewhere |
|---|---|
| to be read (``r``) | to be read |
| to be written (``r+``, ``w+``) | ``r+``: what is written is in the file, as in a forked worker |
| for oneself (``c``, ``torch.from_file``) | ``c``: what is written is the process's own |

Contents are sent if the file cannot be found again (it was unlinked or replaced), or if this process has
changed its own copy of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.errors import LoaderError
from shmloader.memory import PAGE_NBYTES
from shmloader.store.sealed_buffer import SharedBuffer, buffer_at, may_be_written

_LEAST_NBYTES = 1 << 12  # smaller ones are sent by value: a descriptor costs more

_Array = np.ndarray[Any, Any]


class Fingerprint(NamedTuple):
    """Detects whether a file has changed."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: str | int) -> Fingerprint:
        """The present fingerprint of a file, by its path or descriptor."""
        status = os.fstat(file) if isinstance(file, int) else Path(file).stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def open(self, path: str) -> int:
        """Open a path, which must still mean the file with this fingerprint; returns a descriptor.

        FileNotFoundError if there is none any more; LoaderError if it is another one, or was written to.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"data was mapped from {path}, which is not there (any more): a process that gets such "
                "data opens the file by its path. Keep it until all workers have started, on a path that "
                "every process sees"
            ) from None
        try:
            self.check(Fingerprint.of(fd), path)  # not of the path, which may mean another file at any moment
        except LoaderError:
            os.close(fd)
            raise
        return fd

    def check(self, now: Fingerprint, path: str) -> None:
        """Raise LoaderError if the file that is there now is another one, or has been written to."""
        if now != self:
            raise LoaderError(
                f"{path} was changed since it was opened: then {self.nbytes:,} bytes, inode {self.inode}, "
                f"written at {self.mtime_ns} ns; now {now.nbytes:,} bytes, inode {now.inode}, written at "
                f"{now.mtime_ns} ns. Open it anew in the main process"
            )


class MappedItems(NamedTuple):
    """Items of an array in a file: from ``offset`` on, mapped in a mode of ``numpy.memmap``."""

    path: str
    status: os.stat_result  # when it was pickled
    offset: int
    nbytes: int
    mode: str

    def check(self, now: os.stat_result) -> None:
        """Refuse a file that was replaced, or is too short: reading beyond its end is a bus error."""
        if not os.path.samestat(self.status, now):
            raise LoaderError(
                f"the file {self.path!r}, which the dataset has as an np.memmap, was replaced by another one "
                "while processes were being started. Write to a new file and make a new dataset of that."
            )
        end = self.offset + self.nbytes
        if now.st_size < end:
            raise LoaderError(
                f"the file {self.path!r} was shortened: it has {now.st_size:,} bytes, and the dataset has "
                f"an np.memmap of its first {end:,}. Make the dataset anew after its file has changed."
            )

    def map(self) -> np.memmap[Any, np.dtype[np.uint8]]:
        """The bytes, mapped anew."""
        with Path(self.path).open("r+b" if self.mode == "r+" else "rb") as file:
            self.check(os.fstat(file.fileno()))
            return np.memmap(file, np.uint8, self.mode, self.offset, (self.nbytes,))  # type: ignore[call-overload,no-any-return]


class _Area(NamedTuple):
    """Memory that maps a file."""

    begin: int
    end: int
    rights: str
    offset: int
    path: str


class MappedFiles:
    """The files that this process has mapped. Looked up once, when the first array is looked for."""

    def __init__(self) -> None:
        self._known: list[_Area] | None = None

    def items_at(self, low: int, high: int) -> MappedItems | None:
        """The items in a file that lie at these addresses; None if none do. The file must still have them."""
        areas = self._areas_at(low, high)
        path = areas[0].path if areas else ""
        # torch's own shared memory has names, too, while it lives.
        if not path or path.startswith("/dev/shm/torch_") or not Path(path).is_file():
            return None
        if any(area.path != path for area in areas):
            return None
        begin, _, rights, offset, _ = areas[0]
        if "p" in rights and _is_changed(low, high):
            return None
        mode = ("c" if "p" in rights else "r+") if "w" in rights else "r"
        items = MappedItems(path, Path(path).stat(), offset + low - begin, high - low, mode)
        items.check(items.status)
        return items

    def is_shared_by_program(self, value: Any) -> bool:
        """Whether items of a dense array lie in memory through which the program's processes see writes."""
        return any("s" in area.rights and "w" in area.rights for area in self._areas_at(*bounds_of(value)))

    def _areas_at(self, low: int, high: int) -> list[_Area]:
        if self._known is None:
            known, text = list[_Area](), ""
            with contextlib.suppress(OSError):  # the system does not tell
                text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
            for line in text.splitlines():
                bounds, rights, offset, _, _, *path = line.split(maxsplit=5)
                if path and path[0].startswith("/"):
                    begin, end = (int(bound, 16) for bound in bounds.split("-"))
                    name = path[0].replace("\\012", "\n")
                    known.append(_Area(begin, end, rights, int(offset, 16), name))
            self._known = known
        return [area for area in self._known if area.begin < high and low < area.end]


def _is_changed(low: int, high: int) -> bool:
    """Whether this process has written to its private copy of a file's pages, or may have."""
    first, last = low // PAGE_NBYTES, -(-high // PAGE_NBYTES)
    try:
        with Path("/proc/self/pagemap").open("rb") as file:
            file.seek(8 * first)
            pages = np.fromfile(file, np.uint64, last - first)
    except OSError:
        return True
    here, of_a_file = pages >> np.uint64(62), pages >> np.uint64(61) & np.uint64(1)
    return len(pages) < last - first or bool(((here != 0) & (of_a_file == 0)).any())


def is_shared(value: Any, files: MappedFiles | None) -> bool:
    """Whether an ndarray or a tensor lies in shared memory of shmloader's, or in one of the mapped files."""
    is_dense = isinstance(value, np.ndarray) or _is_dense(value)
    return is_dense and _handle(value, files, is_sent=False)[1] is not None


def _may_be_mapped(value: Any) -> bool:
    """Whether items may lie in a mapped file. NumPy's views lead to their memmap; any tensor may."""
    while isinstance(value, np.ndarray):
        if isinstance(value, np.memmap):
            return bool(value.nbytes)
        value = value.base
    return isinstance(value, torch.Tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"


def bounds_of(value: Any) -> tuple[int, int]:
    """The addresses of the lowest byte of an array or a tensor, and of the first one behind it."""
    if isinstance(value, torch.Tensor):
        low, item = value.data_ptr(), value.element_size()
        strides: Sequence[int] = [step * item for step in value.stride()]
    else:
        low, item, strides = value.__array_interface__["data"][0], value.itemsize, value.strides
    high = low + item
    for size, step in zip(value.shape, strides, strict=True):
        low, high = low + min(0, (size - 1) * step), high + max(0, (size - 1) * step)
    return low, high


def _handle(value: Any, files: MappedFiles | None, *, is_sent: bool = True) -> tuple[int, Any]:
    """The lowest address of an array or tensor, and a handle of its memory; None if its contents are sent."""
    low, high = bounds_of(value)
    buffer = buffer_at(low, high - low) if high - low >= _LEAST_NBYTES or not is_sent else None
    if buffer is not None:
        is_stale = is_sent and may_be_written(value) and _is_changed(low, high)
        return low, None if is_stale else (buffer, low - buffer.address, high - low)
    return low, files.items_at(low, high) if files is not None and _may_be_mapped(value) else None


def reduce_array(array: _Array, files: MappedFiles | None) -> Any:
    """The pickle of an array by handle; None if it is sent by its contents.

    The other process must be able to open the mapped ``files``, if there are any, by their paths.
    """
    if array.dtype.hasobject or not array.size:
        return None
    low, handle = _handle(array, files)
    if handle is None:
        return None
    offset = array.offset if type(array) is np.memmap else None
    return array_over, (handle, *layout_of(array, low), array.flags.writeable, offset)


def layout_of(value: Any, low: int) -> tuple[Any, ...]:
    """The arguments of `array_over` or `tensor_over` after the memory, which begins at ``low``."""
    if isinstance(value, torch.Tensor):
        return CODE_OF_TORCH_DTYPE[value.dtype], tuple(value.shape), value.stride()
    return ((value.shape, value.dtype, value.__array_interface__["data"][0] - low, value.strides),)


def make_array_reducer() -> Callable[[_Array], Any]:
    """A function like `reduce_array`, for processes that are started together."""
    return functools.partial(reduce_array, files=MappedFiles())


def array_over(handle: Any, layout: Any, writeable: bool = False, offset: int | None = None) -> _Array:
    """An array over shared memory or a mapped file: its shape, dtype, first item and strides there."""
    shape, dtype, begin, strides = layout
    octets = _bytes_over(handle, writable=writeable)
    # Over an array, not over the memory: it cannot be made writeable then.
    array: _Array = np.ndarray(shape, dtype, octets, begin, strides)
    if offset is not None:
        array = array.view(np.memmap)
        array.__array_finalize__(octets)  # file name and mode
        array.offset = offset  # type: ignore[attr-defined]
    if not writeable:
        array.setflags(write=False)
    return array


def _bytes_over(handle: Any, *, writable: bool) -> Any:
    if isinstance(handle, MappedItems):
        return handle.map()
    buffer, offset, nbytes = handle
    return np.frombuffer(buffer.private if writable else buffer.view, np.uint8, nbytes, offset)


def reduce_tensor(tensor: torch.Tensor, files: MappedFiles | None) -> Any:
    """The pickle of a tensor by handle; see `reduce_array`."""
    if tensor.requires_grad or tensor.dtype not in CODE_OF_TORCH_DTYPE or not _is_dense(tensor):
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.nbytes < _LEAST_NBYTES:
        return None
    low, handle = _handle(tensor, files)
    return None if handle is None else (tensor_over, (handle, *layout_of(tensor, low)))


def tensor_over(handle: Any, code: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor over shared memory or a mapped file, by torch's strides."""
    dtype = DTYPES[code]
    octets = np.asarray(_bytes_over(handle, writable=True))
    return wrap_tensor(octets.view(dtype.carrier), dtype.torch_dtype).as_strided(shape, strides).detach()


class _Reducer:
    """A reducer for objects of one type, which ``multiprocessing``'s pickler calls."""

    def __init__(self, kind: type, by_handle: Callable[[Any, MappedFiles | None], Any]) -> None:
        self.by_handle = by_handle
        self._as_usual = _reducer_of(kind)  # torch's, for tensors

    def __call__(self, value: Any) -> Any:
        popen = get_spawning_popen()
        # A worker sends by value: a handle would need a descriptor, and a thread that serves it.
        if popen is not None or parent_process() is None:
            reduced = self.by_handle(value, None if popen is None else _files_for(weakref.ref(popen)))
            if reduced is not None:
                return reduced
        if self._as_usual is not None:
            if isinstance(value, torch.Tensor):  # torch's forgets that a tensor is conjugated or negated
                value = value.resolve_conj().resolve_neg()
            return self._as_usual(value)
        # No reducer is told the protocol; multiprocessing takes the default.
        return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


@functools.lru_cache(maxsize=1)
def _files_for(popen: Any) -> MappedFiles:
    """The files that are mapped while a process is started, to which they are sent by path."""
    return MappedFiles()


def _reducer_of(kind: type) -> Any:
    return ForkingPickler(io.BytesIO()).dispatch_table.get(kind)


def register(kind: type, by_handle: Callable[[Any, MappedFiles | None], Any]) -> None:
    """Make ``multiprocessing``'s pickler, and `pack`, send objects of exactly this type by handle."""
    if not isinstance(_reducer_of(kind), _Reducer):
        ForkingPickler.register(kind, _Reducer(kind, by_handle))


def reduce_arrow_buffer(buffer: Any, _: MappedFiles | None) -> Any:
    """The pickle of a buffer of Arrow's, of which tables and arrays are made; for `register`."""
    found = buffer_at(buffer.address, buffer.size) if buffer.is_cpu and buffer.size >= _LEAST_NBYTES else None
    if found is None:
        return None
    return _arrow_buffer_over, (found, buffer.address - found.address, buffer.size)


def _arrow_buffer_over(buffer: SharedBuffer, offset: int, nbytes: int) -> Any:
    import pyarrow as pa

    return pa.py_buffer(buffer.view[offset : offset + nbytes])


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[SharedBuffer]) -> None:
        super().__init__(file, 5)
        self._buffers = buffers
        self._numbers: dict[int, int] = {}
        self._files = MappedFiles()
        self._reducers = dict(ForkingPickler(file).dispatch_table)

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
        reducer = self._reducers.get(type(value))
        reduced = reducer.by_handle(value, self._files) if isinstance(reducer, _Reducer) else None
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
    """Pickle an object that may contain stores for a process of this host, without the shared memory.

    The buffers that the pickle refers to reach the other process by their descriptors.
    """
    file, buffers = io.BytesIO(), list[SharedBuffer]()
    _Packer(file, buffers).dump(value)
    return file.getvalue(), buffers


def unpack(pickled: bytes | memoryview, buffers: Sequence[SharedBuffer]) -> Any:
    """The object that `pack` pickled, over buffers that are attached here, in the same order."""
    return _Unpacker(io.BytesIO(pickled), buffers).load()
