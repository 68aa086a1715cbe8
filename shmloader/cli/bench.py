"""``python -m shmloader bench``: finds the benchmarks of a checkout and starts them.

Everything else, the options included, is in ``benchmarks/comparison.py``, which an installed package lacks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import shmloader

NOT_MEASURED = 2

_ENTRY = Path("benchmarks", "comparison.py")


def checkout() -> Path | None:
    """The folder of the checkout that this package lies in; None for an installed package.

    Beside that there may be another project's package of the name ``benchmarks``.
    """
    root = Path(shmloader.__file__).resolve().parent.parent
    return root if (root / _ENTRY).is_file() and (root / "pyproject.toml").is_file() else None


def main(words: Sequence[str]) -> int:
    """Run the benchmarks of the checkout that this package lies in; gives the exit status of the comparison.

    It is 2 if the benchmarks or a library they need are missing.
    """
    root = checkout()
    if root is None:
        print(
            f"error: the benchmarks are not here: {Path(shmloader.__file__).parent} is an installed package, "
            "and they come with the source tree: clone the repository and run `make bench` there, or "
            "install it editable (pip install -c constraints.txt -e '.[bench]') and repeat this command.",
            file=sys.stderr,
        )
        return NOT_MEASURED
    sys.path.insert(0, str(root))
    try:
        comparison = importlib.import_module("benchmarks.comparison")
    except ModuleNotFoundError as error:
        print(
            f"error: the benchmarks need {error.name}: pip install -c constraints.txt -e '.[bench]'",
            file=sys.stderr,
        )
        return NOT_MEASURED
    status: int = comparison.main(list(words))
    return status
