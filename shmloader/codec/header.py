"""How a batch's header is put together; see the package."""

from __future__ import annotations

import pickle
import struct

SIZES = struct.Struct("<II")
"""Bytes of the leaf table, bytes of the pickled structure."""

# Stands for a leaf in the pickle. Writable: a read-only one would make the reader wrap the leaf again.
MARKER = pickle.PickleBuffer(bytearray(1))


def pickle_marked(structure: object) -> bytes:
    """Pickle a structure that has markers in the place of its leaves."""
    return pickle.dumps(structure, 5, buffer_callback=_leave_out)


def _leave_out(_: pickle.PickleBuffer) -> None:
    """Out of band: what is falsy keeps a buffer out of the pickle."""


LONE_LEAF = pickle_marked(MARKER)
"""The structure of a batch that is one leaf."""
