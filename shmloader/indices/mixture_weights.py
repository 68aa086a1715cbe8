"""The weights of a mixture's sources, from what the program gives to shares of the draws. Main process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shmloader.indices.mixture import Mixture
from shmloader.indices.mixture_order import FloatArray
from shmloader.indices.packed_indices import IntArray

Weights = Mapping[str, float]
Schedule = Callable[[int, int], Weights]
"""Weights by epoch, and by the samples of the epoch's global order that come before."""

Lengths = Mapping[str, Sequence[int] | IntArray]


class SourceWeights:
    """Turns weights by name into the part of the draws that each source has; see `MixtureSampler`.

    With ``never_zero`` every source must have a weight of more than 0.
    """

    def __init__(
        self, mixture: Mixture, temperature: float, lengths: Lengths | None, *, never_zero: bool
    ) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be a number of more than 0, not {temperature}")
        self._names, self._sizes = mixture.names, mixture.sizes
        self._power = 1 / temperature
        self._tokens = np.ones(len(self._names)) if lengths is None else _mean_tokens(mixture, lengths)
        self._never_zero = never_zero

    def by_size(self) -> FloatArray:
        """The shares of sources that are weighted by their samples, or tokens."""
        sums = (np.array(self._sizes) * self._tokens).tolist()
        return self.shares(dict(zip(self._names, sums, strict=True)))

    def shares(self, weights: Weights) -> FloatArray:
        """The part of the draws that each source has, in sum 1.

        Raises:
            TypeError: If they are no dict.
            ValueError: For weights that are negative, all 0 or not finite, and for other names.
        """
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights are a dict of numbers by source, or a function, not {weights!r:.100}")
        given = np.array([weights.get(name, -1) for name in self._names], float)
        known = weights.keys() == set(self._names)
        if not (known and np.isfinite(given).all() and (given >= 0).all() and given.any()):
            raise ValueError(
                f"weights must be numbers of at least 0, and not all 0, for {', '.join(self._names)}, "
                f"and not {weights!r:.500}"
            )
        if self._never_zero and not given.all():
            without = ", ".join(itertools.compress(self._names, given == 0))
            raise ValueError(
                f"with a weight of 0, {without} is never exhausted: with stopping_strategy='all_exhausted' "
                "weights must be more than 0"
            )
        raised = (given / given.max()) ** self._power  # 0 stays 0
        shares = raised / self._tokens
        found: FloatArray = shares / shares.sum()
        return found


def _mean_tokens(mixture: Mixture, lengths: Lengths) -> FloatArray:
    """Tokens of a sample of each source, on average."""
    if lengths.keys() != set(mixture.names):
        raise ValueError(
            f"lengths must be of {', '.join(mixture.names)}, and are of {', '.join(map(str, lengths))}"
        )
    means = []
    for name, size in zip(mixture.names, mixture.sizes, strict=True):
        array: Any = np.asarray(lengths[name])
        if array.shape != (size,) or array.dtype.kind not in "iu" or array.min() < 1:
            raise ValueError(
                f"lengths of {name} must be {size:,} whole numbers of at least 1, one for each sample, and "
                f"not of shape {array.shape} and type {array.dtype}"
            )
        means.append(array.mean())
    return np.array(means)
