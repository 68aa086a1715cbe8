"""The codec: a batch to a slot, and back.

The structure of a batch is pickled (protocol 5). Every dense CPU tensor and ndarray in it, wherever it
sits, becomes a leaf of the slot and leaves a placeholder in the pickle: an out-of-band buffer. Reading puts
the leaf, wrapped without a copy, in the placeholder's place. Containers, namedtuples, dataclasses and
custom batch classes therefore keep their types without being known here. Other tensors (sparse, quantised,
nested, subclasses) are pickled as torch pickles them, with their storages as leaves.

`codec.leaves` lists the objects that become leaves, and wraps each again.
"""

from shmloader.codec.decoder import Decoder, read_leaves, structure_of
from shmloader.codec.encoder import Encoded, Encoder

__all__ = ["Decoder", "Encoded", "Encoder", "read_leaves", "structure_of"]
