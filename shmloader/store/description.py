"""The description of a store: its fields, their sizes, and a table of its first rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.messages import shorten, shown
from shmloader.store.columns.kind import find_types, type_name
from shmloader.store.columns.mixed import Links
from shmloader.store.columns.records import structs_of, types_of_fields
from shmloader.store.columns.values import Pickles

_MOST_SHOWN = 5  # rows in a repr, and fields of a row
_MOST_CHARACTERS = 40  # of a value in it
_MOST_LISTED = 1000  # characters of names in a message


@dataclass(frozen=True)
class FieldDescription:
    """One field of the rows of a store.

    Attributes:
        name: The field; empty if rows have no fields.
        type: The Arrow type, or the name of the Python type that it stands for; several where they change.
        nbytes: Bytes of shared memory.
        pickled: Why values are pickled: the classes that have no column. None if no values are.
    """

    name: str
    type: str
    nbytes: int
    pickled: str | None = None


@dataclass(frozen=True)
class StoreDescription:
    """The kind of a store, and the memory that it saves.

    Attributes:
        kind: ``records`` for rows with fields, ``mapping`` or ``set``; else the type of the rows, such as
            ``int64`` or ``shmloader.tuple``.
        rows: Rows (items of a mapping).
        nbytes: Bytes of shared memory, once on the host.
        python_nbytes: Estimate of the bytes that the rows take as Python objects, in each process that
            has a copy of its own; from a sample of the rows. 0 if rows were never Python objects.
        fields: Each field of the rows.
    """

    kind: str
    rows: int
    nbytes: int
    python_nbytes: int
    fields: tuple[FieldDescription, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows of kind {self.kind!r}, {self.nbytes:,} bytes"]
        if self.python_nbytes:
            lines[0] += f" ({self.python_nbytes:,} as Python objects)"
        for one in self.fields:
            pickled = f", pickled: {one.pickled}" if one.pickled else ""
            lines.append(f"  {one.name or 'rows'}: {one.type}, {one.nbytes:,} bytes{pickled}")
        return "\n".join(lines)


def describe_rows(store: Any, rows: Any, what: StoreDescription) -> str:
    """A line about a store, and one for each of its first rows."""
    head = f"<{type(store).__name__}: {what.rows:,} rows of kind {what.kind!r}, {what.nbytes:,} bytes>"
    return "\n".join([head, *map(_shown, islice(rows, _MOST_SHOWN))])


def _shown(row: Any) -> str:
    if isinstance(row, Mapping):
        return ", ".join(f"{name}: {_shown(value)}" for name, value in islice(row.items(), _MOST_SHOWN))
    if isinstance(row, np.ndarray | torch.Tensor) and row.ndim:
        return f"{type(row).__name__} {row.dtype} {tuple(row.shape)}"
    return shown(row, _MOST_CHARACTERS)


def listed(names: Iterable[str]) -> str:
    """The names of fields for a message, cut at a length."""
    return shorten(", ".join(map(repr, names)), _MOST_LISTED)


def describe_columns(
    columns: list[Any], type_of_link: Callable[[int], Any]
) -> tuple[str, tuple[FieldDescription, ...]]:
    """The kind and the fields of rows, given those of each chunk; a link is described as what it leads to."""
    fields: dict[str, list[Any]] = {}
    for column in columns:
        structs = structs_of(column)
        names = () if structs is None else types_of_fields(structs.type)
        for name, part in [(name, structs.field(name)) for name in names] or [("", column)]:
            fields.setdefault(name, []).append(part)
    described = tuple(_describe(name, parts, type_of_link) for name, parts in fields.items())
    if any(fields):
        return "records", described
    if any(pa.types.is_union(column.type) for column in columns):
        return "mixed", described  # in a word: it has many parts
    return " or ".join(dict.fromkeys(type_name(column.type) for column in columns)) or "objects", described


def _describe(name: str, parts: list[Any], type_of_link: Callable[[int], Any]) -> FieldDescription:
    found = dict.fromkeys(part.type for part in parts)
    kinds = [type_of_link(one.parameters["link"]) if isinstance(one, Links) else one for one in found]
    pickles = [one for kind in kinds for _, one in find_types(kind, Pickles)]
    classes = dict.fromkeys(name for one in pickles for name in one.parameters["types"])
    why = f"no column gives back {', '.join(classes)} as given" if classes else None
    nbytes = sum(part.get_total_buffer_size() for part in parts)  # .nbytes trusts a file's offsets
    return FieldDescription(name, " or ".join(dict.fromkeys(map(type_name, kinds))), nbytes, why)
