"""Reads Ray's objects and blocks in a worker thread, and in a forked process, where that is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
import ray.data
import torch
from torch.utils.data import Dataset, IterableDataset

import shmloader


class Objects(Dataset[Any]):
    def __init__(self, references: list[Any]) -> None:
        self.references = references

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, index: int) -> Any:
        return ray.get(self.references[index])


class Blocks(IterableDataset[Any]):
    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __iter__(self) -> Iterator[Any]:
        for batch in self.blocks.iter_batches(batch_size=4, batch_format="numpy"):
            yield torch.from_numpy(batch["id"].copy())


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    thread, process = {"worker_type": "thread"}, {"multiprocessing_context": "fork"}
    objects, blocks = Objects([ray.put(number) for number in range(8)]), Blocks(ray.data.range(8))
    for dataset, batch_size in ((objects, 4), (blocks, None)):
        for options in (thread, process):
            loader = shmloader.DataLoader[Any](
                dataset,
                batch_size=batch_size,
                num_workers=1,
                timeout=60,
                **options,  # type: ignore[arg-type]
            )
            try:
                print([batch.tolist() for batch in loader])
            except RuntimeError as error:
                print(type(error).__name__, str(error).splitlines()[0])


if __name__ == "__main__":
    main()
