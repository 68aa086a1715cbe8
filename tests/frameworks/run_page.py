"""Runs a page's program, with this loader or with torch's, and prints its losses and batches as JSON.

    python run_page.py PAGE (slots|torch)

With "slots", torch's own iterators with workers are forbidden. With "torch", shmloader's names do nothing:
its class is torch's without the options. Batches from workers are counted in both.
"""

import collections
import contextlib
import json
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import torch.utils.data
from torch.utils.data import dataloader

import shmloader
from shmloader.iterator import SlotIterator
from shmloader.settings import OWN_DEFAULTS

PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

counts = collections.Counter[str]()


class WithoutOptions(torch.utils.data.DataLoader[Any]):
    """torch's loader, which takes this one's options and ignores them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{name: kwargs[name] for name in kwargs.keys() - OWN_DEFAULTS.keys()})


def count_batches_of(kind: type) -> None:
    take = kind._next_data

    def counted(iterator: Any) -> Any:
        batch = take(iterator)
        counts["batches"] += 1
        return batch

    kind._next_data = counted


def forbid(*_: Any, **__: Any) -> None:
    raise AssertionError("torch's own iterator was made")


def main() -> None:
    page, mode = Path(sys.argv[1]), sys.argv[2]
    multiprocessing.set_start_method("fork")  # definitions of a page cannot be imported
    if mode == "slots":
        dataloader._MultiProcessingDataLoaderIter.__init__ = forbid
        count_batches_of(SlotIterator)
    else:
        shmloader.DataLoader = WithoutOptions
        shmloader.install = lambda **_: contextlib.nullcontext()
        count_batches_of(dataloader._MultiProcessingDataLoaderIter)
    programs = PROGRAM.findall(page.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(programs[0], str(page), "exec"), names)
    losses = [float(loss).hex() for loss in names["losses"]]
    print(json.dumps({"losses": losses, **counts}))


if __name__ == "__main__":
    main()
