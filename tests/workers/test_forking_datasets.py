"""A process that a dataset forks is no worker: however it ends, the batches are its parent's."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Forks(Dataset):
    """Sample i is i; the third waits for a child that ends in a given way, and is the child's exit code."""

    def __init__(self, end: str) -> None:
        self.end = end

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index != 2:
            return torch.full((300,), index)
        pid = os.fork()
        if pid == 0:
            if self.end == "exit":
                sys.exit(7)
            if self.end == "raise":
                raise ValueError("in the child")
            return torch.full((300,), -1)
        return torch.full((300,), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@pytest.mark.parametrize("worker_type", ["process", "thread"])
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("exit", 7, ""), ("raise", 1, "ValueError: in the child"), ("return", 1, "End it with os._exit()")],
)
def test_a_child_of_a_dataset_ends_and_makes_no_batch(
    worker_type: str, end: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if (worker_type, end) == ("thread", "exit"):  # which has no code of its own there
        code, said = 1, "SystemExit: 7"
    loader = DataLoader(Forks(end), batch_size=2, num_workers=1, worker_type=worker_type)
    held = list(loader)
    values = [batch[:, 0].tolist() for batch in held]
    assert values == [[i, i + 1] if i != 2 else [code, 3] for i in range(0, 24, 2)]
    assert all((batch == batch[:, :1]).all() for batch in held)
    error_output = capfd.readouterr().err
    assert said in error_output
    assert "Fatal" not in error_output
    assert bool(said) == bool(error_output)
