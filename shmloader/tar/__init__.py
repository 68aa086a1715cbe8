"""Samples of tar archives: by number (`TarDataset`), and as a stream (`TarStream`).

No module that loads imports it.
"""

from shmloader.tar.dataset import TarDataset
from shmloader.tar.decoders import DECODERS
from shmloader.tar.stream import TarStream

__all__ = ["DECODERS", "TarDataset", "TarStream"]
