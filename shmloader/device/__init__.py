"""Slots for CUDA devices: page-locked, guarded while a device may read them, and copied ahead to it.

Imported only for loaders with ``pin_memory`` or ``device``, and only if there is an accelerator. Main process
only. docs/gpu.md explains its use, and docs/decisions/0032 its design.
"""

from shmloader.device.copies_ahead import DeviceBatches
from shmloader.device.driver import is_capturing
from shmloader.device.guard import DeviceGuard
from shmloader.device.moving import capture_error, numbered, to_device

__all__ = ["DeviceBatches", "DeviceGuard", "capture_error", "is_capturing", "numbered", "to_device"]
