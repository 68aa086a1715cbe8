"""Pinned (page-locked) batches, for ``pin_memory=True``. Runs in the main process.

A batch is copied once into memory of torch's own pinned allocator, which knows the streams that read it;
the slot is free again at once. Registering the slots' own pages would save that copy, but torch's
allocator does not protect foreign memory from reuse during an asynchronous transfer, so it needs a guard
of its own first (docs/decisions).
"""

from __future__ import annotations

from typing import Any

from shmloader import torch_private


def pin_batch(batch: Any, device: str | None) -> Any:
    """Copy a batch's tensors to pinned memory; same result as torch's pin-memory thread.

    Args:
        batch: Any batch; objects with a ``pin_memory()`` method are asked to do it themselves.
        device: Type of the accelerator that the memory is pinned for.
    """
    return torch_private.pin_memory(batch, device)
