"""The loader's own modules work where `shmloader.store` does not exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import warm_python

import shmloader

PROGRAM = """
import sys, types

package = types.ModuleType("shmloader")
package.__path__ = [sys.argv[1]]
sys.modules["shmloader"] = package  # without its __init__, which imports everything
sys.modules["shmloader.store"] = None  # an import of it is a ModuleNotFoundError

from shmloader.loader import DataLoader

loader = DataLoader(list(range(8)), batch_size=4, num_workers=1, multiprocessing_context="fork")
print([batch.tolist() for batch in loader])
try:
    DataLoader([1], share_dataset=True)
except RuntimeError as error:
    print(error)
print("pyarrow" in sys.modules)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
def test_the_core_loads_without_the_store() -> None:
    command = [*warm_python(), "-c", PROGRAM, str(Path(shmloader.__file__).parent)]
    batches, error, arrow = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert batches == "[[0, 1, 2, 3], [4, 5, 6, 7]]"
    assert "share_dataset=True needs shmloader.store" in error
    assert arrow == "False"
