"""The warnings of a block, without Python's own about fork, which Python 3.12 and newer give."""

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
