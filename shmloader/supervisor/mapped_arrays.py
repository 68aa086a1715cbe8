"""Arrays over an ``np.memmap``, sent to workers by their file instead of their contents.

A worker maps the same file, so an array takes memory once for all of them: the system's file cache.

| mode | in the worker |
|---|---|
| ``r`` | ``r`` |
| ``r+``, ``w+`` | ``r+``: what a worker writes is in the file, as in a forked worker |
| ``c`` | ``c``: what a worker writes is its own; if the program has changed the array, contents are sent |

Contents are sent also where the file cannot be found again: it was unlinked, renamed or replaced.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shmloader.errors import WorkerStartError
from shmloader.store.handles import reduce_shared_array

_Array = np.ndarray[Any, np.dtype[Any]]
_Mapped = np.memmap[Any, np.dtype[Any]]


class MappedArrayReducers:
    """Reducers of arrays for one pickle; used in the main process while that is written."""

    def __init__(self) -> None:
        self._areas: list[_Area] | None = None

    def table(self) -> dict[type, Callable[[Any], Any]]:
        """The reducers by the exact type that each is for."""
        return {np.ndarray: self._reduce, np.memmap: self._reduce}

    def _reduce(self, array: Any) -> Any:
        owner = _mapped_owner(array)
        if owner is None or not self._is_in_its_file(owner):
            if type(array) is np.memmap:  # whose own pickle would hold the contents once for each worker
                return np.ndarray.view, (np.asarray(array), np.memmap)
            reduced = reduce_shared_array(array)
            return array.__reduce_ex__(5) if reduced is None else reduced
        if owner is array:
            path = Path(str(owner.filename))
            status = path.stat()
            _check_file(path, status, status, owner.offset + owner.nbytes)
            mode = "r+" if owner.mode == "w+" else owner.mode
            order = "C" if owner.flags.c_contiguous else "F"
            return _open, (path, status, (owner.dtype, mode, owner.offset, owner.shape, order))
        begin = _address(array) - _address(owner)
        layout = array.shape, array.dtype, begin, array.strides
        return _view, (owner, layout, array.flags.writeable, type(array) is np.memmap)

    def _is_in_its_file(self, owner: _Mapped) -> bool:
        """Whether the file that bears the name has what the array shows."""
        path = os.path.realpath(str(owner.filename))
        first = _address(owner)
        if self._areas is None:
            self._areas = _areas_of_this_process()
        areas = [area for area in self._areas if area[0] < first + owner.nbytes and first < area[1]]
        if not areas or any(mapped != path for _, _, mapped, _ in areas):
            return False
        return owner.mode != "c" or not any(is_changed for _, _, _, is_changed in areas)


def _mapped_owner(array: _Array) -> _Mapped | None:
    """The ``np.memmap`` of a whole file or part of one whose memory an array shows, if it does."""
    base: Any = array
    while isinstance(base, np.ndarray):
        mapping: Any = base.base
        if isinstance(base, np.memmap) and isinstance(mapping, mmap.mmap):
            return base if base.filename is not None and base.nbytes else None
        base = mapping
    return None


def _address(array: _Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _check_file(path: Path, before: os.stat_result, now: os.stat_result, end: int) -> None:
    """Refuse a file that is another one than before, or too short for an array that ends at a byte of it."""
    if not os.path.samestat(before, now):
        raise WorkerStartError(
            f"the file {str(path)!r}, which the dataset has as an np.memmap, was replaced by another one "
            "while workers were being started. Write to a new file and make a new dataset of that."
        )
    if now.st_size < end:
        raise WorkerStartError(
            f"the file {str(path)!r} was shortened: it has {now.st_size:,} bytes, and the dataset has "
            f"an np.memmap of its first {end:,}. Make the dataset anew after its file has changed."
        )


def _open(path: Path, before: os.stat_result, how: tuple[Any, ...]) -> _Mapped:
    """In the worker: the array again, over the same file, by the arguments of ``np.memmap``."""
    dtype, mode, offset, shape, _ = how
    with path.open("r+b" if mode == "r+" else "rb") as file:
        end = offset + dtype.itemsize * math.prod(shape)
        _check_file(path, before, os.fstat(file.fileno()), end)
        return np.memmap(file, *how)


def _view(owner: _Mapped, layout: tuple[Any, ...], writeable: bool, is_memmap: bool) -> _Array:
    """In the worker: a view of an `_open`ed array, as the main process has it."""
    shape, dtype, begin, strides = layout
    buffer: Any = owner.base
    begin += owner.offset % mmap.ALLOCATIONGRANULARITY  # where np.memmap lets its array begin in the mapping
    view: _Array = np.ndarray(shape, dtype, buffer, begin, strides)
    if is_memmap:
        view = view.view(np.memmap)
        view.__array_finalize__(owner)  # file name, offset and mode
    if not writeable:
        view.flags.writeable = False
    return view


_Area = tuple[int, int, str, bool]
"""Memory that maps a file: first address, end, path, and whether there are pages that are not the file's any
more. The path has " (deleted)" behind it if the file has lost that name."""

_AREA = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)\n(?:[A-Z].*\n)*?Anonymous: +(\d+) kB\n"
    r"(?:[A-Z].*\n)*?Swap: +(\d+) kB",
    re.MULTILINE,
)


def _areas_of_this_process() -> list[_Area]:
    """The areas that map files; none where the system does not tell."""
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [
        (int(first, 16), int(end, 16), path.replace("\\012", "\n"), private + swapped != "00")
        for first, end, path, private, swapped in _AREA.findall(text)
    ]
