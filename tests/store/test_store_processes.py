"""Stores in other processes: by handle, under every start method."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from store_samples import Person
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from shmloader import share
from shmloader.store.handles import pack, unpack
from shmloader.store.sealed_buffer import buffer_at
from shmloader.store.testing import identical

ROWS = 150_000


def make_rows() -> list[dict[str, Any]]:
    return [{"path": f"images/train/{n:08d}.jpg", "label": n % 1000, "box": (n, 2.5)} for n in range(ROWS)]


def make_stores() -> dict[str, Any]:
    array = np.arange(60_000.0).reshape(-1, 3)
    rows = make_rows()
    stores = {
        "records": share(iter(rows)),
        "array": share(array)[::7],
        "tensor": share(torch.from_numpy(array.copy())),
        "mapping": share({row["path"]: row["label"] for row in rows[:2000]} | {5: 6, (None, "a"): 7}),
        "table": share(pa.table({"n": range(500), "s": [str(n) for n in range(500)]})),
        "objects": share([Person(str(n), n) for n in range(500)]),
    }
    stores["slice"] = stores["records"][10:20]
    stores["field"] = stores["records"].column("label")
    return stores


def private_dirty_nbytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


def in_memory(value: Any) -> bool:
    """Whether an array or a tensor lies in shared memory of this process."""
    address = value.data_ptr() if isinstance(value, torch.Tensor) else value.__array_interface__["data"][0]
    return buffer_at(address, 1) is not None


def read_all(stores: dict[str, Any], pipe: Connection) -> None:
    """Check every store, read the large one wholly, and wait."""
    torch.set_num_threads(1)  # as loaders do: a forked process has none of its parent's threads
    records = stores["records"]
    assert records[5] == {"path": "images/train/00000005.jpg", "label": 5, "box": (5, 2.5)}
    gc.collect()
    gc.freeze()  # as loaders do: a collection would copy what a fork shares with its parent
    before = private_dirty_nbytes()
    total = 0
    for _ in range(2):
        total = sum(row["label"] for row in records)
    found = {
        "growth": private_dirty_nbytes() - before,
        "total": total,
        "array": (float(stores["array"].sum()), stores["array"].flags.writeable),
        "tensor": float(stores["tensor"][-1].sum()),
        "mapping": sum(stores["mapping"][f"images/train/{n:08d}.jpg"] for n in range(2000)),
        "other keys": (stores["mapping"][5.0], stores["mapping"][None, "a"], "a" in stores["mapping"]),
        "table": stores["table"][499],
        "objects": stores["objects"][-1].age,
        "slice": stores["slice"][0]["label"],
        "field": stores["field"][999],
        "mapped": in_memory(stores["array"]) and in_memory(stores["tensor"]),
    }
    stores["tensor"].fill_(0)
    pipe.send(found)
    pipe.recv()


def test_stores_reach_a_process_and_survive_its_kill(start_method: str) -> None:
    stores = make_stores()
    context = multiprocessing.get_context(start_method)
    here, there = context.Pipe()
    worker = context.Process(target=read_all, args=(stores, there))
    worker.start()
    there.close()
    try:
        found = here.recv()
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        worker.close()
        here.close()
    growth = found.pop("growth")
    assert growth < 0.05 * stores["records"].describe().python_nbytes
    array = np.arange(60_000.0).reshape(-1, 3)
    assert found == {
        "total": sum(n % 1000 for n in range(ROWS)),
        "array": (float(array[::7].sum()), False),
        "tensor": float(array[-1].sum()),
        "mapping": sum(n % 1000 for n in range(2000)),
        "other keys": (6, 7, False),
        "table": {"n": 499, "s": "499"},
        "objects": 499,
        "slice": 10,
        "field": 999,
        "mapped": True,
    }
    # The worker's writes to a tensor are private, and its death affects no other process.
    assert float(stores["tensor"].sum()) == float(array.sum())
    assert identical(stores["records"][-1], make_rows()[-1])
    assert not [name for name in os.listdir("/dev/shm") if "shmloader-store" in name]
    # No view is left behind: the fixture fails this test if a mapping stays.
    del stores, found


def test_the_message_has_a_handle_and_no_data() -> None:
    """The message is small, however large the store is."""
    store, array = share([b"x" * 1000] * 1000), share(np.zeros(8_000_000))
    table = share(Holder(pa.table({"n": range(200_000)}))).table
    try:
        message = bytes(ForkingPickler.dumps({"store": store, "array": array[5:], "table": table}))
        assert len(message) < 4000
        received = pickle.loads(message)  # like a queue of multiprocessing
        assert received["store"].buffer.fd != store.buffer.fd
        assert list(received["store"]) == list(store)
        assert np.array_equal(received["array"], array[5:])
        assert in_memory(received["array"])
        assert received["table"].equals(table)
    finally:
        resource_sharer.stop(timeout=5)


class Holder:
    def __init__(self, table: Any) -> None:
        self.table = table


class Records(Dataset):
    def __init__(self, rows: Any) -> None:
        self.nested = {"rows": [rows]}

    def __len__(self) -> int:
        return len(self.nested["rows"][0])

    def __getitem__(self, index: int) -> Any:
        return self.nested["rows"][0][index]


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.usefixtures("warm_helpers")
def test_torchs_own_loader_takes_stores_too(start_method: str) -> None:
    """Nested in datasets, and as a dataset: workers of torch's DataLoader get them by handle."""
    rows = [{"path": str(n), "label": n} for n in range(64)]
    store = share(rows)
    dataset = ConcatDataset([Subset(Records(store), range(0, 64, 2)), store])
    loader = DataLoader(dataset, batch_size=32, num_workers=1, multiprocessing_context=start_method)
    batches = list(loader)
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [*range(0, 64, 2), *range(64)]
    assert [path for batch in batches for path in batch["path"]] == [
        row["path"] for row in (*rows[::2], *rows)
    ]


def test_a_store_outlives_the_process_that_built_it() -> None:
    """A forked builder hands it over and is killed."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    builder = context.Process(target=build_and_send, args=(there,))
    builder.start()
    store = here.recv()
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    builder.close()
    here.close()
    there.close()
    assert store == [{"n": n, "s": str(n)} for n in range(1000)]


def build_and_send(pipe: Connection) -> None:
    pipe.send(share({"n": n, "s": str(n)} for n in range(1000)))
    signal.pause()


KEEPS = """
import pyarrow
from shmloader import share
from shmloader.memory.process_memory import read_memory

rows = [bytes(200 + n % 7) for n in range(200_000)]
store = share(rows)
kept = read_memory("self")["Anonymous"]
pyarrow.default_memory_pool().release_unused()
print(kept - read_memory("self")["Anonymous"])
"""


def test_sharing_keeps_no_memory_that_it_has_needed_meanwhile() -> None:
    """Arrow would keep its memory for encoding the chunks, 19 MB here."""
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 << 20


def test_kept_selections_take_a_descriptor_only_where_they_are_sent() -> None:
    gc.collect()  # stores of other tests
    store, folder = share(list(range(100_000))), Path("/proc/self/fd")
    before = len(list(folder.iterdir()))
    kept = [store.select(np.arange(begin, 90_000)) for begin in range(50)]
    assert len(list(folder.iterdir())) == before
    for _ in range(2):
        pickled, buffers = pack(kept[3])
        assert len(pickled) < 4096
        assert len(buffers) == 2
        assert list(unpack(pickled, buffers)) == list(range(3, 90_000))
    assert len(list(folder.iterdir())) == before + 1
    numbers = np.arange(10)
    part = store.select(numbers)
    numbers[:] = 0  # the program's own
    assert list(part) == list(range(10))
