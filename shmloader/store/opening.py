"""`open_store`: files as stores. What it takes to read them is imported when the first one is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def open_store(
    path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, allow_pickle: bool = False
) -> Any:
    """Open files as a store, read-only.

    * Arrow IPC (``.arrow``, ``.feather``; file and stream format): mapped. Nothing is read until it is
      needed, and the file may be larger than memory. If its buffers are compressed, they are unpacked into
      shared memory, batch by batch.
    * Parquet: decoded into shared memory, in the same way.
    * What ``store.save(path)`` wrote: the store equals the one that was saved. Classes of namedtuples,
      dataclasses and enums are taken from modules that are loaded. Of those that are not there any more, a
      class of the same name is made up, with the same fields. Nothing is imported.

    Runs in the calling process. Stores over mapped files reach workers by path, under every start method;
    the file must not be changed in place meanwhile (write a new one and rename it, as ``save`` does).

    Args:
        path: The file; its contents decide, not its name. Or a folder with such files, or a pattern such as
            ``train/*.parquet``: the rows of all of them, in the order of their names.
        columns: The fields to read; None for all.
        allow_pickle: Whether values may be unpickled, which runs code: only from sources that you trust.

    Returns:
        The store. The rows of a table are dicts.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is neither Arrow IPC nor Parquet, or damaged; if the files differ in their columns;
            if it has pickled values that were not allowed, with their names.
        KeyError: If a file has no such column.
        SharedMemoryExhausted: If what must be unpacked is larger than the host's memory.
    """
    from shmloader.store import files  # imports pyarrow

    return files.open_store(path, columns=columns, allow_pickle=allow_pickle)
