"""Columns: values of Python as Arrow arrays, and functions that read them back; one class per kind."""

from shmloader.store.columns import encode, records, times  # noqa: F401 - so that every kind is known
