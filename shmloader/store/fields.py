"""Looking through columns that only lead to others: at the fields of records, and at the values of rows."""

from __future__ import annotations

from typing import Any

from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.columns import Column
from shmloader.store.records import Dicts, Tuples
from shmloader.store.repeats import Repeated
from shmloader.store.unions import Union


def field_of(column: Column, field: str | int) -> Column | None:
    """The column of one field of records; None if not all rows have it."""
    if isinstance(column, Dicts) and field in column.names:
        return column.fields[column.names.index(str(field))]
    if isinstance(column, Tuples) and isinstance(field, int) and 0 <= field < len(column.fields):
        return column.fields[field]
    if isinstance(column, Repeated):
        inner = _all_fields(column.of, field)
        return None if inner is None else column._replace(of=inner)
    if isinstance(column, Union):
        inner = _all_fields(column.kinds, field)
        return None if inner is None else column._replace(kinds=inner)
    return None


def _all_fields(columns: tuple[Column, ...], field: str | int) -> tuple[Column, ...] | None:
    fields = [inner for column in columns if (inner := field_of(column, field)) is not None]
    return tuple(fields) if len(fields) == len(columns) else None


def tuple_shapes(column: Column) -> set[tuple[type, int] | None]:
    """The classes and lengths of rows that are tuples; None stands for any other rows."""
    if isinstance(column, Tuples):
        return {column.shape}
    inner = column.of if isinstance(column, Repeated) else column.kinds if isinstance(column, Union) else ()
    return set().union(*map(tuple_shapes, inner)) if inner else {None}


def as_dicts(column: Column) -> Column:
    """Shared dicts as dicts of shared fields, where all have the same keys."""
    if not isinstance(column, Repeated):
        return column
    records = [as_dicts(inner) for inner in column.of]
    names = {record.names if isinstance(record, Dicts) else None for record in records}
    keys = names.pop()
    if names or keys is None:
        return column
    fields = [field_of(column._replace(of=tuple(records)), name) for name in keys]
    return Dicts(column.rows, keys, tuple(field for field in fields if field is not None))


def values_of(
    column: Column, rows: Any, positions: Any, memory: SharedBuffer
) -> list[tuple[Column, Any, Any]]:
    """What rows of a column stand for.

    Args:
        column: The column.
        rows: Row numbers in it.
        positions: Where each of them is wanted.
        memory: Of the column.

    Returns:
        Columns that are not `Repeated`, each with row numbers in it and where these are wanted.
    """
    if not isinstance(column, Repeated):
        return [(column, rows, positions)]
    if not len(rows):  # of the right type all the same
        return values_of(column.of[0], rows, positions, memory)
    found = []
    for inner, chosen, places in column.referred(memory, rows):
        if len(places):
            found += values_of(inner, places, positions[chosen], memory)
    return found
