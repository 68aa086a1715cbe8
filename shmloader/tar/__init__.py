"""Samples of tar archives: by number (`TarDataset`), and with Arrow one after another (`stream.TarStream`).

No module that loads imports it.
"""

from shmloader.tar.dataset import TarDataset
from shmloader.tar.decoders import DECODERS

__all__ = ["DECODERS", "TarDataset"]
