"""`Mixture`: several map-style datasets as one, each under its name. In the main process and in workers."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from shmloader.indices.packed_indices import IntArray


class Mixture(ConcatDataset[Any]):
    """Several map-style datasets, the sources, as one; a `MixtureSampler` draws from it.

    Its indices are those of the sources, one source after another, in the order of the dict. Batches are
    gathered as those of torch's ``ConcatDataset`` are.

    Args:
        datasets: The sources by name, each with a length of at least 1.
        with_source: Whether each sample is ``(sample, number)`` with the number of its source, from 0 on.

    Attributes:
        names: The names of the sources.
        sizes: The lengths of the sources, at the time of the call.

    Raises:
        TypeError: If it is given no dict of names, or an iterable-style dataset.
        ValueError: For a source without samples, or if there is no source.
    """

    def __init__(self, datasets: Mapping[str, Any], *, with_source: bool = False) -> None:
        given: Any = datasets
        if not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            raise TypeError(f"a Mixture takes a dict of datasets by name, and not {datasets!r:.100}")
        self.names = tuple(datasets)
        self.sizes = tuple(_length(name, dataset) for name, dataset in datasets.items())
        self.with_source = with_source
        if not self.names:
            raise ValueError("a Mixture needs at least one dataset")
        super().__init__(datasets.values())

    def source_of(self, index: int) -> str:
        """The name of the source of an index, which is at least 0."""
        return self.names[bisect.bisect_right(self.cumulative_sizes, index)]

    def sources_of(self, indices: IntArray) -> IntArray:
        """The numbers of the sources of indices, which are at least 0."""
        return np.asarray(self.cumulative_sizes).searchsorted(indices, "right")

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)  # type: ignore[no-untyped-call]
        if not self.with_source:
            return sample
        return sample, bisect.bisect_right(self.cumulative_sizes, index + (index < 0) * len(self))

    @property
    def __getitems__(self) -> Callable[[list[int]], list[Any]] | None:
        """Fetches several samples with one call for each source; None unless all sources can."""
        if all(getattr(dataset, "__getitems__", None) for dataset in self.datasets):
            return self._get_several
        return None

    def _get_several(self, indices: list[int]) -> list[Any]:
        length = len(self)
        places = np.array([index + (index < 0) * length for index in indices], np.int64)
        numbers = self.sources_of(places)
        if len(places) and not 0 <= places.min() <= places.max() < length:
            raise IndexError(f"indices {min(indices)} to {max(indices)} of a Mixture of {length:,} samples")
        samples: list[Any] = [None] * len(indices)
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            begin = self.cumulative_sizes[number] - self.sizes[number]
            dataset: Any = self.datasets[number]
            found = dataset.__getitems__((places[where] - begin).tolist())
            for place, sample in zip(where.tolist(), found, strict=True):
                samples[place] = (sample, number) if self.with_source else sample
        return samples


def _length(name: str, dataset: Any) -> int:
    try:
        length = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"the source {name!r} of a Mixture has no length ({error}): a Mixture takes map-style datasets"
        ) from error
    if not length:
        raise ValueError(f"the source {name!r} of a Mixture has no samples: leave it out")
    return length
