"""Datasets whose samples tell the epoch that they were told."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class Tells(Dataset[Any]):
    """Its samples show the effects of `set_epoch`."""

    def __init__(self) -> None:
        self.state: Any = 0

    def set_epoch(self, epoch: int) -> None:
        self.state = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return repr(self.state)


class Counts(Tells):
    def set_epoch(self, epoch: int) -> None:
        self.state += 1


class Plain(Dataset[int]):
    """A dataset without ``set_epoch``."""

    start = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.start
