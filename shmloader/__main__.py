"""Entry point of ``python -m shmloader``."""

from __future__ import annotations

import sys

from shmloader.cli import main

if __name__ == "__main__":  # A spawned worker imports this module again: it must do nothing there.
    sys.exit(main())
