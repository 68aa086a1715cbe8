"""Functions given to ``torch.compile`` that iterate over loaders: loading is not compiled with them."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from loading import Numbered

import shmloader
from shmloader import DataLoader

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="this torch cannot be told to leave a function alone",
)


@pytest.fixture(autouse=True)
def _forget_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # made by any compiler
    yield
    torch._dynamo.reset()


def _loop(loader: Any) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for batch in loader:
        total = total * 2 + batch.sum()
    return total


def _three_batches(loader: Any) -> torch.Tensor:
    batches = iter(loader)
    return next(batches) + next(batches) * 2 + next(batches) * 3


@pytest.mark.each_value
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("function", [_loop, _three_batches])
@pytest.mark.parametrize("installed", [False, True])
def test_a_compiled_function_iterates_as_one_that_is_not(
    function: Callable[[Any], torch.Tensor], workers: dict[str, Any], installed: bool
) -> None:
    kind = torch.utils.data.DataLoader if installed else DataLoader
    with shmloader.install() if installed else nullcontext():
        loader: Any = kind(Numbered(12), batch_size=2, **workers)
        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(loader), function(list(loader)))
        loader.close()
