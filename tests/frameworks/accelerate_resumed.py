"""Two ranks of accelerate on CPU that save in mid-epoch or at its end, and resume, started by torchrun.

    torchrun --nproc-per-node 2 accelerate_resumed.py FOLDER (stock|torchdata|install|asked)

Each rank writes, as JSON, for each case the batches of an undisturbed run, those before the checkpoint, and
those of a run that has loaded it; and what is said of a sampler whose order other ranks may not have.
"""

import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import shmloader

EPOCHS = 3
CASES: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "shuffled by seed": {"shuffle": True, "use_seedable_sampler": True},
    "shuffled, split": {"shuffle": True, "split_batches": True},
    "uneven": {"shuffle": True, "even_batches": False, "rows": 30},
    "dispatched": {"shuffle": True, "dispatch_batches": True},
    "dispatched, split": {"shuffle": True, "dispatch_batches": True, "split_batches": True},
    "stream": {"stream": True, "dispatch_batches": False},
    "stream, dispatched": {"stream": True, "dispatch_batches": True},
}
STEPS = {"mid-epoch": 2, "a later epoch": 6, "last batch": 4}


class Rows(Dataset):
    def __init__(self, rows: int = 32) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(32.0).reshape(32, 1))


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(31, -1, -1))

    def __len__(self) -> int:
        return 32


def prepared(mode: str, stream: bool = False, rows: int = 32, **more: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()
    order = {name: more.pop(name) for name in ("shuffle", "sampler") if name in more}
    stateful = mode in ("torchdata", "asked")
    given = accelerate.DataLoaderConfiguration(use_stateful_dataloader=stateful, **more)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=given)
    size = 8 if more.get("split_batches") else 4
    loader = DataLoader(Stream() if stream else Rows(rows), batch_size=size, num_workers=1, **order)
    return accelerator, accelerator.prepare(loader)


def train(loader: Any, epochs: Any) -> Iterator[list[float]]:
    for _ in epochs:
        for batch in loader:
            yield batch.flatten().tolist()


def run(mode: str, folder: Path, step: int, **case: Any) -> tuple[Any, Any]:
    accelerate.utils.set_seed(5)
    accelerator, loader = prepared(mode, **case)
    training = train(loader, range(EPOCHS))
    begun = list(itertools.islice(training, step))
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    training.close()
    accelerate.utils.set_seed(5 if "use_seedable_sampler" in case else 6)
    accelerator, loader = prepared(mode, **case)
    accelerator.load_state(str(folder))
    return begun, list(train(loader, range(step // 4, EPOCHS)))


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode in ("install", "asked"):
        shmloader.install()
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        accelerate.utils.set_seed(5)
        whole = list(train(prepared(mode, **case)[1], range(EPOCHS)))
        for when, step in STEPS.items():
            try:
                begun_and_rest = run(mode, folder / f"{name}, {when}", step, **case)
            except Exception as error:
                if mode != "torchdata":
                    raise
                begun_and_rest = [], repr(error)
            found[f"{name}, {when}"] = whole, *begun_and_rest
    accelerator, loader = prepared(mode, sampler=Backwards())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        next(train(loader, range(1)))
        accelerator.save_state(str(folder / "backwards"))
    found["said"] = [str(one.message) for one in said if "for 2 ranks" in str(one.message)]
    rank = accelerate.PartialState().process_index
    (folder / f"rank{rank}").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
