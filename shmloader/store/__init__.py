"""`share()`: data in memory once, whatever the number of workers and ranks."""

from shmloader.store.base import FieldDescription, SharedObject, Store, StoreDescription
from shmloader.store.mapping import MappingStore, SetStore
from shmloader.store.share import share

__all__ = [
    "FieldDescription",
    "MappingStore",
    "SetStore",
    "SharedObject",
    "Store",
    "StoreDescription",
    "share",
]
