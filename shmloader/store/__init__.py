"""`share()`: data in memory once, whatever the number of workers and ranks."""

from shmloader.store.base import SharedObject, Store, StoreDescription
from shmloader.store.sharing import share

__all__ = ["SharedObject", "Store", "StoreDescription", "share"]
