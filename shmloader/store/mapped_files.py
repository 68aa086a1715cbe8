"""Files that arrays, tensors and stores are mapped from. Other processes of the host get them by path.

A process that maps the same file takes no memory for it beyond the system's file cache. The map of this
process (``/proc/self/smaps``) tells which file lies at an address:

| mapped | elsewhere |
|---|---|
| to be read (``r``) | to be read |
| to be written (``r+``, ``w+``) | ``r+``: what is written is in the file, as in a forked worker |
| for oneself (``c``, ``torch.from_file``) | ``c``: what is written is the process's own |

Contents are sent where the file cannot be found again (it was unlinked or replaced), or where this process
has changed its own copy of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmloader.errors import LoaderError


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
    """Items of an array in a file.

    Attributes:
        path: The file.
        status: Of the file when it was pickled.
        offset: Of the first byte in the file.
        nbytes: How many bytes.
        mode: As of ``numpy.memmap``.
    """

    path: str
    status: os.stat_result
    offset: int
    nbytes: int
    mode: str

    def check(self, now: os.stat_result) -> None:
        """Refuse a file that is another one than before, or too short: reading behind its end is a bus error.

        Raises:
            LoaderError: If it is.
        """
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
    """Memory that maps a file; ``is_changed`` where some pages are not the file's any more."""

    begin: int
    end: int
    rights: str
    offset: int
    path: str
    is_changed: bool


_AREA = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+ +(/.*)\n(?:[A-Z].*\n)*?Anonymous: +(\d+) kB\n"
    r"(?:[A-Z].*\n)*?Swap: +(\d+) kB",
    re.MULTILINE,
)


class MappedFiles:
    """The files that this process has mapped. Looked up once, when the first array is looked for."""

    def __init__(self) -> None:
        self._areas: list[_Area] | None = None

    def items_at(self, low: int, high: int) -> MappedItems | None:
        """The items in a file that lie at these addresses; None if none do.

        Raises:
            LoaderError: If the file has become too short for them.
        """
        areas = [area for area in self._found() if area.begin < high and low < area.end]
        path = areas[0].path if areas else ""
        # torch's own shared memory has names, too, while it lives.
        if not path or path.startswith("/dev/shm/torch_") or not Path(path).is_file():
            return None
        if any(area.path != path or area.is_changed for area in areas):
            return None
        begin, _, rights, offset, _, _ = areas[0]
        mode = ("c" if "p" in rights else "r+") if "w" in rights else "r"
        items = MappedItems(path, Path(path).stat(), offset + low - begin, high - low, mode)
        items.check(items.status)
        return items

    def _found(self) -> list[_Area]:
        if self._areas is None:
            try:
                text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="surrogateescape")
            except OSError:  # the system does not tell
                text = ""
            self._areas = [
                _Area(
                    int(begin, 16),
                    int(end, 16),
                    rights,
                    int(offset, 16),
                    path.replace("\\012", "\n"),
                    private + swapped != "00",
                )
                for begin, end, rights, offset, path, private, swapped in _AREA.findall(text)
            ]
        return self._areas
