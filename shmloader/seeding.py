"""Seeds of worker processes, identical to torch's. Pure: nothing here touches a global generator."""

from __future__ import annotations

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
