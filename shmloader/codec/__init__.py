"""Batch object to slot and back.

The structure of a batch is pickled (protocol 5); every dense CPU tensor and ndarray in it, wherever it
sits, becomes a leaf of the slot and leaves a marker in the pickle: an out-of-band buffer. Reading puts the
leaf, wrapped without a copy, in the marker's place. Containers, namedtuples, dataclasses and custom batch
classes therefore keep their types without being known here. Other tensors (sparse, quantised, nested,
subclasses) are pickled as torch pickles them, with their storages as leaves.

Header, behind the leaves::

    [ nbytes of the table: u32 | of the structure: u32 | leaf table | pickled structure | pickled rest ]

What default collation returns repeats from batch to batch in all but its bytes. For such batches (built-in
containers of leaves, numbers and strings) table and structure are remembered on both sides, and only the
numbers and strings, the rest, are pickled anew.
"""

from shmloader.codec.decoder import Decoder, read_leaves
from shmloader.codec.encoder import Encoded, Encoder

__all__ = ["Decoder", "Encoded", "Encoder", "read_leaves"]
