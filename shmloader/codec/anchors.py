"""Anchors of batches that the program shares with other processes: they last as long as the storages do.

``Tensor.share_memory_()`` and torch's queues give a tensor's storage other memory, and let go of its own. A
NumPy array that was made of the tensor before refers to the storage alone, but reads the former memory
(docs/decisions/0072).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np

from shmloader import torch_private

Anchor = np.ndarray[Any, np.dtype[np.uint8]]

noted: dict[int, weakref.ref[Anchor]] = {}
"""Anchors that decoders have got, by `id`, which another one may have after an anchor's death."""

LEAST_NOTED = 256


def forget_dead() -> int:
    """Forget the anchors that died; returns how many may be noted before this is worth its time again."""
    for key, ref in list(noted.items()):
        if ref() is None and (found := noted.pop(key, ref)) is not ref:  # another thread has noted one
            noted.setdefault(key, found)
    return 2 * len(noted) + LEAST_NOTED


def _keep_anchor(storage: Any) -> None:
    """Have a storage keep the anchor whose memory it has now, if any, unless only its tensor refers to it."""
    if torch_private.has_one_tensor(storage):
        return
    address = storage.data_ptr()
    for ref in list(noted.values()):
        anchor = ref()
        if anchor is not None and 0 <= address - anchor.ctypes.data < anchor.nbytes:
            vars(storage)["_shmloader_anchor"] = anchor  # torch keeps it as long as any view


@functools.cache
def keep_when_shared() -> None:
    """Have storages keep their anchors when they are shared, from now on."""
    torch_private.before_sharing(_keep_anchor)
