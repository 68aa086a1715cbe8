"""Samples of tar archives: by number (`TarDataset`); and in `stream`, with Arrow, one after another (`TarStream`).

No module that loads imports it.
"""

from shmloader.tar.dataset import TarDataset
from shmloader.tar.decoders import DECODERS

__all__ = ["DECODERS", "TarDataset"]
