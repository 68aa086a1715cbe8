"""`share()` and `open_store()`: data in memory once, whatever the number of workers and ranks.

Their modules are imported at first use: pyarrow takes each spawned worker 0.15 s, and only workers with
stores need it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch

from shmloader.store.handles import make_array_reducer
from shmloader.store.unshared import advise_sharing, watch_copies
from shmloader.store_hooks import StoreHooks, hooks

if TYPE_CHECKING:
    from shmloader.store.base import SharedObject, Store
    from shmloader.store.description import FieldDescription, StoreDescription
    from shmloader.store.files import FilePath
    from shmloader.store.mapping import MappingStore, SetStore

__all__ = [
    "FieldDescription",
    "MappingStore",
    "SetStore",
    "SharedObject",
    "Store",
    "StoreDescription",
    "share",
    "unshare",
]

_MODULES = {
    "FieldDescription": "description",
    "MappingStore": "mapping",
    "SetStore": "mapping",
    "SharedObject": "base",
    "Store": "base",
    "StoreDescription": "description",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def _is_store(value: object) -> bool:
    base = sys.modules.get(f"{__name__}.base")  # imports pyarrow; without it there is no store
    return base is not None and isinstance(value, base.Store)


def _takes_rows(dataset: object) -> bool:
    base = sys.modules.get(f"{__name__}.base")
    while base is not None and isinstance(dataset, base.Selection):
        dataset = dataset.whole
    module = type(dataset).__module__  # not a subclass of the program's, which may give other rows
    return module in (f"{__name__}.base", f"{__name__}.rows", f"{__name__}.lazy") and _is_store(dataset)


def _share_dataset(dataset: Any) -> Any:
    from shmloader.store.attributes import share_for_loader  # imports pyarrow

    return share_for_loader(dataset)


hooks.register(
    StoreHooks(_is_store, _takes_rows, _share_dataset, watch_copies, advise_sharing, make_array_reducer)
)

_Array = TypeVar("_Array", bound=np.ndarray[Any, Any])
_Row = TypeVar("_Row")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Object = TypeVar("_Object")


# What type checkers see. They cannot know that a container of few large containers stays one of its kind.
@overload
def share(data: _Array, *, copy: bool = False) -> _Array: ...
@overload
def share(data: torch.Tensor, *, copy: bool = False) -> torch.Tensor: ...
@overload
def share(data: Sequence[_Row] | Iterator[_Row], *, copy: bool = False) -> Store[_Row]: ...
@overload
def share(data: Mapping[_Key, _Value], *, copy: bool = False) -> MappingStore[_Key, _Value]: ...
@overload
def share(data: AbstractSet[_Row], *, copy: bool = False) -> SetStore[_Row]: ...
@overload
def share(data: _Object, *, copy: bool = False) -> _Object: ...
def share(data: Any, *, copy: bool = False) -> Any:
    """Put data into memory that all processes of this host share, once and read-only.

    Call it in the main process, before the loader is made. Under fork workers inherit the memory; under
    spawn and forkserver they get a descriptor, whatever the size. Workers read rows without writing to a
    page, so nothing is copied on write. The memory is freed when the last process that has it is gone.

    The same rule applies to ``data`` itself and to all that it holds, at any depth of attributes:

    * A list, tuple, deque, iterator, or another sequence of Python objects (numbers, strings, bytes, dicts,
      tuples, dataclasses, lists, arrays, tensors, or whatever pickle can write) becomes a `Store`, a sequence
      whose rows equal the originals, with the same types; so does a one-dimensional ndarray of objects. An
      iterator is consumed and never exists as a list.
    * A dict becomes a `MappingStore`; a ``Counter`` and a ``defaultdict`` one that answers like these for
      keys that they do not have. A set becomes a `SetStore`.
    * A container of at most 32 elements some of which are large containers themselves, such as
      ``{"train": rows, "val": rows}`` or a COCO file, stays one of its kind, with these elements shared. So
      does a list or dict of datasets, or of other large objects that are more than data.
    * An ndarray or a dense CPU tensor stays one, over shared memory. One that is mapped from a file stays
      mapped from it.
    * Arrow tables and arrays, pandas frames and Hugging Face datasets stay what they are, over shared memory
      or the file that they are mapped from. If ``data`` itself is an Arrow or pandas object, it becomes a
      `Store`, with rows as in ``to_pylist()`` or as dicts.
    * Any other object, such as a dataset, is copied with its large attributes shared. The original is not
      modified.

    Objects inside ``data`` are shared only if they take 1 MiB or more. Large things that cannot be shared are
    named in one `NotSharedWarning`. Objects that several rows or containers refer to are stored once. So a
    generator must not change an object that it has yielded and yield it again.

    Args:
        data: The data.
        copy: Whether arrays and tensors that are read from rows are private copies, for samples that are
            changed in place. By default they are views: read-only arrays, and tensors to which a write stays
            in the process.

    Returns:
        The shared form of ``data``; ``data`` itself if it is shared already, or nothing in it is large.

    Raises:
        SharedMemoryExhausted: If the host lacks the memory, with the bytes needed and available.
        TypeError: If ``data`` is one value, such as a str or an int; if a tensor is not dense, not on the
            CPU, or requires grad; if a mapping makes up values for missing keys in a way that other processes
            cannot repeat.
        OSError: If the process may open no more descriptors; one is needed.
        LoaderError: If the platform has no shared memory, with what is missing or refused.
        Exception: What pickling raises, for rows of types that are kept pickled.
    """
    from shmloader.store.attributes import share_graph  # imports pyarrow

    return share_graph(data, copy=copy)


def unshare(data: Any) -> Any:
    """Undo sharing: put lists, dicts, sets, arrays and frames of this process in place of shared ones.

    For data that the program is going to change, such as a list that it appends to. Workers that run
    already, and other loaders' workers, keep what they have; a loader with ``share_dataset=True`` that is
    made later shares anew.

    Args:
        data: A dataset or another object, which is changed in place, at any depth; or a store.

    Returns:
        ``data``; for a store, a shared array or a tuple the list, dict, set, array or tuple in its place. A
        Counter comes back as a ``defaultdict``, any other subclass of list or dict as its base.
    """
    from shmloader.store.attributes import unshare  # imports pyarrow

    return unshare(data)


def open_store(
    path: FilePath | Sequence[FilePath],
    *,
    columns: Sequence[str] | None = None,
    allow_pickle: bool = False,
    lazy: bool = False,
    cache_nbytes: int | None = None,
    filesystem: Any = None,
    verify: bool | None = None,
) -> Store:
    """Open files as a store, read-only.

    * Arrow IPC (``.arrow``, ``.feather``; file and stream format): mapped. Nothing is read until it is
      needed, and the file may be larger than memory. If its buffers are compressed, they are unpacked into
      shared memory, batch by batch.
    * Parquet: decoded into shared memory, in the same way.
    * Parquet with ``lazy=True``: nothing is read but the footers. Each process reads a row group when one of
      its rows is asked for, and keeps those that it has used last. So the files may be larger than memory,
      and lie on any file system. Let a `BlockSampler` choose the order.
    * What ``store.save(path)`` wrote: the store equals the one that was saved. Classes of namedtuples,
      dataclasses and enums are taken from modules that are loaded. Nothing is imported.

    Runs in the calling process. Stores over mapped files reach workers by path, under every start method;
    the file must not be changed in place meanwhile (write a new one and rename it, as ``save`` does).

    Args:
        path: The file; its contents decide, not its name. Or a folder or a pattern (``train/*.parquet``): the
            rows of all its files, in the order of their names. Or a list of any of these, in its order.
        columns: The fields to read; None for all.
        allow_pickle: Whether values may be unpickled, which runs code: only from sources that you trust.
        lazy: Whether row groups of Parquet files are read when they are needed.
        cache_nbytes: With ``lazy``: bytes of row groups that each process keeps, unpacked; None: 1 GiB.
        filesystem: With ``lazy``: the file system of the paths, a ``pyarrow.fs.FileSystem`` or one of
            fsspec's. None: the local one, or what Arrow or fsspec has for URLs (``s3://``, ``https://``).
        verify: Whether to compare local files with the checksums that ``save`` wrote, in about 1 s for a
            gigabyte; a file without them is an error then. None: Parquet that is unpacked now, and other
            files if all take 64 MiB at most.

    Returns:
        The store, with dicts as rows of a table. For a mapping or set it is a `MappingStore` or `SetStore`.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If ``columns`` is one name instead of a list of names.
        ValueError: If it is neither Arrow IPC nor Parquet (with ``lazy``, no Parquet), damaged, or not what
            its checksums say; if files differ in columns, or have a key in common; if it has pickled values
            that were not allowed, with their names, or values of a class whose module is not loaded.
        KeyError: If a file has no such column.
        SharedMemoryExhausted: If what must be unpacked is larger than the host's memory.
    """
    if lazy:
        from shmloader.store import lazy as lazily  # imports pyarrow

        return lazily.open_lazily(path, columns, allow_pickle, cache_nbytes, filesystem, verify)
    if cache_nbytes is not None or filesystem is not None:
        raise ValueError("cache_nbytes and filesystem are for files that are read lazily: pass lazy=True too")
    from shmloader.store import files  # imports pyarrow

    store: Store = files.open_store(path, columns=columns, allow_pickle=allow_pickle, verify=verify)
    return store
