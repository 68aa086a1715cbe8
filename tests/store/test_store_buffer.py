"""The memory under stores: filled once, sealed, read by all, gone with its last user."""

import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from small_places import entering, memory_cgroup, run_in

from shmloader import SharedMemoryExhausted, share
from shmloader.store.sealed_buffer import BufferBuilder, SharedBuffer, buffer_at


def filled(data: bytes) -> SharedBuffer:
    with BufferBuilder() as out:
        out.append(data)
        return out.seal()


def test_what_is_appended_is_read_back_at_its_offset() -> None:
    with BufferBuilder() as out:
        places = [(out.append(bytes([n]) * n, alignment=1 << n % 7), n) for n in range(1, 256)]
        big = out.append(b"".join(bytes([n % 251]) * 5000 for n in range(2000)))
        buffer = out.seal()
    assert all(offset % (1 << n % 7) == 0 for offset, n in places)
    assert all(buffer.view[offset : offset + n] == bytes([n]) * n for offset, n in places)
    assert all(
        buffer.view[big + 5000 * n : big + 5000 * n + 5000] == bytes([n % 251]) * 5000 for n in range(2000)
    )


def test_an_empty_buffer_is_a_buffer() -> None:
    with BufferBuilder() as out:
        buffer = out.seal()
    assert buffer.nbytes == len(buffer.view) == 0


def test_reading_views_cannot_write() -> None:
    buffer = filled(b"0123456789")
    with pytest.raises(TypeError):
        buffer.view[0] = 1
    array = np.frombuffer(buffer.view, np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_write_round_the_views_stays_in_this_process() -> None:
    """torch has no read-only tensors: such a write must neither end the process nor reach another."""
    buffer = filled(bytes(10_000))
    other = SharedBuffer(os.dup(buffer.fd), buffer.nbytes)
    torch.frombuffer(buffer.private, dtype=torch.uint8).fill_(7)
    assert bytes(buffer.view) == b"\7" * 10_000
    assert bytes(other.view) == bytes(10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once per process that the memory is not writable
        tensor = torch.frombuffer(other.view, dtype=torch.uint8)
    tensor.fill_(9)  # a user may do this by torch.from_numpy(store[0])
    assert os.pread(buffer.fd, 10_000, 0) == bytes(10_000)


def test_nobody_can_write_to_sealed_memory() -> None:
    buffer = filled(b"0123456789")
    for write in (lambda: os.pwrite(buffer.fd, b"x", 0), lambda: os.ftruncate(buffer.fd, 5)):
        with pytest.raises(PermissionError):
            write()


def test_a_store_costs_one_descriptor_and_no_name() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    stores = [share([{"a": n, "b": str(n)}, {"c": np.zeros(3)}]) for n in range(5)]
    assert [store[0]["a"] for store in stores] == list(range(5))
    assert len(os.listdir("/proc/self/fd")) == before + 5
    assert not [name for name in os.listdir("/dev/shm") if "shmloader-store" in name]
    del stores
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_view_outlives_its_store() -> None:
    store = share([np.arange(1000), np.arange(1000)])
    row = store[1]
    descriptor = store.buffer.fd
    del store
    os.fstat(descriptor)  # by these the view may be sent to another process
    assert row.sum() == 499500
    del row
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_no_cycle_of_references_keeps_a_store() -> None:
    """Its memory is freed at once, not when the collector comes."""
    gc.collect()
    gc.disable()
    try:
        store = share([{"a": [1, "b"], "b": n} for n in range(10)])
        assert list(store)[3]["b"] == 3
        store.take([1, 2])
        store.to_arrow()
        inode = os.fstat(store.buffer.fd).st_ino
        assert is_mapped(inode)
        del store
        assert not is_mapped(inode)
    finally:
        gc.enable()


def is_mapped(inode: int) -> bool:
    return f" {inode} " in Path("/proc/self/maps").read_text()


def test_copies_are_the_buffer_and_plain_pickles_an_error() -> None:
    buffer = filled(b"x")
    assert copy.deepcopy([buffer])[0] is copy.copy(buffer) is buffer
    with pytest.raises(pickle.PicklingError, match=r"store\.save\(path\)"):
        pickle.dumps(buffer)


def test_an_abandoned_builder_frees_its_memory() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError), BufferBuilder() as out:
        out.append(bytes(10_000_000))
        raise KeyError
    assert len(os.listdir("/proc/self/fd")) == before


def resident_kb() -> int:
    return int(re.search(r"Rss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])  # type: ignore[index]


def test_too_much_is_an_error_with_both_numbers_before_a_page_is_touched() -> None:
    before_kb = resident_kb()
    with (
        BufferBuilder() as out,
        pytest.raises(
            SharedMemoryExhausted, match=r"needs 1,125,899,906,842,624 more bytes.*only [\d,]+ of"
        ) as caught,
    ):
        out.reserve(1 << 50)
    assert caught.value.needed_nbytes == 1 << 50
    assert 0 < caught.value.available_nbytes < 1 << 50
    assert isinstance(caught.value, MemoryError)
    assert resident_kb() - before_kb < 1024


def test_an_array_too_large_is_refused_before_it_is_begun() -> None:
    too_large = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 46,), (8,))  # nothing is read
    with pytest.raises(SharedMemoryExhausted, match="562,949,953,421,312 more bytes"):
        share(too_large)


STREAM = """
import sys
from shmloader import SharedMemoryExhausted, share
def rows():
    for n in range(10_000_000):
        yield {"path": f"{n:0100d}", "label": n}
try:
    share(rows() if sys.argv[1] == "stream" else [{"path": "x" * 10_000 + str(n)} for n in range(24_000)])
except SharedMemoryExhausted as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("source", "limit"), [("stream", "330M"), ("list", "600M")])
def test_inside_a_cgroup_the_limit_is_an_error_and_not_a_kill(source: str, limit: str) -> None:
    with memory_cgroup(limit) as folder:
        command = [sys.executable, "-c", STREAM, source]
        done = run_in(entering(folder), command)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "which holds" in done.stdout, done.stdout
    assert str(folder) in done.stdout


ENDLESS = """
import os, sys
from pathlib import Path
from shmloader import share
def rows():
    for n in range(10_000_000):
        if n == 400_000:
            for link in Path("/proc/self/fd").iterdir():
                if link.exists() and link.stat().st_size > 10_000_000:
                    print(link.stat().st_ino, flush=True)
            sys.stdin.read()
        yield {"path": f"{n:050d}"}
share(rows())
"""


def holders(inode: int) -> Iterator[str]:
    """The processes that have a store's memory open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found = [link for link in (process / "fd").iterdir() if link.stat().st_ino == inode]
            mapped = [line for line in (process / "maps").read_text().splitlines() if f" {inode} " in line]
        except OSError:
            continue
        if [
            link for link in found if "shmloader" in str(link.readlink()) or "shm" in str(link.readlink())
        ] or [line for line in mapped if "shmloader" in line]:
            yield process.name


def test_a_builder_that_is_killed_leaves_nothing() -> None:
    builder = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with builder:
        inode = int(builder.stdout.readline())
        assert str(builder.pid) in holders(inode)
        builder.send_signal(signal.SIGKILL)
        builder.wait(30)
        deadline = time.monotonic() + 60
        while list(holders(inode)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(holders(inode)) == []
    assert not [name for name in os.listdir("/dev/shm") if "shmloader-store" in name]


def test_a_buffer_is_found_while_another_thread_makes_some() -> None:
    kept, begun = [filled(bytes(100)) for _ in range(50)], threading.Event()

    def make() -> None:
        for _ in range(30):
            begun.set()
            assert [SharedBuffer(os.dup(kept[0].fd), 100) for _ in range(100)]

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(make)
            begun.wait()
            while not making.done():
                assert buffer_at(kept[-1].address, 100) is kept[-1]
            making.result()
    finally:
        sys.setswitchinterval(interval_s)
