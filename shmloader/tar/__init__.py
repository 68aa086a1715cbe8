"""`TarDataset`: samples of tar archives, over an index of their members. No module that loads imports it."""

from shmloader.tar.dataset import TarDataset
from shmloader.tar.decoders import DECODERS

__all__ = ["DECODERS", "TarDataset"]
