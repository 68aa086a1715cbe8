"""What other libraries need to load through slots: ``install()`` for all of them, and more for some.

Nothing else in shmloader imports this package, and it imports no framework that the program has not imported.
"""

from shmloader.integrations.install import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]
