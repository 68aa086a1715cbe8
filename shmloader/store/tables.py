"""Stores as Arrow tables, and tables as files: ordinary Arrow IPC or Parquet.

Chunks that differ in their types become columns of one type. Integers get the width that all need, and nulls
are taken over. Dictionaries are joined. Where chunks hold different things, these values are read and encoded
together, mostly as a dense union of what they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as arrow

from shmloader.store.columns.arrays import of_any_shape
from shmloader.store.columns.buffers import numbers_to_arrow
from shmloader.store.columns.compiled import Scope, ends_of
from shmloader.store.columns.encode import (
    ColumnEncoder,
    ascend,
    can_be_null,
    keys_to_arrow,
    merged_order,
    with_nulls,
)
from shmloader.store.columns.read import make_reader
from shmloader.store.columns.types import (
    VERSION,
    ArrayType,
    DataclassType,
    KeysType,
    PickleType,
    PythonType,
    dictionary_inside,
    dictionary_outside,
    is_list,
    is_octets,
    is_text,
    mask_of,
    types_in,
)

IPC, PARQUET = (".arrow", ".ipc", ".feather"), (".parquet", ".pq")
"""Suffixes of files."""

FORM = b"shmloader"
"""Key of the schema's metadata."""

FACTORIES = {kind.__name__: kind for kind in (int, float, str, bytes, list, dict, set, tuple, Counter)}
"""Makers of missing values that a file can name."""

_ENCODED_ROWS = 1 << 14

_INTS = {
    pa.int8(): 1,
    pa.int16(): 2,
    pa.int32(): 4,
    pa.int64(): 8,
    pa.uint8(): 2,
    pa.uint16(): 4,
    pa.uint32(): 8,
}
"""Integers, with the bytes that their values need as integers with a sign."""

_WIDE = (pa.large_string(), pa.large_binary(), pa.float64())
_SIGNED = {1: pa.int8(), 2: pa.int16(), 4: pa.int32(), 8: pa.int64()}


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
            return
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)


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
    columns = [pa.chunked_array(list(map(_decoded_inside, column.chunks))) for column in table.columns]
    return pa.Table.from_arrays(columns, table.schema.names, metadata=table.schema.metadata)


def form_of(schema: Any) -> dict[str, Any]:
    """What the metadata of a schema says of the rows; without any, they are those of a table."""
    said = (schema.metadata or {}).get(FORM)
    return {"rows": "table"} if said is None else json.loads(said)


def form_of_mapping(factory: Callable[[], Any] | None) -> dict[str, Any]:
    """The metadata of a mapping.

    Args:
        factory: The function that makes up missing values, if there is one.

    Raises:
        TypeError: If a file cannot name that function.
    """
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
        file = os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")
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
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno is None:  # not the system's
            raise
        # Errors name the file that was asked for; they are of the class that goes with their number.
        raise OSError(error.errno, error.strerror, os.fspath(target)).with_traceback(
            error.__traceback__
        ) from None


# --- chunks as one table


def joined(columns: list[Any]) -> Any:
    """Chunks of rows as a ``Table``, where all are records with fields, else as a ``ChunkedArray``."""
    columns = united(columns)
    kind = columns[0].type if columns else pa.null()
    if not arrow.is_struct(kind) or not kind.num_fields or any(column.null_count for column in columns):
        return pa.chunked_array(columns, kind)
    batches = [pa.RecordBatch.from_struct_array(column) for column in columns]
    return pa.Table.from_batches(batches, pa.schema(list(kind)))


def united(parts: list[Any]) -> list[Any]:
    """Arrays with the values of these, all of one type."""
    kind = parts[0].type if parts else None
    is_alike = all(part.type == kind for part in parts)
    if len(parts) < 2 or (is_alike and not any(map(arrow.is_dictionary, types_in(kind)))):
        return parts
    parts = list(map(dictionary_outside, parts))
    filled = [part for part in parts if not arrow.is_null(part.type)]
    if all(arrow.is_dictionary(part.type) for part in filled):
        result = _united_dictionaries(filled)
    else:
        filled = [_decoded(part) for part in filled]
        forms = {_form(part.type) for part in filled}
        is_single = len(forms) == 1 and not arrow.is_union(filled[0].type) and _are_in_one_order(filled)
        if not is_single or (len(filled) < len(parts) and not can_be_null(filled[0].type)):
            return _encoded_anew(parts)
        result = _united_alike(filled)
    rest = iter(result)
    return [
        with_nulls(result[0][:0], np.zeros(len(part), np.bool_)) if arrow.is_null(part.type) else next(rest)
        for part in parts
    ]


def _decoded(column: Any) -> Any:
    return column.dictionary.take(column.indices) if arrow.is_dictionary(column.type) else column


def _decoded_inside(column: Any) -> Any:
    """A column without dictionaries, at any depth, but for those of texts."""
    column = dictionary_outside(column)
    kind = column.type
    if arrow.is_dictionary(kind):
        is_plain = is_text(kind.value_type) or is_octets(kind.value_type)
        return column if is_plain else _decoded_inside(_decoded(column))
    if isinstance(kind, PythonType):
        storage = _decoded_inside(column.storage)
        return kind.over(storage.type).wrap(storage)
    if arrow.is_struct(kind) and kind.num_fields:
        fields = [_decoded_inside(column.field(number)) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, [field.name for field in kind], mask=mask_of(column))
    if _form(kind) == "list":
        size = getattr(kind, "list_size", None)
        return _list_over(_decoded_inside(column.values), column, size, is_large=arrow.is_large_list(kind))
    return column


def _form(kind: Any) -> Any:
    """The form of a type: the values of types of one form fit into one type that is no union."""
    if kind in _INTS:
        return "int"
    if kind in (pa.float32(), pa.float64()):
        return "float"
    if is_text(kind):
        return "text"
    if is_octets(kind):
        return "bytes"
    if is_list(kind) or arrow.is_fixed_size_list(kind):
        return "list"
    if arrow.is_struct(kind):
        return "struct"
    if arrow.is_dictionary(kind):
        return _form(kind.value_type)
    if not isinstance(kind, PythonType):
        return str(kind)
    storage, said = kind.storage_type, kind.parameters
    names = [field.name for field in storage] if arrow.is_struct(storage) and "python" not in said else []
    if isinstance(kind, ArrayType):
        return kind.NAME, said["dtype"], said.get("tensor"), said.get("ndim") or len(said["shape"])
    said = {} if isinstance(kind, PickleType | KeysType) else said
    return kind.NAME, json.dumps(said, sort_keys=True), _form(storage), *names


def _united_alike(parts: list[Any]) -> list[Any]:
    """Arrays of one form as arrays of one type."""
    kind = parts[0].type
    if isinstance(kind, PythonType):
        if isinstance(kind, PickleType):
            names = sorted({name for part in parts for name in part.type.parameters["types"]})
            kind = PickleType(kind.storage_type, types=names)
        if isinstance(kind, ArrayType) and len({str(part.type.parameters) for part in parts}) > 1:
            parts = list(map(of_any_shape, parts))
            kind = parts[0].type
        # The order of a dataclass's attributes means nothing.
        unite = _united_structs if isinstance(kind, DataclassType) else united
        storages = unite([part.storage for part in parts])
        return [kind.over(storage.type).wrap(storage) for storage in storages]
    if arrow.is_struct(kind):
        return _united_structs(parts)
    if _form(kind) == "list":
        return _united_lists(parts)
    kinds = {part.type for part in parts}
    if kind in _INTS:
        kind = _SIGNED[max(map(_INTS.__getitem__, kinds))] if len(kinds) > 1 else kind
    else:
        kind = next((one for one in kinds if one in _WIDE), kind)
    return [part.cast(kind) for part in parts]


def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in kind if field.name != KeysType.NAME)


def _are_in_one_order(parts: list[Any]) -> bool:
    """Whether one order of all fields is each struct's own too: dicts have their keys in it."""
    if not arrow.is_struct(parts[0].type):
        return True
    names_of = {_names_of(part.type) for part in parts}
    places = {name: place for place, name in enumerate(merged_order(names_of))}
    return all(ascend(map(places.__getitem__, some)) for some in names_of)


def _united_structs(parts: list[Any]) -> list[Any]:
    """Structs with the fields of all, and a column of the keys where not all have all."""
    names_of = [tuple(field.name for field in part.type) for part in parts]
    names = merged_order([_names_of(part.type) for part in parts])
    if not names:  # empty dicts: a struct that is made of no columns would have no rows
        return parts
    columns = []
    for name in names:
        found = [
            part.field(some.index(name)) if name in some else pa.nulls(len(part))
            for part, some in zip(parts, names_of, strict=True)
        ]
        columns.append(united(found))
    if len(set(names_of)) > 1 or KeysType.NAME in names_of[0]:
        columns.append([_keys_of(part, some, names) for part, some in zip(parts, names_of, strict=True)])
        names = (*names, KeysType.NAME)
    return [
        pa.StructArray.from_arrays(list(some), list(names), mask=mask_of(part))
        for part, *some in zip(parts, *columns, strict=True)
    ]


def _keys_of(part: Any, found: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """The keys of a struct's rows, as bits of other names."""
    if KeysType.NAME not in found:
        return keys_to_arrow([sum(1 << names.index(name) for name in found)] * len(part), names)
    keys = part.field(found.index(KeysType.NAME))
    bits = [1 << names.index(name) for name in keys.type.parameters["names"]]
    numbers = [
        int.from_bytes(one, "little") if isinstance(one, bytes) else one or 0
        for one in keys.storage.to_pylist()
    ]
    there = {one: sum(bit for place, bit in enumerate(bits) if one >> place & 1) for one in set(numbers)}
    return keys_to_arrow([there[one] for one in numbers], names)


def _united_lists(parts: list[Any]) -> list[Any]:
    items = united([part.values for part in parts])
    sizes = {getattr(part.type, "list_size", None) for part in parts}
    size = sizes.pop() if len(sizes) == 1 else None
    is_large = any(arrow.is_large_list(part.type) for part in parts)
    return [_list_over(some, part, size, is_large=is_large) for part, some in zip(parts, items, strict=True)]


def _list_over(items: Any, like: Any, size: int | None, *, is_large: bool) -> Any:
    """Lists of ``items``, at the places of those of other lists; of one ``size``, if there is one."""
    mask = mask_of(like)
    if size is not None:
        part = items[like.offset * size : (like.offset + len(like)) * size]
        return pa.FixedSizeListArray.from_arrays(part, size, mask=mask)
    make, code = (pa.LargeListArray, "i8") if is_large else (pa.ListArray, "i4")
    return make.from_arrays(numbers_to_arrow(_offsets_of(like).astype(code)), items, mask=mask)


def _offsets_of(lists: Any) -> Any:
    """The places in the items where lists begin, and where the last one ends."""
    if arrow.is_fixed_size_list(lists.type):
        return np.arange(lists.offset, lists.offset + len(lists) + 1) * lists.type.list_size
    return np.asarray(ends_of(lists))


def _united_dictionaries(parts: list[Any]) -> list[Any]:
    """Dictionaries as ones over the same values: a file has one for all batches."""
    words = pa.concat_arrays(united([part.dictionary for part in parts]))
    places = numbers_to_arrow(np.arange(len(words), dtype=np.int32))
    if _form(words.type) in ("text", "bytes"):
        encoded = words.dictionary_encode()
        words, places = encoded.dictionary, encoded.indices
    begin, result = 0, []
    for part in parts:
        found = places.slice(begin, len(part.dictionary)).take(part.indices)
        result.append(dictionary_inside(pa.DictionaryArray.from_arrays(found, words)))
        begin += len(part.dictionary)
    return result


def _encoded_anew(parts: list[Any]) -> list[Any]:
    """Arrays that differ in the kinds of their values, by way of Python objects: parts of one column."""
    values: list[Any] = []
    for part in parts:
        values += map(make_reader(part, Scope(copy=True)), range(len(part)))
    ends = accumulate(map(len, parts))
    whole = ColumnEncoder().encode(values)
    return [whole[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]
