"""`TarStream`: the samples of tar archives one after another, also of compressed and remote ones."""

from __future__ import annotations

import copy
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from torch.utils.data import IterableDataset

from shmloader.errors import ArchiveError
from shmloader.file_systems import FileSystem, file_system_of
from shmloader.tar.decoders import Decoder, Members
from shmloader.tar.index import members_in

_READ_NBYTES = 1 << 20  # at a time
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}  # by the first bytes of a file

_Raw = tuple[str, dict[str, tuple[int, bytes]]]
"""A sample that is not decoded: its key, and its members' offsets and bytes by extension."""


class TarStream(IterableDataset[dict[str, Any]]):
    """The samples of tar archives in the archives' order, each read once from begin to end, without an index.

    So archives may be compressed (gzip, zstd, bzip2, told by their first bytes), and lie behind URLs. Plain
    archives on a local disk are better read by a `TarDataset`, which gives the same samples by number.

    With ``DataLoader(shard="auto")`` each worker of each rank reads archives of its own. A resumed epoch
    opens no archive that was read, and reads the one that was begun up to its place.

    Args:
        paths: An archive, or several; URLs (``s3://``, ``https://`` and what else Arrow or fsspec knows) too.
        decoders: As for `TarDataset`.
        members: As for `TarDataset`, without its warning.
        filesystem: The file system of the paths: a ``pyarrow.fs.FileSystem`` or one of fsspec's, of which
            each process makes its own. None: that of each URL, or the local one.

    Raises:
        ArchiveError: From the iterator, as from a `TarDataset`; the offset is that in the unpacked archive.
            The iterator then goes on with the next sample, or with the next archive if this one cannot be
            read any further. It does not notice that a sample is in two places of an archive.
        OSError: From the iterator: if an archive cannot be opened.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        decoders: Mapping[str, Decoder] | None = None,
        members: Sequence[str] | None = None,
        filesystem: Any = None,
    ) -> None:
        names = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        if not names:
            raise ValueError("a TarStream needs at least one archive, and was given none")
        self.members = Members(decoders, members)
        given = None if filesystem is None else FileSystem(filesystem)
        self.archives = [(name, *file_system_of(name, given)) for name in names]

    def shard(self, num_shards: int, index: int) -> TarStream:
        """Every ``num_shards``-th archive from ``index`` on, perhaps none."""
        return copy.copy(self)._only(slice(index, None, num_shards))  # noqa: SLF001 - of this class

    def _only(self, part: slice) -> TarStream:
        self.archives = self.archives[part]
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return _Samples(self)

    def raw_samples(self, number: int) -> Iterator[_Raw]:
        """The samples of an archive, by its number, as bytes."""
        name, filesystem, path = self.archives[number]
        with filesystem.opened.open_input_stream(path, compression=None) as opened:
            source = io.BufferedReader(opened, _READ_NBYTES)
            codec = next(
                (codec for begin, codec in _CODECS.items() if source.peek(4).startswith(begin)), None
            )
            if codec is not None:
                source = io.BufferedReader(pa.CompressedInputStream(source, codec), _READ_NBYTES)
            yield from self._grouped(name, _Forwards(name, source))

    def _grouped(self, name: str, file: _Forwards) -> Iterator[_Raw]:
        sample: _Raw = "", {}
        for header, key, extension, begin, nbytes in members_in(name, file, math.inf):
            if key != sample[0]:
                if sample[0]:
                    yield sample
                sample = key, {}
            if self.members.wanted is None or extension in self.members.wanted:
                file.seek(begin)
                sample[1][extension] = begin, file.read(nbytes)
            else:
                file.seek(begin + nbytes)
            if file.tell() < begin + nbytes:
                raise ArchiveError(
                    f"{name}, offset {header:,}: {key}.{extension} of {nbytes:,} bytes is cut off"
                )
        if sample[0]:
            yield sample


class _Samples(Iterator[dict[str, Any]]):
    """An epoch of a `TarStream`, which goes on after an error."""

    def __init__(self, stream: TarStream) -> None:
        self._stream, self._names = stream, [name for name, *_ in stream.archives]
        self._archive, self._taken = 0, 0  # the archive that is read, and samples that were taken from it
        self._open: Iterator[_Raw] | None = None

    def __next__(self) -> dict[str, Any]:
        while self._archive < len(self._names):
            try:
                self._open = self._open or self._opened()
                raw = next(self._open, None)
            except Exception:
                self._go_to(self._archive + 1, 0)
                raise
            except BaseException:
                self._open = None  # it is opened anew, and read up to its place
                raise
            if raw is not None:
                self._taken += 1
                (key, members), name, decode = raw, self._names[self._archive], self._stream.members.decoded
                values = {kind: decode(data, key, kind, name, at) for kind, (at, data) in members.items()}
                return {"__key__": key, **values}
            self._go_to(self._archive + 1, 0)
        raise StopIteration

    def _go_to(self, archive: int, taken: int) -> None:
        self._archive, self._taken, self._open = archive, taken, None

    def _opened(self) -> Iterator[_Raw]:
        samples = self._stream.raw_samples(self._archive)
        there = sum(1 for _ in itertools.islice(samples, self._taken))
        if there < self._taken:
            raise ArchiveError(
                f"{self._names[self._archive]} was changed: it has {there:,} samples, and {self._taken:,} "
                "were read from it before"
            )
        return samples

    def state_dict(self) -> dict[str, Any]:
        """The archive that is read, by number and path, and how many samples were taken from it."""
        path = self._names[self._archive] if self._archive < len(self._names) else None
        return {"archive": self._archive, "path": path, "samples": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a place; ValueError if it is in another archive than it was."""
        self._go_to(state["archive"], state["samples"])
        if (found := self.state_dict()["path"]) != state["path"]:
            raise ValueError(f"archive {self._archive:,} was {state['path']}, and is {found}")


class _Forwards:
    """A file that is only read forwards: what `members_in` needs."""

    def __init__(self, name: str, source: Any) -> None:
        self._name, self._source, self._place = name, source, 0

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        if place < self._place:
            raise ArchiveError(f"{self._name}, offset {place:,}: there is no header of a tar archive")
        while place > self._place and self.read(min(place - self._place, _READ_NBYTES)):
            pass

    def read(self, nbytes: int) -> bytes:
        parts, begin = [], self._place
        try:
            while (left := begin + nbytes - self._place) > 0:
                if not (part := self._source.read(min(left, _READ_NBYTES))):
                    break
                parts.append(part)
                self._place += len(part)
        except (OSError, pa.ArrowException) as error:
            raise ArchiveError(
                f"{self._name}, offset {self._place:,}: it cannot be read further ({error!s:.300})"
            ) from error
        return b"".join(parts)
