"""A `RowStore` as a ``pyarrow`` object over the same memory."""

from __future__ import annotations

from typing import Any

from shmloader.store.columns import Column, NoArrowTypeError
from shmloader.store.gather import ChunkedRows
from shmloader.store.records import Dicts


def to_arrow(store: ChunkedRows) -> Any:
    """A ``Table`` where all rows are dicts with the same keys, else a ``ChunkedArray``.

    Chunks keep the types that their own values need (int8 to int64, for one). Where they differ, those
    that are narrower are converted, which copies them.

    Raises:
        TypeError: If some rows have no Arrow type, or chunks have none in common.
    """
    import pyarrow as pa

    columns = [store.column_of(chunk) for chunk in range(len(store.starts) - 1)]
    try:
        arrays = [column.to_arrow(store.buffer) for column in columns]
        if columns and all(isinstance(column, Dicts) for column in columns):
            return _table(columns, arrays)
        kind = arrays[0].type if arrays else pa.null()
        if len({array.type for array in arrays}) > 1:
            kind = pa.unify_schemas(
                [pa.schema([("", array.type)]) for array in arrays], promote_options="permissive"
            )[0].type
        # Cast only where it must be: lists of nothing but None come out of a cast to their own type invalid.
        return pa.chunked_array([a if a.type == kind else a.cast(kind) for a in arrays], kind)
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
    tables = [pa.Table.from_batches([pa.RecordBatch.from_struct_array(array)]) for array in arrays]
    return pa.concat_tables(tables, promote_options="permissive")
