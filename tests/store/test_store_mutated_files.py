"""Damaged files of every size class: an error that names the file, or other values; nothing crashes.

Processes of their own read mutated files. ``SHMLOADER_LONG=1`` reads some 50,000.
"""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from store_samples import Colour, Person, Point
from warm_python import warm_python

import shmloader
from shmloader import share

ROWS: list[Any] = [
    {
        "path": f"image {n}",
        "label": n,
        "at": Point(n, n / 2),
        "who": Person("x" * n, n),
        "colour": Colour.RED,
        "array": np.arange(n % 5),
        "tensor": torch.ones(2, 2),
        "mixed": (n, "a", None)[n % 3],
        "boxes": [[n, 2.5]] * (n % 3),
        "tags": {n},
        **({"extra": None} if n % 2 else {}),
    }
    for n in range(40)
]

LARGE: list[Any] = [
    {"by": {f"key {n}": {"a": n} for n in range(300)}},
    {"by": {"a": {"b": {f"word {n}": {"c": {}} for n in range(300)}}, "rows": [["x", 1.5] * 40] * 30}},
    {"by": {"a": None}},
]

READS = """
import random, sys, traceback, warnings
from collections.abc import Mapping
import shmloader
from pathlib import Path
warnings.simplefilter("ignore")
seed, most, folder, *sources = sys.argv[1:]
sys.path.insert(0, folder)
import store_samples
dice = random.Random(int(seed))
ends = {4: [-1, 1 << 16, (1 << 31) - 1, -(1 << 31)], 8: [-1, 1 << 31, 1 << 36, (1 << 63) - 1]}

def place(data):
    edge = dice.randrange(min(len(data), 4096))  # where most of a large file's metadata is
    return dice.choice([dice.randrange(len(data)), edge, len(data) - 1 - edge])

def mutate(data):
    how = dice.randrange(6)
    if how == 0:
        del data[dice.randrange(len(data)):]
    for _ in range(dice.choice([1, 1, 2, 8])):
        if how in (1, 2) and len(data) > 8:  # an offset, a length
            width = dice.choice([4, 8])
            at = min(place(data), len(data) - width) // width * width
            data[at:at + width] = dice.choice(ends[width]).to_bytes(width, "little", signed=True)
        elif data:
            data[place(data)] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])

def walk(value):
    if isinstance(value, Mapping):
        for key in value:
            walk(value.get(key))
    elif isinstance(value, (list, shmloader.store.Store)):
        for one in value:
            walk(one)

def read(store, is_small):
    some = range(len(store))
    if len(some) > 1000:
        some = [*range(20), *dice.sample(some, 50), len(store) - 1]
    for number in some:
        walk(store[number])
    if len(store):
        store.take([0, len(store) - 1] * 20)
        if type(store).__name__ == "LazyStore":  # it has no columns apart
            store.__getitems__(some)
            return
        for name in store[0]:
            try:
                column = store[name]
            except KeyError:  # not all rows have it
                continue
            list(map(column.__getitem__, some))
    if is_small:
        list(store)
        list(store.plain())
        store.to_arrow()
        repr(store)

for source in map(Path, sources):
    good = source.read_bytes()
    is_small = len(good) < 1 << 16
    path = source.with_stem("mutated")
    errors, count = 0, int(most) // (1 if is_small else 4)
    for number in range(count):
        data = bytearray(good)
        mutate(data)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        print("reading mutation", number, "of", source, file=sys.stderr, flush=True)
        if b"shmlCRC2" in good and data != good:  # what save() wrote has checksums
            try:
                shmloader.open(path)
            except ValueError as error:
                assert str(path) in str(error)
            else:
                raise AssertionError("a mutation was not noticed")
        for lazy in (False, True)[: 1 + (path.suffix == ".parquet")]:
            try:
                read(shmloader.open(path, lazy=lazy, verify=False), is_small)
            except Exception as error:
                if str(path) not in str(error):
                    raise
                errors += not lazy
    print(errors / count)
"""


def run(program: str, *arguments: Any) -> str:
    """What a program of its own process says; whatever ends that process fails the test."""
    command = [*warm_python(), "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])  # the mutated file is there still
    return done.stdout


def mutate(sources: Iterable[Path], count: int, seed: int) -> list[float]:
    """Read mutations of files in another process, ``count`` of each; returns the shares of errors."""
    return list(map(float, run(READS, seed, count, Path(__file__).parents[1], *sources).split()))


def write_large(path: Path, rows_at_once: int, **options: Any) -> None:
    """Some MiB of plain columns: from 2 MiB on, files are mapped in another way."""
    numbers = np.arange(12_000)
    table = pa.table(
        {
            "path": [f"images/{n:09d} and more text, so that the file is large enough" * 2 for n in numbers],
            "octets": [bytes([n % 256]) * (n % 100) for n in numbers],
            "label": numbers,
            "words": [["a word", None, str(n)][: n % 4] for n in numbers],
            "box": [[n / 2] * 4 for n in numbers],
            "at": [{"x": n, "y": None if n % 2 else str(n)} for n in numbers],
            "kind": pa.array([f"kind {n % 7}" for n in numbers]).dictionary_encode(),
        }
    )
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows_at_once, **options)
        return
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, rows_at_once)


def write_small(path: Path, **options: Any) -> None:
    plain = [{name: row[name] for name in ("path", "label", "at", "array")} for row in ROWS]
    if path.suffix == ".parquet":
        share(plain).save(path)
        return
    table = pa.table({"text": [str(n) for n in range(40)], "list": [[n, None] for n in range(40)]})
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, 7)


FILES: dict[str, Callable[[Path], None]] = {
    "saved and large.arrow": lambda path: share(
        {"n": n, "text": f"text {n}" * 20} for n in range(30_000)
    ).save(path),
    "every kind.arrow": lambda path: share(ROWS).save(path),
    "large containers.arrow": lambda path: share(LARGE).save(path),
    "stream.arrow": write_small,
    "compressed stream.arrow": lambda path: write_small(path, compression="zstd"),
    "one batch.arrow": lambda path: write_large(path, 1 << 20),
    "batches.arrow": lambda path: write_large(path, 500),
    "compressed batches.arrow": lambda path: write_large(path, 2000, compression="lz4"),
    "small.parquet": write_small,
    "row groups.parquet": lambda path: write_large(path, 2000),
    "plain.parquet": lambda path: write_large(path, 1 << 20, use_dictionary=False, compression="none"),
}


def test_mutated_files_are_errors_that_name_the_file(tmp_path: Path) -> None:
    for name, write_file in FILES.items():
        write_file(tmp_path / name)
    shares = mutate([tmp_path / name for name in FILES], 40, seed=0)
    assert min(shares) > 0.05


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", FILES)
def test_many_mutations_are_errors_that_name_the_file(tmp_path: Path, name: str, seed: int) -> None:
    FILES[name](tmp_path / name)
    assert min(mutate([tmp_path / name], 2000, seed)) > 0.05


READS_ALL = """
import sys
import pyarrow as pa
import shmloader
for path in sys.argv[1:]:
    table = pa.ipc.open_file(pa.memory_map(path)).read_all()
    for read in (lambda: list(shmloader.open(path)), lambda: shmloader.share(table)[0]):
        try:
            read()
        except ValueError as error:
            print(error)
"""


def test_offsets_that_lead_out_of_the_file_are_errors(tmp_path: Path) -> None:
    paths = []
    for rows, rows_at_once in ((40, 40), (12_000, 12_000), (12_000, 500)):
        texts = pa.array(
            [f"images/{n:09d} and more, so that the file is large enough" * 3 for n in range(rows)]
        )
        lists = pa.array([["a", str(n)] for n in range(rows)])
        for offset, column in itertools.product((-(1 << 31), -1, (1 << 31) - 1), (texts, lists)):
            table = pa.table({"column": column})
            paths.append(tmp_path / f"{len(paths)}.arrow")
            with pa.ipc.new_file(paths[-1], table.schema) as writer:
                writer.write_table(table, rows_at_once)
            data = bytearray(paths[-1].read_bytes())
            begin = data.index(column.buffers()[1].to_pybytes()[:64])
            data[begin + 12 : begin + 16] = offset.to_bytes(4, "little", signed=True)
            paths[-1].write_bytes(data)
    said = run(READS_ALL, *paths).splitlines()
    assert len(said) == 2 * len(paths)
    for path, opened, shared in zip(paths, said[::2], said[1::2], strict=True):
        assert f"row 0 of {path}" in opened
        assert "do not ascend" in opened
        assert "Offset invariant failure" in shared


READS_EACH = """
import sys
from pathlib import Path
import shmloader
good, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
for place in range(len(good)):
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1:])
    try:
        list(shmloader.open(path))
    except Exception as error:
        assert str(path) in str(error)
"""


def test_damaged_metadata_of_a_parquet_file_ends_no_process(tmp_path: Path) -> None:
    """For some of the bytes Arrow raises an exception of C++ that pyarrow does not catch."""
    good, path = tmp_path / "good.parquet", tmp_path / "mutated.parquet"
    pq.write_table(
        pa.table({"a": [["x"] * (n % 3) for n in range(9)]}), good, store_schema=False, write_statistics=False
    )
    run(READS_EACH, good, path)


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_an_unreadable_row_is_named_with_its_own_file(tmp_path: Path, suffix: str) -> None:
    """Also if the file was unpacked to memory, and among others."""
    names = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path, times in zip(names, ([1, 2], [3, 1 << 62]), strict=True):
        table = pa.table({"at": pa.array(times, pa.timestamp("us"))})
        if suffix == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    store = shmloader.open(names)
    named = rf"row 3 of .*b\.{suffix} cannot be read"
    reads: list[Callable[[], Any]] = [
        lambda: store[3],
        lambda: list(store),
        lambda: store.__getitems__([0, 3]),
        lambda: store["at"][3],
        lambda: store[1:][2],
    ]
    for read in reads:
        with pytest.raises(ValueError, match=named) as caught:
            read()
        assert isinstance(caught.value.__cause__, OverflowError)
    with pytest.raises(ValueError, match=rf"a\.{suffix}, or another file that was opened with it, cannot"):
        store.take([0, 3])
    assert list(store[:3]["at"])[2].microsecond == 3


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_each_changed_byte_of_a_saved_file_is_noticed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"saved.{suffix}"
    share([{"n": n, "text": f"text {n}"} for n in range(20)]).save(path)
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            shmloader.open(path)


def test_checksums_are_looked_at_as_the_program_wishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, changed = {"text": "a" * 20}, "not those that were written"
    for suffix in ("arrow", "parquet"):
        path, foreign = tmp_path / f"saved.{suffix}", tmp_path / f"foreign.{suffix}"
        share([row] * 100).save(path)
        write = pa.feather.write_feather if suffix == "arrow" else pq.write_table
        write(pa.table({"text": ["a" * 20] * 100}), foreign)
        data = path.read_bytes()
        place = data.index(b"shmlCRC2") - 1
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert shmloader.open(path, verify=False)[0] == row
        for verify in (None, True):
            with pytest.raises(ValueError, match=changed):
                shmloader.open(path, verify=verify)
        with pytest.raises(ValueError, match="has no checksums"):
            shmloader.open(foreign, verify=True)
        assert shmloader.open(foreign)[0] == row
    assert shmloader.open(path, lazy=True)[0] == row
    with pytest.raises(ValueError, match=changed):
        shmloader.open(path, lazy=True, verify=True)
    monkeypatch.setattr("shmloader.store.files._MOST_VERIFIED_NBYTES", 0)
    assert shmloader.open(path.with_suffix(".arrow"))[0] == row
    with pytest.raises(ValueError, match=changed):
        shmloader.open(path)


def test_the_changed_block_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.arrow"
    share(np.arange(500_000).tolist()).save(path)
    data = bytearray(path.read_bytes())
    data[1_500_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"saved\.arrow.*bytes 1,048,576 to [\d,]+ are not"):
        shmloader.open(path)


def test_checksums_of_more_bytes_than_a_file_has_are_refused_before_they_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "made up.arrow"
    share([1, 2]).save(path)
    data = path.read_bytes()
    footer = data[data.rindex(b"shmlCRC2") + 8 :]
    record = struct.pack("<8sQI8s", b"shmlCRC2", 1 << 40, zlib.crc32(footer), b"shmlCRC2")
    path.write_bytes(data[: -len(record + footer)] + record + footer)
    with pytest.raises(ValueError, match="its footer or its checksums are not those"):
        shmloader.open(path)


def test_other_programs_read_a_file_with_checksums(tmp_path: Path) -> None:
    rows = [{"n": n} for n in range(9)]
    for suffix in ("arrow", "parquet"):
        share(rows).save(tmp_path / f"rows.{suffix}")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == rows
    assert pa.ipc.open_file(tmp_path / "rows.arrow").read_all().to_pylist() == rows
    with (tmp_path / "rows.arrow").open("rb") as file:
        file.seek(8)  # behind the magic word there is a stream
        assert pa.ipc.open_stream(file).read_all().to_pylist() == rows
