"""Slots that a CUDA device reads: page-locked, guarded while it may read them, and copied ahead to it.

Imported only for loaders with ``pin_memory`` or ``device``, and only where there is an accelerator. Main
process only. Why it is so: docs/decisions/0032; how to use it: docs/gpu.md.
"""

from shmloader.device.copies_ahead import DeviceBatches
from shmloader.device.guard import DeviceGuard
from shmloader.device.guarded_pool import GuardedPool
from shmloader.device.moving import to_device

__all__ = ["DeviceBatches", "DeviceGuard", "GuardedPool", "to_device"]
