"""Random state of a worker: its seeds, the seeds of single samples, and ``get_worker_info().rng``.

A worker process has the global generators of torch (on the CPU), NumPy and ``random`` to itself, and seeds
them as torch's workers do. Worker threads share them with the whole program and leave them alone: a dataset
that is to run in threads draws from ``torch.utils.data.get_worker_info().rng``, and may do so in worker
processes too.

With ``seed_per_sample``, and so with ``dispatch="dynamic"``, all these generators are seeded before each
sample: it then draws the same numbers whichever worker fetches it. That takes 11 µs. A batch that is not
fetched sample by sample is seeded once.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.random  # NumPy would import it at its first use, in each forked worker
import torch

_MASK32 = 0xFFFFFFFF
_SAMPLE = struct.Struct("<4Q")
_SEEDS = struct.Struct("<QQI")


class Seeds(NamedTuple):
    """Seeds for the generators of torch, of ``random``, and of NumPy."""

    torch_seed: int
    random_seed: int
    numpy_seed: int | Sequence[int]


def worker_seeds(base_seed: int, worker_id: int) -> Seeds:
    """Seeds of a worker, identical to torch's; NumPy's is four 32-bit words.

    torch mixes ``(worker_id, base_seed)`` with NumPy's own ``SeedSequence`` hash, over the entropy words
    ``[worker_id, low 32 bits, high 32 bits, 0]`` (``torch/utils/data/_utils/worker.py``,
    ``_generate_state``), so that NumPy and ``random`` do not share a stream.
    """
    seed = base_seed + worker_id
    entropy = [worker_id, base_seed & _MASK32, base_seed >> 32, 0]
    words = np.random.SeedSequence(entropy).generate_state(4)
    return Seeds(seed, seed, [int(word) for word in words])


def seed_worker_process(base_seed: int, worker_id: int) -> None:
    """Seed the global generators of a worker process, on every device, as torch's workers do.

    ``torch.manual_seed`` formats the stack for each kind of device, also where torch is built for none; that
    takes half of a worker's start.
    """
    seeds = worker_seeds(base_seed, worker_id)
    try:
        for_cpus = torch.accelerator.current_accelerator(check_available=False) is None
    except TypeError:  # of torch 2.6, which initialises CUDA for the answer, and raises for "none"
        for_cpus = False
    (torch.default_generator.manual_seed if for_cpus else torch.manual_seed)(seeds.torch_seed)
    random.seed(seeds.random_seed)
    np.random.seed(seeds.numpy_seed)  # noqa: NPY002 - what torch seeds


def sample_seeds(base_seed: int, epoch: int, seq: int, position: int) -> Seeds:
    """Seeds for the numbers that one sample draws, whichever worker fetches it (``seed_per_sample``).

    They do not depend on the sample's index: a sampler that draws with replacement may give an index twice,
    and these two samples must be augmented differently. They are taken from a cryptographic hash of the base
    seed (not negative), epochs before this one, number of the batch in the epoch (``seq``) and of the sample
    in the batch (``position``), so samples of neighbouring positions, batches and epochs share no stream.
    """
    digest = hashlib.blake2b(_SAMPLE.pack(base_seed, epoch, seq, position), digest_size=_SEEDS.size).digest()
    return Seeds(*_SEEDS.unpack(digest))


GlobalStates = tuple[Any, Any, torch.Tensor]


def global_generators() -> tuple[object, ...]:
    """The global generators of ``random``, NumPy and torch (on the CPU)."""
    methods: tuple[Any, ...] = random.getstate, np.random.get_state
    return *(method.__self__ for method in methods), torch.default_generator


def global_states() -> GlobalStates:
    """The states of `global_generators`."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002


@contextlib.contextmanager
def other_global_states(states: GlobalStates | None = None) -> Iterator[None]:
    """Give the global generators other states; afterwards they are as before."""
    before = global_states()
    try:
        set_global_states(states or before)
        yield
    finally:
        set_global_states(before)


def set_global_states(states: GlobalStates) -> None:
    """Set the states of these generators."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


class Generators:
    """``get_worker_info().rng``: the worker's own generators, under torch's names.

    Each is made at its first use. If samples are seeded, the generators belong to the present sample, so a
    dataset must get them anew in each sample.
    """

    # No functools.cached_property: in Python 3.11 that holds a lock, which a fork meanwhile copies taken.

    def __init__(self, seeds: Seeds) -> None:
        self.seed(seeds)

    def seed(self, seeds: Seeds) -> None:
        """Begin anew, with other seeds."""
        self._seeds = seeds
        self._torch: torch.Generator | None = None
        self._random: random.Random | None = None
        self._numpy: np.random.Generator | None = None

    def states(self) -> tuple[Any, Any, Any]:
        """The states of those that were made, None for others."""
        return (
            None if self._torch is None else self._torch.get_state(),
            None if self._random is None else self._random.getstate(),
            None if self._numpy is None else self._numpy.bit_generator.state,
        )

    def set_states(self, states: tuple[Any, Any, Any]) -> None:
        """Go on from such states, also with generators that the dataset holds already."""
        torch_state, random_state, numpy_state = states
        if torch_state is not None:
            self.torch_generator.set_state(torch_state)
        if random_state is not None:
            self.random_generator.setstate(random_state)
        if numpy_state is not None:
            bits: Any = self.numpy_generator.bit_generator  # in place, as with the others
            bits.__setstate__(numpy_state)

    @property
    def torch_generator(self) -> torch.Generator:
        """For ``generator=``: draws what torch's global one draws in a worker process."""
        if self._torch is None:
            self._torch = torch.Generator().manual_seed(self._seeds.torch_seed)
        return self._torch

    @property
    def random_generator(self) -> random.Random:
        """Draws what ``random`` draws in a worker process."""
        if self._random is None:
            self._random = random.Random(self._seeds.random_seed)
        return self._random

    @property
    def numpy_generator(self) -> np.random.Generator:
        """A new style ``Generator``; from the same seed ``numpy.random`` draws other numbers."""
        if self._numpy is None:
            self._numpy = np.random.default_rng(self._seeds.numpy_seed)
        return self._numpy


class SampleSeeds:
    """Seeds this worker's generators for one sample after the other; in a thread, not the global ones."""

    def __init__(self, generators: Generators, base_seed: int, *, in_thread: bool) -> None:
        self._generators = generators
        self._base_seed = base_seed
        self._in_thread = in_thread
        self._epoch = self._seq = self._position = 0

    def begin(self, epoch: int, seq: int) -> None:
        """Begin the batch of this number in an epoch, and seed for draws outside of its samples."""
        self._epoch, self._seq, self._position = epoch, seq, 0
        self.seed_next()

    def seed_next(self) -> None:
        """Seed for the next sample of the batch."""
        seeds = sample_seeds(self._base_seed, self._epoch, self._seq, self._position)
        self._position += 1
        self._generators.seed(seeds)
        if not self._in_thread:
            # Not torch.manual_seed, which takes 0.4 ms: it asks every backend and notes the stack for CUDA.
            torch.default_generator.manual_seed(seeds.torch_seed)
            random.seed(seeds.random_seed)
            np.random.seed(seeds.numpy_seed)  # noqa: NPY002 - what datasets draw from

    @contextlib.contextmanager
    def as_in_a_worker(self, epoch: int, seq: int) -> Iterator[None]:
        """`begin` a batch in the main process; leaves the program's global generators as they were."""
        with other_global_states():
            self.begin(epoch, seq)
            yield
