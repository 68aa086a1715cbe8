"""`share`: the one function that most users call."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from shmloader.store.build import build_store, can_build
from shmloader.store.foreign import is_hugging_face
from shmloader.store.walk import share_attributes


def share(data: Any, *, progress: bool | None = None) -> Any:
    """Put data into memory that all processes of this host share, once and read-only.

    Call it in the main process, before the loader is made. Under fork workers inherit the store; under
    spawn and forkserver they get a descriptor, whatever the size. Workers read rows without writing to a
    page, so nothing is copied on write. The memory is freed when the last process that has it is gone.

    Args:
        data: What to share:

            * a list, tuple or other sequence of Python objects (numbers, strings, bytes, dicts, tuples,
              dataclasses, lists, ndarrays, tensors, or whatever pickle can write): a `Store`, a sequence
              whose rows equal the originals, with the same types;
            * an iterator or generator: the same. It is consumed and never exists as a list;
            * a dict or other mapping: a `MappingStore`; of a ``Counter`` or ``defaultdict`` one that answers
              as these do for keys that they do not have;
            * an ndarray or a dense CPU tensor: an `ArrayStore` or `TensorStore`, whose ``.array`` or
              ``.tensor`` is all of it;
            * a ``pyarrow`` Array, ChunkedArray, RecordBatch or Table: an `ArrowStore`, with rows as in
              ``to_pylist()``;
            * a pandas Series or DataFrame: a `Store` of values or of dicts. The index is not kept;
            * a Hugging Face ``datasets.Dataset``: itself, since its data is mapped from files already;
            * any other object, such as a dataset: a copy of it whose large attributes, and theirs, are
              shared, in one buffer. The original is not modified.

            Objects that several rows refer to are stored once. So a generator must not change an object that
            it has yielded and yield it again.
        progress: Whether to show a progress bar; None: if it takes long and stderr is a terminal.

    Returns:
        The store, or the object with shared attributes; ``data`` itself where it is shared already.

    Raises:
        SharedMemoryExhausted: If the host has not the memory, with what is needed and what there is.
        TypeError: If a tensor is not dense, not on the CPU, or requires grad; if a mapping makes up values
            for missing keys in a way that other processes could not follow.
        OSError: If the process may open no more descriptors: one is needed.
        Exception: What pickling raises, for rows of types that are kept pickled.
    """
    if is_hugging_face(data):
        return data
    if can_build(data) and not isinstance(data, Dataset):
        return build_store(data, progress=progress)
    return share_attributes(data, progress=progress)
