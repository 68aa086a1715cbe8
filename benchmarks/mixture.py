"""Mixtures of datasets: the time of planning, of a step, and of going on from a far place.

``python -m benchmarks.mixture`` mixes three sources by weights. Beside it are torch's
``WeightedRandomSampler`` and, where datasets is installed (pip install -c constraints.txt datasets), Hugging
Face's ``interleave_datasets``. Times are of the processor.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, WeightedRandomSampler

from benchmarks.options import whole_number
from benchmarks.tables import render_table
from shmloader import Mixture, MixtureSampler

_SHARES = {"web": 0.74, "code": 0.22, "math": 0.04}  # of the samples
_WEIGHTS = {"web": 5, "code": 3, "math": 2}


def mixture_of(samples: int) -> Mixture:
    return Mixture({name: range(int(samples * share)) for name, share in _SHARES.items()})


def sampler_of(mixture: Mixture, ranks: int) -> MixtureSampler:
    return MixtureSampler(
        mixture,
        _WEIGHTS,
        stopping_strategy="never",
        epoch_size=len(mixture),
        num_replicas=ranks,
        rank=0,
    )


def torchs(mixture: Mixture) -> WeightedRandomSampler:
    weights = np.repeat(
        [_WEIGHTS[name] / size for name, size in zip(_WEIGHTS, mixture.sizes, strict=True)], mixture.sizes
    )
    return WeightedRandomSampler(weights.tolist(), len(mixture))


def hugging_faces(mixture: Mixture) -> Any:
    import datasets

    sources = [datasets.Dataset.from_dict({"x": np.arange(size)}) for size in mixture.sizes]
    shares = np.array(list(_WEIGHTS.values())) / sum(_WEIGHTS.values())
    mixed = datasets.interleave_datasets(
        sources, probabilities=shares.tolist(), seed=0, stopping_strategy="all_exhausted"
    )
    return range(len(mixed))  # its indices are listed by now


def times_of(make: Callable[[], Any], batch_size: int) -> tuple[float, float]:
    """Seconds until the first batch of indices, and microseconds of each further one."""
    began_s = time.process_time()
    batches: Iterator[Any] = iter(BatchSampler(make(), batch_size, drop_last=False))
    next(batches)
    first_s = time.process_time() - began_s
    steps = sum(1 for _ in batches)
    return first_s, 1e6 * (time.process_time() - began_s - first_s) / steps


def time_of_place(mixture: Mixture, epoch: int) -> float:
    """Seconds until the first index of a far epoch."""
    sampler = sampler_of(mixture, 1)
    sampler.set_epoch(epoch)
    began_s = time.process_time()
    list(itertools.islice(sampler, 1))
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=whole_number(100), default=1_000_000, help="of all sources (%(default)s)"
    )
    parser.add_argument("--batch-size", type=whole_number(1), default=32, help="(%(default)s)")
    given = parser.parse_args()
    mixture = mixture_of(given.samples)
    makes: dict[str, Callable[[], Any]] = {
        f"MixtureSampler, rank 0 of {ranks}": functools.partial(sampler_of, mixture, ranks)
        for ranks in (1, 8)
    }
    makes["torch's WeightedRandomSampler"] = functools.partial(torchs, mixture)
    makes["Hugging Face's interleave_datasets"] = functools.partial(hugging_faces, mixture)
    table = [["order", "first batch, s", "step, us", "million, s"]]
    for name, make in makes.items():
        try:
            first_s, step_us = times_of(make, given.batch_size)
        except ImportError:
            print(f"{name}: not installed (pip install -c constraints.txt datasets)")
            continue
        million_s = first_s + step_us / given.batch_size
        table.append([name, f"{first_s:.3f}", f"{step_us:.1f}", f"{million_s:.2f}"])
    print(f"{len(mixture):,} samples, batches of {given.batch_size}\n")
    print(render_table(table, texts=1))
    print(f"\nBeginning with epoch 1,000: {time_of_place(mixture, 1000):.2f} s")


if __name__ == "__main__":
    main()
