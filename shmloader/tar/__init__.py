"""`TarDataset`: samples of tar archives, over an index of their members. Loading never imports it."""

from shmloader.tar.dataset import TarDataset
from shmloader.tar.decoders import DECODERS

__all__ = ["DECODERS", "TarDataset"]
