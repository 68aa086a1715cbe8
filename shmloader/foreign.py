"""Objects of libraries that may not be installed; none is imported here.

A class counts where its library defines it: a program may have a package ``datasets`` of its own. Objects are
asked for their real type, and none of their code runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

_Names = Mapping[str, tuple[str, ...]]
"""Names of classes, by module."""

ARROW: _Names = {"pyarrow": ("Table", "RecordBatch", "Array", "ChunkedArray")}
PANDAS_ROWS: _Names = {"pandas": ("Series", "DataFrame")}
PANDAS: _Names = {
    **PANDAS_ROWS,
    "pandas.api.extensions": ("ExtensionArray",),
    "pandas.core.indexes.base": ("Index",),
}
_POLARS: _Names = {"polars": ("DataFrame", "Series")}
_HUGGING_FACE: _Names = {
    "datasets.arrow_dataset": ("DatasetInfoMixin",),  # the base of Dataset and IterableDataset
    "datasets.dataset_dict": ("DatasetDict", "IterableDatasetDict"),
}
_TABLE_IN_MEMORY: _Names = {"datasets.table": ("InMemoryTable",)}
_TABLES: _Names = {"datasets.table": ("ConcatenationTable",)}


def loaded_classes(names: _Names) -> tuple[type, ...]:
    """The classes of these names in modules that are loaded."""
    loaded = [module for module in names if module in sys.modules]  # of others nothing is
    found = [getattr(sys.modules[module], name, None) for module in loaded for name in names[module]]
    return tuple(kind for kind in found if isinstance(kind, type))


def _is_one(value: Any, names: _Names) -> bool:
    return issubclass(type(value), loaded_classes(names))


is_arrow = functools.partial(_is_one, names=ARROW)
"""Whether a value is Arrow data: a table, a batch or a column."""
is_pandas = functools.partial(_is_one, names=PANDAS_ROWS)
"""Whether a value is a pandas Series or DataFrame."""
is_pandas_part = functools.partial(_is_one, names=PANDAS)
"""Whether a value is a pandas object of any kind, an index or an array too."""
is_polars = functools.partial(_is_one, names=_POLARS)
"""Whether a value is a polars frame or series."""
is_hugging_face = functools.partial(_is_one, names=_HUGGING_FACE)
"""Whether a value is a dataset of Hugging Face's ``datasets``."""


def is_table_in_memory(value: Any) -> bool:
    """Whether a value is a Hugging Face dataset's Arrow table, no part of which is mapped from a file."""
    if _is_one(value, _TABLES):
        return all(is_table_in_memory(block) for blocks in value.blocks for block in blocks)
    return _is_one(value, _TABLE_IN_MEMORY)
