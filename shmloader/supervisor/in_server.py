"""Imported by the fork server, last of what it imports, and by nobody else: see `fork_server`.

A module of its own, since what is imported from here may import this package, which is complete by now.
"""

import os

from shmloader.supervisor.preload import VARIABLE, Wish, fulfil

if VARIABLE in os.environ:
    fulfil(Wish.from_text(os.environ.pop(VARIABLE)))
