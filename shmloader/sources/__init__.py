"""Datasets whose batches are gathered with one call per leaf instead of sample by sample.

A gathered batch equals the one that torch's ``default_collate`` makes of the samples. Wherever that is not
certain, the samples are fetched one by one. See docs/vectorised.md.
"""

from shmloader.sources.base import NOT_GATHERED
from shmloader.sources.gatherer import Gatherer, why_per_sample

__all__ = ["NOT_GATHERED", "Gatherer", "why_per_sample"]
