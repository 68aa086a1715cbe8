"""A `RowStore` as a ``pyarrow`` object over the same memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.columns import Column, NoArrowTypeError
from shmloader.store.fields import as_dicts
from shmloader.store.gather import ChunkedRows
from shmloader.store.lists import Lists
from shmloader.store.records import Dicts, Objects, Tuples
from shmloader.store.repeats import Repeated, common_type
from shmloader.store.scalars import Nones


def to_arrow(store: ChunkedRows) -> Any:
    """A ``Table`` where all rows are dicts with the same keys, else a ``ChunkedArray``.

    Chunks keep the types that their own values need (int8 to int64, for one). Where they differ, those
    that are narrower are converted, which copies them. Values that rows share are dictionary arrays.

    Raises:
        TypeError: If some rows have no Arrow type, or chunks have none in common.
    """
    import pyarrow as pa

    columns = _alike([as_dicts(store.column_of(chunk)) for chunk in range(len(store.starts) - 1)])
    try:
        arrays = [column.to_arrow(store.buffer) for column in columns]
        if columns and all(isinstance(column, Dicts) for column in columns):
            return _table(columns, arrays)
        return _joined(arrays)
    except NoArrowTypeError as error:
        raise TypeError(f"this store cannot be given to Arrow: {error}") from error
    except UnicodeEncodeError as error:
        raise TypeError(f"this store cannot be given to Arrow: a key has no UTF-8 ({error})") from error
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise TypeError(
            f"this store cannot be given to Arrow: its rows change their types on the way ({error})"
        ) from error


def _table(columns: list[Column], arrays: list[Any]) -> Any:
    import pyarrow as pa

    names = {column.names for column in columns}  # type: ignore[attr-defined]
    if len(names) > 1:
        raise NoArrowTypeError("its records change their keys on the way")
    fields = enumerate(names.pop())
    return pa.table({name: _joined([array.field(number) for array in arrays]) for number, name in fields})


def _joined(arrays: list[Any]) -> Any:
    import pyarrow as pa

    kind = common_type([array.type for array in arrays]) if arrays else pa.null()
    # Cast only where it must be: lists of nothing but None come out of a cast to their own type invalid.
    return pa.chunked_array([a if a.type == kind else a.cast(kind) for a in arrays], kind)


class _Unshared(NamedTuple):
    """A column beside others that are `Repeated`, for Arrow the same: a dictionary of all its rows."""

    of: Column

    @property
    def rows(self) -> int:
        return self.of.rows

    def expression(self, scope: Any) -> str:
        return self.of.expression(scope)

    def to_arrow(self, memory: SharedBuffer) -> Any:
        import pyarrow as pa

        values = self.of.to_arrow(memory)
        if pa.types.is_primitive(values.type):
            return values
        return pa.DictionaryArray.from_arrays(pa.array(np.arange(len(values), dtype=np.int32)), values)


def _alike(columns: list[Any]) -> list[Any]:
    """Columns of several chunks, so that all of them are shared (dictionaries, in Arrow) where one is."""
    found = [column for column in columns if not isinstance(column, Nones)]
    if any(isinstance(column, Repeated) for column in found):
        parts = [column.of if isinstance(column, Repeated) else (column,) for column in found]
        inner = iter(_alike([part for some in parts for part in some]))
        changed: list[Any] = []
        for column, some in zip(found, parts, strict=True):
            mine = tuple(next(inner) for _ in some)
            is_shared = isinstance(column, Repeated)
            changed.append(column._replace(of=mine) if is_shared else _Unshared(mine[0]))
    else:
        changed = _alike_inside(found)
    rest = iter(changed)
    return [column if isinstance(column, Nones) else next(rest) for column in columns]


def _alike_inside(columns: list[Any]) -> list[Any]:
    kinds = set(map(type, columns))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is Lists:
        items = _alike([column.items for column in columns])
        return [column._replace(items=one) for column, one in zip(columns, items, strict=True)]
    if kind is Objects:
        states = _alike([column.state for column in columns])
        return [column._replace(state=one) for column, one in zip(columns, states, strict=True)]
    if kind in (Dicts, Tuples) and len({getattr(c, "names", len(c.fields)) for c in columns}) == 1:
        fields = [_alike(list(some)) for some in zip(*(column.fields for column in columns), strict=True)]
        mine = zip(*fields, strict=True) if fields else ((),) * len(columns)
        return [column._replace(fields=tuple(one)) for column, one in zip(columns, mine, strict=True)]
    return columns
