"""Integrations: ``install()``, by which any library loads through slots, and more for some of them.

Only `shmloader/__init__` imports this package, and it imports no framework that the program has not imported.
"""

from shmloader.integrations.install import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]
