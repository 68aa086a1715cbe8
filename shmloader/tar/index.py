"""The index of one tar archive: where the members of each sample lie. Made once, and kept in a file.

Headers are read by Python's ``tarfile``, which follows sizes wherever they lead, and does not look behind the
end. So each member is checked, and that the archive ends where it says.
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

from shmloader.errors import ArchiveError, warn_once
from shmloader.indices.packed_indices import IntArray

_VERSION = 1
_DIGESTED_NBYTES = 1 << 16  # at either end of an archive


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
            return ArchiveIndex._make([file["keys"].tobytes(), *numbers, tuple(map(str, head["extensions"]))])
    except Exception:  # noqa: BLE001 - it is made anew, whatever is wrong with it
        return None


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
    keys: dict[str, None] = {}
    extensions: dict[str, int] = {}
    begins: list[int] = []  # of the samples' members
    numbers = array("q")  # of each member: offset, size, kind
    latest = ""
    with path.open("rb") as file:
        for offset, key, extension, data, size in members_in(path, file, os.fstat(file.fileno()).st_size):
            if key != latest:
                if key in keys:
                    raise ArchiveError(
                        f"{path}, offset {offset:,}: {key}.{extension} belongs to the sample {key!r}, whose "
                        "other members lie before those of other samples. Let the members of a sample follow "
                        "each other"
                    )
                latest, keys[key] = key, None
                begins.append(len(numbers) // 3)
            numbers.extend((data, size, extensions.setdefault(extension, len(extensions))))
    texts = [key.encode("utf-8", "surrogateescape") for key in keys]
    key_ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    ends = np.array([*begins[1:], len(numbers) // 3] if begins else [], np.int64)
    members = np.array(numbers, np.int64).reshape(-1, 3).T.copy()
    return ArchiveIndex._make([b"".join(texts), key_ends, ends, *members, tuple(extensions)])


def _key_and_extension(name: str) -> tuple[str, str]:
    """The key of a file's sample, and its extension in lower case; both empty if it is in no sample."""
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not (stem and extension):
        return "", ""
    return f"{folder}/{stem}" if folder else stem, extension.lower()


def members_in(path: object, file: Any, total: float) -> Iterator[tuple[int, str, str, int, int]]:
    """The members of samples: offset of the header, key, extension, offset and size of the data; checked.

    Args:
        path: The archive's name, for errors.
        file: The archive, which is only read forwards.
        total: Its length in bytes, or infinity.
    """
    latest, extensions = "", set[str]()
    others, other = 0, ""
    for offset, name, data, size in _files_in(path, file, total):
        key, extension = _key_and_extension(name)
        if not key:
            others, other = others + 1, other or name
            if others == 1 and total == math.inf:  # a stream may never come to its end
                _warn_of_others(path, "", other)
            continue
        if key != latest:
            latest, extensions = key, set()
        if extension in extensions:
            raise ArchiveError(f"{path}, offset {offset:,}: the sample {key!r} has two members .{extension}")
        extensions.add(extension)
        yield offset, key, extension, data, size
    if others and total < math.inf:
        _warn_of_others(path, f"{others:,} ", other)


def _warn_of_others(path: object, count: str, first: str) -> None:
    warn_once(f"{path} has {count}file(s) without an extension, such as {first!r}: they are in no sample")


class _Headers(tarfile.TarFile):
    """An archive that `tarfile.TarInfo` reads headers from."""

    def next(self) -> None:
        """Read nothing, when it is opened: this would stop in silence at a header that is damaged."""


def _files_in(path: object, file: Any, total: float) -> Iterator[tuple[int, str, int, int]]:
    """The regular files of an archive: offset of the header, name, offset and size of the data; checked."""
    archive, offset = _Headers(fileobj=file, mode="r"), 0
    while True:
        try:
            file.seek(offset)
            member = tarfile.TarInfo.fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros
            break
        except ArchiveError:
            raise
        except Exception as error:  # tarfile's own are of many classes, where a header is damaged
            what = "there is no header of a tar archive"
            if offset and isinstance(error, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
                what = "it is cut off: the block of zeros at its end is missing"
            hint = ". TarStream reads archives with compression, which have no index"
            raise ArchiveError(
                f"{path}, offset {offset:,}: {what} ({type(error).__name__}: {error!s:.200})"
                f"{hint * (total < math.inf)}"
            ) from error
        _check_member(path, member, archive.offset, total)
        if member.isreg():
            yield member.offset, member.name, member.offset_data, member.size
        offset = archive.offset
    while block := file.read(1 << 20):
        if block.strip(b"\0"):
            raise ArchiveError(
                f"{path}, offset {offset:,}: further data follows its end, as if another archive was appended"
            )


def _check_member(path: object, member: tarfile.TarInfo, end: int, total: float) -> None:
    why, parts = "", member.name.split("/")
    if member.size < 0 or end <= member.offset or member.offset_data + member.size > total:
        why = (
            f"of {member.size:,} bytes does not lie in the archive of {total:,} bytes, which is damaged, or "
            "cut off"
        )
    elif member.name.startswith("/") or ".." in parts or "\0" in member.name:
        why = "is a path outside of the archive"
    elif not (member.isreg() or member.isdir()) or member.issparse():
        why = (
            f"is neither a plain file nor a folder (type {member.type!r}): a sample's data must be in the "
            "archive itself"
        )
    if why:
        raise ArchiveError(f"{path}, offset {member.offset:,}: the member {member.name!r} {why}")
