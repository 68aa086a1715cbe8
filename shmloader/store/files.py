"""Files opened as stores, without running any code.

A mapped file is read in place; all processes of the host share the pages that were read, and the kernel may
drop them again. Other processes get it by its path. Data that has to be decoded (Parquet, compressed IPC)
goes into shared memory, batch by batch.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as arrow

from shmloader.errors import LoaderError
from shmloader.memory.mapping import make_writable
from shmloader.store.checksums import FILE_MAGIC, PARQUET_MAGIC, check
from shmloader.store.chunks import Chunks
from shmloader.store.columns.classes import Classes, ClassFinder
from shmloader.store.columns.kind import VERSION, PythonType, find_types, types_in
from shmloader.store.columns.mixed import Links
from shmloader.store.columns.records import Keys
from shmloader.store.columns.values import Pickles
from shmloader.store.description import listed
from shmloader.store.handles import Fingerprint
from shmloader.store.mapping import KeyIndex, MappingStore, SetStore, index_of
from shmloader.store.memory import MemoryWriter
from shmloader.store.rows import DAMAGES, RowStore
from shmloader.store.saving import FACTORIES, IPC, PARQUET, form_of
from shmloader.store.sealed_buffer import SharedBuffer

FilePath = str | os.PathLike[str]

_BATCH_NBYTES, _MOST_BATCH_ROWS = 16 << 20, 1 << 16  # of Parquet that is decoded at once, about
_SAMPLED_GROUPS, _SAMPLED_ROWS = 16, 64
_DICTIONARY_SHARE = 8  # a batch is so many times as large as its dictionaries
_MOST_VERIFIED_NBYTES = 64 << 20  # of mapped files, where nobody asked for it: some 50 ms
_READ_NBYTES = 1 << 20  # at a time; else Arrow reads a whole column of a row group

_STREAM_MAGIC = b"\xff\xff\xff\xff"


def open_store(
    path: FilePath | Sequence[FilePath],
    *,
    columns: Sequence[str] | None = None,
    allow_pickle: bool = False,
    verify: bool | None = None,
) -> Any:
    """Open files as a store; see `shmloader.store.open_store`."""
    check_names(columns)
    found = [str(Path(one).resolve()) for each in paths_of(path) for one in files_of(each)]
    check_files(found, verify)
    form = checked_rows(found, _schema_of, columns, allow_pickle=allow_pickle)
    chunks = _chunks_of(found, columns, allow_pickle)
    with naming(found[0]):
        store = RowStore(chunks)
        if form["rows"] not in ("mapping", "set"):
            return store
        is_mapping = form["rows"] == "mapping"
        index = index_of(store.column("key") if is_mapping and len(store) else store)
    if len(found) > 1:
        _check_keys(index, chunks)
    if not is_mapping:
        return SetStore(store, index)
    return MappingStore(store, index, FACTORIES[form["missing"]] if "missing" in form else None)


def _check_keys(index: KeyIndex, chunks: Chunks) -> None:
    """Refuse files that have a key in common: which value it has would depend on the way it is read."""
    rows = index.rows_of_one_key()
    if rows:
        first, second = (chunks.sources[bisect_right(chunks.starts, row) - 1] for row in rows)
        raise ValueError(
            f"{second} has the key {index.keys[rows[0]]!r:.200}, which {first} has too. Files that are "
            "opened together need different keys: open each by itself, and share what you make of them, such "
            "as shmloader.share({**one, **other}), or one | other of sets"
        )


def paths_of(path: FilePath | Sequence[FilePath]) -> list[str]:
    """The paths that are given, one or several; FileNotFoundError if there is none."""
    paths: Sequence[Any] = path if isinstance(path, list | tuple) else [path]
    if not paths or "" in paths:  # pathlib takes "" for the current folder
        raise FileNotFoundError(f"path={path!r} names no file")
    return list(map(os.fspath, paths))


def check_names(columns: Sequence[str] | None) -> None:
    """Refuse one name in place of a list of names."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, such as [{columns!r}], not one name")


def check_files(paths: Sequence[str], verify: bool | None) -> None:
    """Compare files with their checksums; with None all if they are small, else those that are unpacked."""
    if verify is False:
        return
    is_small = sum(Path(path).stat().st_size for path in paths) <= _MOST_VERIFIED_NBYTES
    for path in paths:
        with naming(path):
            is_read = verify or is_small or _magic_of(path) == PARQUET_MAGIC
            if is_read and not check(path) and verify:
                raise ValueError(f"{path} has no checksums, which store.save writes: leave verify=True out")


def checked_rows(
    paths: Sequence[str],
    schema_of: Callable[[str], Any],
    columns: Sequence[str] | None,
    *,
    allow_pickle: bool,
) -> dict[str, Any]:
    """The form of the rows of several files, which must all have the same; see `form_of`."""
    form: dict[str, Any] = {}
    names: list[str] = []
    for one in paths:
        with naming(one):
            schema = schema_of(one)
            _check_columns(one, schema, columns, allow_pickle=allow_pickle)
            new_form = _checked_form(schema)
        new_names = [name for name in schema.names if name != Keys.NAME]
        is_alike = all(new_form.get(key) == form.get(key) for key in ("rows", "missing"))
        if one != paths[0] and not (is_alike and new_names == names):
            raise ValueError(
                f"{one} has other rows than {paths[0]}: {new_form['rows']} of {listed(new_names)} "
                f"instead of {form['rows']} of {listed(names)}"
            )
        names, form = new_names, new_form
    if columns is not None and form["rows"] != "table":
        raise ValueError(f"{paths[0]} holds no records, so no columns can be chosen from it")
    return form


def files_of(path: str) -> list[str]:
    """The files that a path or pattern means."""
    if Path(path).is_dir():
        found = sorted(str(one) for one in Path(path).iterdir() if one.suffix in IPC + PARQUET)
    elif Path(path).exists() or not glob.has_magic(path):
        return [path]
    else:
        found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - a pattern may be absolute
    if not found:
        raise FileNotFoundError(f"{path} matches no Arrow or Parquet file")
    return found


@contextlib.contextmanager
def naming(name: str, *, is_remote: bool = False) -> Iterator[None]:
    """Make errors of a damaged file name it, or the part that is read, and be ValueErrors.

    Arrow raises OSError for damaged data, and for what a server refuses: of remote files it stays that.
    """
    try:
        yield
    except DAMAGES as error:
        is_refusal = isinstance(error, FileNotFoundError | PermissionError)  # of fsspec without a number
        of_the_system = is_refusal or (isinstance(error, OSError) and error.errno is not None)
        if name in str(error) or of_the_system or isinstance(error, LoaderError):
            raise
        kind = OSError if is_remote and isinstance(error, OSError) else ValueError
        raise kind(
            f"{name} is damaged, no file of Arrow's, or one that pyarrow {pa.__version__} cannot read: "
            f"{type(error).__name__}: {error!s:.500}"
        ) from error


def _magic_of(path: str) -> bytes:
    with Path(path).open("rb") as file:
        begin = file.read(len(FILE_MAGIC))
    for magic in (PARQUET_MAGIC, FILE_MAGIC, _STREAM_MAGIC):
        if begin.startswith(magic):
            return magic
    raise ValueError(
        f"{path} is neither Arrow IPC nor Parquet. A store is written by store.save(path); other data can be "
        "read and passed to shmloader.share"
    )


def _schema_of(path: str) -> Any:
    if _magic_of(path) == PARQUET_MAGIC:
        return pq.read_schema(path)
    return _reader_of(FileBuffer(path, Fingerprint.of(path))).schema


def _checked_form(schema: Any) -> dict[str, Any]:
    form = form_of(schema)
    if form.get("version", VERSION) > VERSION:
        raise ValueError(f"it was written by a newer shmloader (version {form['version']} of the format)")
    names = {"table": None, "column": 1, "set": 1, "mapping": 2}
    if form["rows"] not in names or names[form["rows"]] not in (None, len(schema.names)):
        raise ValueError(
            f"its metadata says that its rows are {form['rows']!r}, with {len(schema.names)} columns"
        )
    return form


def _check_columns(path: str, schema: Any, columns: Sequence[str] | None, *, allow_pickle: bool) -> None:
    fields = [field for field in schema if columns is None or field.name in columns]
    for name in columns or ():
        if schema.names.count(name) != 1:
            raise KeyError(f"{path} has no column {name!r}; it has {listed(schema.names)}")
    if columns is not None and len(set(columns)) < len(columns):
        raise ValueError(f"columns={list(columns)!r} for {path} name one more than once")
    pickled = [name or "rows" for field in fields for name, _ in find_types(field.type, Pickles, field.name)]
    if pickled and not allow_pickle:
        raise ValueError(
            f"{path} has pickled values ({', '.join(dict.fromkeys(pickled))}), and unpickling runs code. "
            "If you trust the file's source: shmloader.open(path, allow_pickle=True); or choose "
            "other columns, columns=[...]"
        )
    try:
        ClassFinder().find_all(kind for field in fields for kind in types_in(field.type))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if any(find_types(field.type, Links) for field in fields):
        raise ValueError("it has columns that refer to others, which no file has")


def _chunks_of(paths: list[str], columns: Sequence[str] | None, allow_pickle: bool) -> Chunks:
    if all(_magic_of(path) != PARQUET_MAGIC for path in paths):
        with naming(paths[0]), contextlib.suppress(_UnmappableError):
            return chunks_in_files(
                [(path, Fingerprint.of(path)) for path in paths], columns, allow_pickle, {}
            )
    with MemoryWriter() as writer:
        table = writer.table()
        for path in paths:
            with naming(path):
                for batch in _decoded_batches(path, columns):
                    batch.validate(full=True)
                    table.append_batch(batch)
                    table.sources.append(path)
        return writer.chunks(table, writer.seal(), pickles=allow_pickle)


class _UnmappableError(Exception):
    """A file's buffers are compressed."""


def _decoded_batches(path: str, columns: Sequence[str] | None) -> Iterator[Any]:
    """The batches of a file that cannot be mapped, one by one."""
    if _magic_of(path) == PARQUET_MAGIC:
        with pq.ParquetFile(path, buffer_size=_READ_NBYTES, pre_buffer=False) as parquet:
            chosen = None if columns is None else [*columns, Keys.NAME]
            kinds = [one for kind in parquet.schema_arrow.types for one in types_in(kind)]
            if any(isinstance(one, PythonType) and arrow.is_dictionary(one.storage_type) for one in kinds):
                # For these, Arrow's iter_batches ends the process.
                for group in range(parquet.num_row_groups):
                    yield from parquet.read_row_group(group, columns=chosen, use_threads=False).to_batches()
            else:
                yield from parquet.iter_batches(_rows_at_once(parquet, chosen), columns=chosen)
    else:
        for batch in _batches_in(FileBuffer(path, Fingerprint.of(path))):
            yield _chosen(batch, columns)


def _rows_at_once(parquet: pq.ParquetFile, columns: Sequence[str] | None) -> int:
    """About as many rows as take `_BATCH_NBYTES`: by the file's own account, and by its first rows.

    That account has a value once that repeats. Each batch has dictionaries as a whole: it is larger then.
    """
    metadata, sizes, most = parquet.metadata, [1.0], _BATCH_NBYTES
    begins = "" if columns is None else tuple(f"{name}." for name in columns)
    leaves = [n for n in range(len(parquet.schema)) if f"{parquet.schema.column(n).path}.".startswith(begins)]
    for number in range(0, metadata.num_row_groups, -(-metadata.num_row_groups // _SAMPLED_GROUPS) or 1):
        for batch in parquet.iter_batches(_SAMPLED_ROWS, row_groups=[number], columns=columns):
            dictionaries = [one for one in batch.columns if any(map(arrow.is_dictionary, types_in(one.type)))]
            words_nbytes = sum(column.nbytes for column in dictionaries)
            sizes.append((batch.nbytes - words_nbytes) / max(1, len(batch)))
            most = max(most, _DICTIONARY_SHARE * words_nbytes)
            # Only once that was read: of damaged columns, asking for the metadata would end the process.
            group = metadata.row_group(number)
            account_nbytes = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
            sizes.append(account_nbytes / max(1, group.num_rows))
            break
    return max(1, min(_MOST_BATCH_ROWS, int(most / max(sizes))))


def _reader_of(memory: FileBuffer) -> Any:
    """Arrow's reader of an IPC file or stream."""
    whole, begin = pa.py_buffer(memory.view), memory.view[: len(FILE_MAGIC)]
    return pa.ipc.open_file(whole) if begin == FILE_MAGIC else pa.ipc.open_stream(whole)


def _batches_in(memory: FileBuffer) -> Iterator[Any]:
    """The batches of an Arrow IPC file or stream. Of these lengths are checked, but no contents."""
    reader = _reader_of(memory)
    is_file = isinstance(reader, pa.RecordBatchFileReader)
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
        batch.validate()
        yield batch


def _chosen(batch: Any, columns: Sequence[str] | None) -> Any:
    """Some columns of a batch, and which keys its rows have."""
    if columns is None:
        return batch
    keys = [name for name in batch.schema.names if name == Keys.NAME and name not in columns]
    return batch.select([*columns, *keys])


class FileBuffer(SharedBuffer):
    """A mapped file. It is pickled by its ``path``, to any process of any host that sees the file."""

    __slots__ = ("_fingerprint", "_is_writable", "path")

    def __init__(self, path: str, fingerprint: Fingerprint) -> None:
        """Map a file, which must still be the one with this fingerprint."""
        super().__init__(fingerprint.open(path), fingerprint.nbytes, mmap.PROT_READ)
        fd, self.fd = self.fd, -1
        os.close(fd)  # the mapping needs it no more, and there may be many files
        self.path = path
        self._fingerprint = fingerprint
        self._is_writable = False

    @property
    def private(self) -> memoryview:
        """The bytes, privately writable from the first call on, since only tensors need it."""
        if not self._is_writable:  # in place: another file may have the path by now
            make_writable(self.address, self.nbytes)
            self._is_writable = True
        return super().private

    def __reduce__(self) -> Any:
        return FileBuffer, (self.path, self._fingerprint)


def chunks_in_files(
    files: list[tuple[str, Fingerprint]], columns: Sequence[str] | None, pickles: bool, classes: Classes
) -> Chunks:
    """Chunks in mapped files: their record batches."""
    batches: list[Any] = []
    where: list[SharedBuffer] = []
    memories: list[FileBuffer] = []
    sources: list[str] = []
    for path, fingerprint in files:
        with naming(path):
            memories.append(memory := FileBuffer(path, fingerprint))
            begin = len(batches)
            for batch in _batches_in(memory):
                if len(batches) == begin:  # before a second one is unpacked
                    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
                    if not all(memory.holds(buffer.address) for buffer in buffers):
                        raise _UnmappableError
                if batch.num_rows:
                    batches.append(_chosen(batch, columns))
                    where.append(memory)
                    sources.append(path)
    nbytes = sum(memory.nbytes for memory in memories)
    made_by = chunks_in_files, files, columns, pickles
    return Chunks(where, batches, nbytes, classes, made_by, pickles=pickles, sources=sources)
