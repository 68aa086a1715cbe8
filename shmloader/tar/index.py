"""The index of one tar archive: where the members of each sample lie. Made once, and kept in a file.

Headers are read by Python's ``tarfile``. It stops in silence at a header that it cannot read, and follows
sizes wherever they lead. So each step is checked, and that the archive ends where it says.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tarfile
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmloader.errors import ArchiveError, warn, warn_once
from shmloader.indices.packed_indices import IntArray

_VERSION = 1
_DIGESTED_NBYTES = 1 << 16  # at either end of an archive
_ZEROS = bytes(tarfile.BLOCKSIZE)


class ArchiveIndex(NamedTuple):
    """The samples of an archive: for each its key, and its members one after another."""

    keys: bytes  # UTF-8 text of all keys
    key_ends: IntArray  # where each sample's key ends in it, shape ``(samples,)``
    member_ends: IntArray  # where each sample's members end in the next three, shape ``(samples,)``
    offsets: IntArray  # of the members' data in the archive, in bytes, shape ``(members,)``
    sizes: IntArray  # of the members' data, in bytes
    kinds: IntArray  # the places of the members' extensions in `extensions`
    extensions: tuple[str, ...]  # without the first dot, in lower case

    def key(self, sample: int) -> str:
        """The key of a sample."""
        begin = int(self.key_ends[sample - 1]) if sample else 0
        return self.keys[begin : int(self.key_ends[sample])].decode("utf-8", "surrogateescape")

    def members(self, sample: int) -> range:
        """The places of a sample's members."""
        return range(int(self.member_ends[sample - 1]) if sample else 0, int(self.member_ends[sample]))


class Identity(NamedTuple):
    """The identity of an archive: the one that an index was made of has the same."""

    size: int
    mtime_ns: int
    digest: str


def identity_of(path: Path) -> Identity:
    """The size, time and digest of an archive's first and last 64 KiB."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.blake2b(file.read(_DIGESTED_NBYTES), digest_size=16)
        file.seek(max(status.st_size - _DIGESTED_NBYTES, 0))
        digest.update(file.read())
    return Identity(status.st_size, status.st_mtime_ns, digest.hexdigest())


def index_of(path: Path, folder: Path | None) -> tuple[ArchiveIndex, Identity]:
    """The index of an archive: that which is kept in a folder, or beside the archive; or a new one."""
    identity = identity_of(path)
    kept = path.with_name(f"{path.name}.index")
    if folder is not None:
        place = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=8).hexdigest()
        kept = folder / f"{path.name}.{place}.index"
    index = _read(kept, identity)
    if index is None:
        index = make_index(path)
        if identity_of(path) != identity:
            raise ArchiveError(f"{path} was changed while its index was made")
        _keep(index, identity, kept, path.stat().st_mode & 0o666)
    return index, identity


def _read(kept: Path, identity: Identity) -> ArchiveIndex | None:
    """The index in a file; None if there is none, or it is another archive's or damaged."""
    try:
        # Not by its name: numpy leaves a damaged file open.
        with kept.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            head = json.loads(file["head"].tobytes())
            if head["version"] != _VERSION or Identity(*head["identity"]) != identity:
                return None
            numbers = [file[name].astype(np.int64, casting="safe") for name in ArchiveIndex._fields[1:6]]
            index = ArchiveIndex._make(
                [file["keys"].tobytes(), *numbers, tuple(map(str, head["extensions"]))]
            )
    except Exception:  # noqa: BLE001 - it is made anew, whatever is wrong with it
        return None
    return index if _is_whole(index, identity.size) else None


def _is_whole(index: ArchiveIndex, size: int) -> bool:
    key_ends, member_ends, members = index.key_ends, index.member_ends, len(index.offsets)
    plain = all(array.ndim == 1 for array in index[1:6])
    if not (plain and len(key_ends) == len(member_ends) and len(index.sizes) == len(index.kinds) == members):
        return False
    for ends, total in ((key_ends, len(index.keys)), (member_ends, members)):
        if (np.diff(ends, prepend=0) <= 0).any() or (ends[-1] if len(ends) else 0) != total:
            return False
    inside = (index.offsets >= 0) & (index.sizes >= 0) & (index.sizes <= size - index.offsets)
    return bool(inside.all() and ((index.kinds >= 0) & (index.kinds < len(index.extensions))).all())


def _keep(index: ArchiveIndex, identity: Identity, kept: Path, mode: int) -> None:
    """Keep an index in a file that all can read who can read the archive."""
    head = json.dumps({"version": _VERSION, "identity": identity, "extensions": index.extensions}).encode()
    arrays = {name: getattr(index, name) for name in ArchiveIndex._fields[1:6]}
    texts = {"head": np.frombuffer(head, np.uint8), "keys": np.frombuffer(index.keys, np.uint8)}
    try:
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=f".{kept.name}.", delete=False) as file:
            try:
                np.savez(file, allow_pickle=False, **arrays, **texts)
                os.fchmod(file.fileno(), mode)  # tempfile lets only this user read
                file.close()
                Path(file.name).replace(kept)
            except BaseException:
                Path(file.name).unlink()
                raise
    except OSError as error:
        warn_once(
            f"the index of a tar archive cannot be kept as {kept} ({error}), and is made anew each time: "
            "pass an index_folder that can be written"
        )


def make_index(path: Path) -> ArchiveIndex:
    """Read all headers of an archive.

    Raises:
        ArchiveError: If it is damaged or cut off, or has members that are no samples' files or lie outside.
    """
    keys: dict[str, set[str]] = {}
    extensions: dict[str, int] = {}
    begins: list[int] = []  # of the samples' members
    numbers = array("q")  # of each member: offset, size, kind
    others: list[str] = []
    latest = None
    for offset, name, data, size in _files(path):
        key, extension = key_and_extension(name)
        if not extension:
            others.append(name)
            continue
        if key != latest:
            if key in keys:
                raise ArchiveError(
                    f"{path}, offset {offset:,}: {name!r} belongs to the sample {key!r}, whose other members "
                    "lie before those of other samples. Let the members of a sample follow each other"
                )
            latest, keys[key] = key, set()
            begins.append(len(numbers) // 3)
        if extension in keys[key]:
            raise ArchiveError(f"{path}, offset {offset:,}: the sample {key!r} has two members .{extension}")
        keys[key].add(extension)
        numbers.extend((data, size, extensions.setdefault(extension, len(extensions))))
    if others:
        warn(
            f"{path} has {len(others):,} file(s) without an extension, such as {others[0]!r}: they are in no "
            "sample",
            UserWarning,
        )
    texts = [key.encode("utf-8", "surrogateescape") for key in keys]
    key_ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    ends = np.array([*begins[1:], len(numbers) // 3] if begins else [], np.int64)
    members = np.array(numbers, np.int64).reshape(-1, 3).T.copy()
    return ArchiveIndex._make([b"".join(texts), key_ends, ends, *members, tuple(extensions)])


def _files(path: Path) -> Iterator[tuple[int, str, int, int]]:
    with path.open("rb") as file:
        yield from files_in(path, file, os.fstat(file.fileno()).st_size)


def key_and_extension(name: str) -> tuple[str, str]:
    """The key of a file's sample, and its extension in lower case; both empty if it is in no sample."""
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not (stem and extension):
        return "", ""
    return f"{folder}/{stem}" if folder else stem, extension.lower()


def files_in(path: object, file: Any, total: float) -> Iterator[tuple[int, str, int, int]]:
    """The regular files of an archive: offset of the header, name, offset and size of the data; checked.

    Args:
        path: The archive's name, for errors.
        file: The archive, which is only read forwards, but for the last block.
        total: Its length in bytes, or infinity.
    """
    offset = 0
    try:
        archive = tarfile.TarFile(fileobj=file, mode="r")
        while (member := archive.next()) is not None:
            end = member.offset_data + max(member.size, 0)
            if archive.offset <= offset or member.size < 0 or end > total:
                raise ArchiveError(
                    f"{path}, offset {member.offset:,}: the member {member.name!r} of {member.size:,} "
                    f"bytes does not lie in the archive of {total:,} bytes, which is damaged, or cut off"
                )
            _check_member(path, member)
            if member.isreg():
                yield member.offset, member.name, member.offset_data, member.size
            offset = archive.offset
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
    except (ArchiveError, GeneratorExit):
        raise
    except Exception as error:  # tarfile's own are of many classes, where a header is damaged
        hint = "" if total == math.inf else ". TarStream reads archives with compression, which have no index"
        raise ArchiveError(
            f"{path}, offset {offset:,}: there is no header of a tar archive ({type(error).__name__}: "
            f"{error!s:.200}){hint}"
        ) from error
    _check_end(path, file, offset)


def _check_member(path: object, member: tarfile.TarInfo) -> None:
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or "\0" in member.name:
        raise ArchiveError(
            f"{path}, offset {member.offset:,}: {member.name!r} is a path outside of the archive"
        )
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise ArchiveError(
            f"{path}, offset {member.offset:,}: {member.name!r} is neither a plain file nor a folder (type "
            f"{member.type!r}): a sample's data must be in the archive itself"
        )


def _check_end(path: object, file: Any, offset: int) -> None:
    """Check that an archive ends with blocks of zeros, of which `tarfile` does not tell."""
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    what = "it is cut off: the block of zeros at its end is missing"
    if block == _ZEROS:
        what = ""
        while block := file.read(1 << 20):
            if block.strip(b"\0"):
                what = "further data follows its end, as if another archive was appended"
                break
    elif block:
        what = "there is no header of a tar archive"
    if what:
        raise ArchiveError(f"{path}, offset {offset:,}: {what}")
