"""The objects that `benchmarks.queues` sends, and how many wait; a module that every process can import."""

from __future__ import annotations

from typing import Any

import torch

MAXSIZE = 8  # objects that may wait, in all transports
WARM = 2 * MAXSIZE  # objects before the time is taken: memory that comes again has its pages by then


class Kind:
    """A kind of object that is sent."""

    def __init__(self, name: str, count: int, shapes: list[tuple[int, ...]]) -> None:
        self.name, self.count = name, count
        self.kept = [torch.ones(shape) for shape in shapes]

    def make(self) -> Any:
        """Makes one in private memory."""
        return self.join([kept.clone() for kept in self.kept])

    def make_in(self, queue: Any) -> Any:
        """Makes one in a queue's memory."""
        return self.join([queue.new_empty(kept.shape, kept.dtype).copy_(kept) for kept in self.kept])

    def join(self, tensors: list[torch.Tensor]) -> Any:
        """The object of its tensors."""
        if not tensors:
            return b"0123456789abcdef"
        return tensors[0] if len(tensors) == 1 else {str(n): tensor for n, tensor in enumerate(tensors)}


KINDS = [
    Kind("16 bytes", 5000, []),
    Kind("1 MB", 400, [(250_000,)]),
    Kind("64 MB", 12, [(16_000_000,)]),
    Kind("dict of 100", 50, [(64, 16)] * 100),
]
