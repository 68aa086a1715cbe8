"""The warnings of a block, but for Python's own about fork, which come where Python is 3.12 or newer."""

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def caught_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect all warnings, each time they are given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of", DeprecationWarning)
        yield caught
