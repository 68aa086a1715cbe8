"""A loader on a platform that lacks what slots need loads as torch's does, and says so once."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "missing_platform.py"
MISSING = {
    "memfd": "Python's os.memfd_create is missing",
    "libc": "the C library cannot be called (ctypes.CDLL(None): no libc in a test)",
    "windows": "Python's os.memfd_create is missing",
}


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("what", MISSING)
def test_without_it_batches_are_torchs_and_one_warning_names_it(what: str, method: str) -> None:
    result = subprocess.run(
        [sys.executable, PROGRAM, what, method], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert MISSING[what] in result.stdout
    assert "Without effect: worker_restarts=2, on_error='skip'." in result.stdout
