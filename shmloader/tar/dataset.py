"""`TarDataset`: a map-style dataset of the samples of tar archives."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from shmloader.errors import ArchiveError, warn
from shmloader.memory.segment import OwnDescriptor
from shmloader.tar.decoders import Decoder, Members
from shmloader.tar.index import index_of

_MOST_OPEN = 128  # archives that a process keeps open


class TarDataset(Dataset[dict[str, Any]]):
    """The samples of tar archives on a local disk, by number: shuffled, divided and resumed as any dataset.

    Members are grouped as WebDataset does it: those that follow each other and whose names are equal up to
    the first dot are one sample. A sample is a dict with the members by extension, and its name as
    ``"__key__"``.

    The archives' headers are read once, when the dataset is made, and the places of all members are kept in
    a file, which is used as long as the archive's size, time, and first and last 64 KiB are the same. Data is
    read by position when a sample is asked for, in any process or thread.

    Args:
        paths: An archive, or several.
        decoders: What makes a value of a member's bytes, by the last part of its extension. Members of other
            extensions stay bytes. None: `shmloader.tar.DECODERS`, for texts, JSON, numbers and images.
        members: The extensions that are wanted. A sample has those of them that it has in the archive;
            others are not read, and one that no archive has is warned of. None: all.
        index_folder: The folder for the files of indices; None: beside each archive.

    Raises:
        ArchiveError: If an archive is damaged, cut off or compressed, or has two members of one name, links,
            or paths that lead outside; with the archive and the offset. From ``dataset[i]``: if a member
            cannot be decoded, or the archive was changed.
        OSError: If an archive cannot be read.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        decoders: Mapping[str, Decoder] | None = None,
        members: Sequence[str] | None = None,
        index_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        if not self.paths:
            raise ValueError("a TarDataset needs at least one archive, and was given none")
        self._wanted = Members(decoders, members)
        folder = None if index_folder is None else Path(index_folder)
        found = [index_of(path, folder) for path in self.paths]
        self._indices, self._identities = [index for index, _ in found], [identity for _, identity in found]
        known = {extension for index in self._indices for extension in index.extensions}
        if missing := sorted((self._wanted.wanted or set()) - known):
            warn(
                f"no member of the archives has the extension(s) {', '.join(missing)}, which `members` asks "
                f"for. They have: {', '.join(sorted(known)) or 'none'}",
                UserWarning,
            )
        self._ends = list(itertools.accumulate(len(index.key_ends) for index in self._indices))
        self._files: dict[int, OwnDescriptor] = {}  # open archives, by number

    def __getstate__(self) -> dict[str, Any]:
        """Without the open archives."""
        return vars(self) | {"_files": {}}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        length = len(self)
        if not -length <= number < length:
            raise IndexError(f"there is no sample {number:,} in archives of {length:,} samples")
        number %= length
        archive = bisect.bisect_right(self._ends, number)
        index = self._indices[archive]
        number -= self._ends[archive] - len(index.key_ends)
        sample: dict[str, Any] = {"__key__": index.key(number)}
        wanted = self._wanted.wanted
        for member in index.members(number):
            extension = index.extensions[int(index.kinds[member])]
            if wanted is None or extension in wanted:
                offset = int(index.offsets[member])
                data = self._data(archive, offset, int(index.sizes[member]))
                sample[extension] = self._wanted.decoded(
                    data, sample["__key__"], extension, self.paths[archive], offset
                )
        return sample

    def _data(self, archive: int, offset: int, size: int) -> bytes:
        file = self._files.get(archive) or self._opened(archive)
        data = os.pread(file.fd, size, offset)
        while len(data) < size:  # the system gives up to 2 GiB at once
            more = os.pread(file.fd, size - len(data), offset + len(data))
            if not more:
                raise ArchiveError(
                    f"{self.paths[archive]}, offset {offset:,}: the index has {size:,} bytes there, and the "
                    f"archive {len(data):,}. It was changed since"
                )
            data += more
        self._check(archive, os.fstat(file.fd))  # it may be rewritten while it is open
        return data

    def _check(self, archive: int, status: os.stat_result) -> None:
        """Raise if an archive is another than when its index was made."""
        identity = self._identities[archive]
        if (status.st_size, status.st_mtime_ns) != identity[:2]:
            raise ArchiveError(
                f"{self.paths[archive]} was changed since its index was made: it has {status.st_size:,} "
                f"bytes, and had {identity.size:,}. Make a new TarDataset"
            )

    def _opened(self, archive: int) -> OwnDescriptor:
        file = OwnDescriptor(os.open(self.paths[archive], os.O_RDONLY | os.O_CLOEXEC))
        self._check(archive, os.fstat(file.fd))
        if len(self._files) < _MOST_OPEN:
            file = self._files.setdefault(archive, file)
        return file
