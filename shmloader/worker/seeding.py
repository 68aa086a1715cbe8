"""Seeds of workers, identical to torch's, and of samples. Pure: nothing here touches a global generator."""

from __future__ import annotations

import hashlib
import struct

import numpy as np

_MASK32 = 0xFFFFFFFF


def worker_seed(base_seed: int, worker_id: int) -> int:
    """Seed of ``random`` and ``torch`` in a worker: ``base_seed + worker_id``, as torch's worker loop."""
    return base_seed + worker_id


def numpy_seed(base_seed: int, worker_id: int) -> list[int]:
    """Seed words of ``numpy.random`` in a worker.

    torch mixes ``(worker_id, base_seed)`` with NumPy's own ``SeedSequence`` hash, over the entropy words
    ``[worker_id, low 32 bits, high 32 bits, 0]`` (``torch/utils/data/_utils/worker.py``,
    ``_generate_state``), so that NumPy and ``random`` do not share a stream.

    Args:
        base_seed: The iterator's base seed, a non-negative 64-bit integer.
        worker_id: 0 to ``num_workers - 1``.

    Returns:
        Four 32-bit words for ``numpy.random.seed``.
    """
    entropy = [worker_id, base_seed & _MASK32, base_seed >> 32, 0]
    return [int(word) for word in np.random.SeedSequence(entropy).generate_state(4)]


_SAMPLE = struct.Struct("<4Q")
_SEEDS = struct.Struct("<QQI")


def sample_seeds(base_seed: int, epoch: int, seq: int, position: int) -> tuple[int, int, int]:
    """Seeds for the numbers that one sample draws, whichever worker fetches it (``dispatch="dynamic"``).

    Not of the sample's index: a sampler that draws with replacement gives an index twice, and the two are
    to be augmented differently. Each is taken from a cryptographic hash of all four, so that samples of
    neighbouring positions, batches and epochs share no stream.

    Args:
        base_seed: The iterator's base seed, a non-negative 64-bit integer.
        epoch: Epochs of the iterator before this one.
        seq: Number of the batch in the epoch.
        position: Samples of the batch that were fetched before this one.

    Returns:
        The seeds of torch (64 bits), ``random`` (64 bits) and ``numpy.random`` (32 bits).
    """
    digest = hashlib.blake2b(_SAMPLE.pack(base_seed, epoch, seq, position), digest_size=_SEEDS.size).digest()
    torch_seed, random_seed, numpy_seed_ = _SEEDS.unpack(digest)
    return torch_seed, random_seed, numpy_seed_
