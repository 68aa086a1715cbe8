"""How an index batch travels: pickled, and no larger than what it shows."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_LONG_NBYTES = 1024


def pickle_index_batch(index_batch: object) -> bytes:
    """Pickle an index batch: the indices of one batch, or one index, of whatever kind the sampler yields."""
    payload = pickle.dumps(index_batch, 5)
    if len(payload) > _LONG_NBYTES and not _is_ints(index_batch):
        file = io.BytesIO()
        _CompactPickler(file, 5).dump(index_batch)
        return file.getvalue()
    return payload


def _is_ints(index_batch: object) -> bool:
    return type(index_batch) is list and type(index_batch[0]) is int


class _CompactPickler(pickle.Pickler):
    """Pickles of a tensor what it shows, not all of the storage that it is a view of."""

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``."""
        plain = type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        if plain and obj.untyped_storage().nbytes() > obj.numel() * obj.element_size():
            return obj.clone().__reduce_ex__(5)
        return NotImplemented
