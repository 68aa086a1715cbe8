"""Which objects are those of libraries that may not be installed; none of them is imported for it.

Classes are looked up where their library defines them: a program may have a package ``datasets`` of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_ARROW = {"pyarrow": ("Table", "RecordBatch", "Array", "ChunkedArray")}
_PANDAS_ROWS = {"pandas": ("Series", "DataFrame")}
_PANDAS = {
    **_PANDAS_ROWS,
    "pandas.api.extensions": ("ExtensionArray",),
    "pandas.core.indexes.base": ("Index",),
}
_HUGGING_FACE = {
    "datasets.arrow_dataset": ("Dataset",),
    "datasets.dataset_dict": ("DatasetDict", "IterableDatasetDict"),
    "datasets.iterable_dataset": ("IterableDataset",),
}


def is_arrow(value: Any) -> bool:
    """Whether a value is Arrow data: a table, a batch or a column."""
    return isinstance(value, _classes(_ARROW))


def is_pandas(value: Any) -> bool:
    """Whether a value is a pandas Series or DataFrame."""
    return isinstance(value, _classes(_PANDAS_ROWS))


def is_pandas_part(value: Any) -> bool:
    """Whether a value is a pandas object of any kind, an index or an array too."""
    return isinstance(value, _classes(_PANDAS))


def is_hugging_face(value: Any) -> bool:
    """Whether a value is a dataset of Hugging Face's ``datasets``."""
    return isinstance(value, _classes(_HUGGING_FACE))


def _classes(names: Mapping[str, tuple[str, ...]]) -> tuple[type, ...]:
    found = [getattr(sys.modules.get(module), name, None) for module in names for name in names[module]]
    return tuple(kind for kind in found if isinstance(kind, type))  # not imported: then nothing is of it


def table_in_memory(dataset: Any) -> Any:
    """The Arrow table of a Hugging Face dataset, where it is not mapped from files."""
    data = getattr(dataset, "data", None)
    return data.table if data is not None and type(data).__name__ == "InMemoryTable" else None


def with_table(dataset: Any, table: Any) -> Any:
    """A copy of a Hugging Face dataset with another Arrow table of the same contents."""
    import copy

    from datasets.table import InMemoryTable

    shared = copy.copy(dataset)
    vars(shared)["_data"] = InMemoryTable(table)
    return shared
