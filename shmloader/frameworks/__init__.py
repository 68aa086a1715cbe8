"""Integrations with other libraries: ``install()`` for all of them, and more for some.

Only `shmloader/__init__` imports this package, and it imports no framework that the program has not imported.
"""

from shmloader.frameworks.install import install, uninstall

__all__ = ["install", "uninstall"]
