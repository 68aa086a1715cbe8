"""The store class in docs/stores.md is run as printed: through the checks, and in a loader."""

import multiprocessing
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import shmloader

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
NAME, OF_CLASS = "windows_of_docs", "windows"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The section's code, as a module that other processes can import too."""
    section = PAGE.read_text(encoding="utf-8").split("## A kind of one's own")[1].split("\n## ")[0]
    code = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(code) == 2
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in zip((OF_CLASS, NAME), code, strict=True):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, __import__(name))
    return sys.modules[NAME]


def test_the_pages_own_store_passes_the_checks(module: ModuleType) -> None:
    for check in module.CHECKS:
        module.test_windows(check)


def test_it_is_saved_taken_into_outputs_and_read_by_workers(module: ModuleType, tmp_path: Path) -> None:
    values = np.arange(50.0)
    store = module.Windows(shmloader.share(values), 8)
    store[5:].save(tmp_path / "part.arrow")
    rows = [values[begin : begin + 8] for begin in range(43)]
    assert all(map(np.array_equal, shmloader.open(tmp_path / "part.arrow"), rows[5:]))
    out = torch.empty(2, 8, dtype=torch.float64)
    assert store.take([0, -1], out) is out
    assert np.array_equal(out, [rows[0], rows[-1]])
    for wrong in (torch.empty(2, 8), torch.empty(3, 8, dtype=torch.float64)):
        with pytest.raises(TypeError, match="does not fit"):
            store.take([0, 1], wrong)
    batches: list[Any] = []
    loader = shmloader.DataLoader(
        store, batch_size=20, num_workers=1, multiprocessing_context=multiprocessing.get_context("forkserver")
    )
    with loader:
        batches += loader
    assert torch.equal(torch.cat(batches), torch.tensor(np.array(rows)))
