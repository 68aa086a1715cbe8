"""Stores saved as files: ordinary Arrow IPC or Parquet, with metadata that tells what the rows are."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as arrow

from shmloader.store.checksums import add_checksums
from shmloader.store.columns.encode import ColumnEncoder, decoded_inside, joined
from shmloader.store.columns.kind import FORM, VERSION, types_in

IPC, PARQUET = (".arrow", ".ipc", ".feather"), (".parquet", ".pq")
"""Suffixes of files."""

FACTORIES = {kind.__name__: kind for kind in (int, float, str, bytes, list, dict, set, tuple, Counter)}
"""Makers of missing values that a file can name."""

_ENCODED_ROWS = 1 << 14


def save(store: Any, path: str | os.PathLike[str]) -> None:
    """Write a store; see `SharedObject.save`."""
    target = Path(path)
    if target.suffix not in IPC + PARQUET:
        names = ", *".join(IPC + PARQUET)
        raise ValueError(
            f"a store is saved as Arrow IPC or Parquet, in a file named *{names}; not as {target.name!r}"
        )
    table = _table_of(store)
    with _replacing(target) as file:
        if target.suffix in PARQUET:
            try:
                pq.write_table(_for_parquet(table), file)
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
                raise TypeError(f"Parquet cannot hold this store ({error}): save it as *.arrow") from error
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        add_checksums(file)


def _table_of(store: Any) -> Any:
    """The rows of a store as a table that says in its metadata what they are."""
    try:
        data = store.to_arrow()
    except TypeError:  # a kind of store of one's own
        if isinstance(store, Mapping):  # its rows are not all that it holds
            raise
        rows, encoder = iter(store), ColumnEncoder()
        chunks = iter(lambda: list(islice(rows, _ENCODED_ROWS)), [])
        data = joined(list(map(encoder.encode, chunks)))
    said: dict[str, Any] = {"version": VERSION, "rows": "table", **store.form}
    if not isinstance(data, pa.Table):
        said["rows"] = said["rows"] if said["rows"] == "set" else "column"
        data = pa.Table.from_arrays([data], names=[""])
    metadata = {**(data.schema.metadata or {}), FORM: json.dumps(said, sort_keys=True).encode()}
    return data.replace_schema_metadata(metadata)


def _for_parquet(table: Any) -> Any:
    """A table without dictionaries of other values than texts: Parquet has none of most of them.

    Of those that it has, of pickled values, Arrow's own reader ends the process.
    """
    if not any(arrow.is_dictionary(kind) for field in table.schema for kind in types_in(field.type)):
        return table
    columns = [pa.chunked_array(list(map(decoded_inside, column.chunks))) for column in table.columns]
    return pa.Table.from_arrays(columns, table.schema.names, metadata=table.schema.metadata)


def form_of(schema: Any) -> dict[str, Any]:
    """The form of rows that a schema's metadata tells; without any, they are rows of a table."""
    said = (schema.metadata or {}).get(FORM)
    return {"rows": "table"} if said is None else json.loads(said)


def form_of_mapping(factory: Callable[[], Any] | None) -> dict[str, Any]:
    """The metadata of a mapping; TypeError if a file cannot name what makes up its missing values."""
    if factory is None:
        return {"rows": "mapping"}
    for name, known in FACTORIES.items():
        if factory is known:
            return {"rows": "mapping", "missing": name}
    raise TypeError(
        f"a file cannot say that missing keys are made by {factory!r}, since opening it would run that: "
        "share and save a plain dict, shmloader.share(dict(data))"
    )


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Any]:
    """A file beside ``target`` that takes its name when it is complete and on the disk.

    Processes that have the old file mapped keep it; writing into it would change what they read, and
    shortening it would end them with a bus error. If ``target`` is a symbolic link, the file that it names is
    replaced.
    """
    real = Path(os.path.realpath(target))
    beside = real.parent / f".{real.name[:50]}-{secrets.token_hex(6)}"
    try:
        file = os.fdopen(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w+b")
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(real)
        except BaseException:
            beside.unlink()
            raise
        folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems have no such thing for folders
                raise
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno is None:  # not the system's
            raise
        # Errors name the file that was asked for; they are of the class that goes with their number.
        raise OSError(error.errno, error.strerror, os.fspath(target)).with_traceback(
            error.__traceback__
        ) from None
