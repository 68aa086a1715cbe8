"""One loader for many processes of a host: `serve` in one of them, `attach` in the others.

Plain loading never imports this package.
"""

from shmloader.serving.reader import AttachedIterator, AttachedLoader, ReaderStatistics, attach
from shmloader.serving.start import serve

__all__ = ["AttachedIterator", "AttachedLoader", "ReaderStatistics", "attach", "serve"]
