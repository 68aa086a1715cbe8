"""`share()`: data in memory once, whatever the number of workers and ranks.

Names are imported when they are first used: pyarrow takes each spawned worker 0.15 s, and only those with
stores need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmloader.store.base import SharedObject, Store
    from shmloader.store.description import FieldDescription, StoreDescription
    from shmloader.store.mapping import MappingStore, SetStore
    from shmloader.store.sharing import share

__all__ = [
    "FieldDescription",
    "MappingStore",
    "SetStore",
    "SharedObject",
    "Store",
    "StoreDescription",
    "share",
]

_MODULES = {
    "FieldDescription": "description",
    "MappingStore": "mapping",
    "SetStore": "mapping",
    "SharedObject": "base",
    "Store": "base",
    "StoreDescription": "description",
    "share": "sharing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
