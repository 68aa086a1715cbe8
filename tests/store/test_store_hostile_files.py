"""Damaged and hostile files: an error that names the file, or other values; no code runs, and nothing
crashes.

Each run has a process of its own, which reads thousands of mutated files and reports the outcomes. All 10,000
mutations run with ``SHMLOADER_LONG=1``.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from store_samples import Colour, Person, Point

import shmloader
from shmloader import share
from shmloader.store.columns.types import ArrayType, EnumType, LinkType, NamedTupleType, PickleType

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

READS = """
import os, random, sys, traceback, warnings
import numpy as np, torch
import shmloader
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[4])
import store_samples
source, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
good = source.read_bytes()
path = source.with_name("mutated.arrow")
dice = random.Random(seed)
found = {"errors": 0, "read": 0}
for number in range(count):
    data = bytearray(good)
    how = dice.randrange(4)
    if how == 0:
        del data[dice.randrange(len(data)):]
    for _ in range(dice.choice([1, 1, 2, 8])):
        if data:
            data[dice.randrange(len(data))] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    try:
        store = shmloader.open(path)
        for row in store: pass
        if len(store): store.take([0, len(store) - 1] * 20)
        store.to_arrow()
        found["read"] += 1
    except shmloader.SharedMemoryExhausted as error:
        found["errors"] += 1
    except Exception as error:
        if str(path) not in str(error):
            traceback.print_exc()
            print("UNNAMED", type(error).__name__, error, number)
            sys.exit(3)
        found["errors"] += 1
print(found["errors"], found["read"])
"""


def mutate(source: Path, count: int, seed: int) -> tuple[int, int]:
    """Read mutations of a file in another process; returns the numbers of errors and of successful reads."""
    folder = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", READS, str(source), str(count), str(seed), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-3000:])
    errors, read = map(int, done.stdout.split())
    assert errors + read == count
    return errors, read


@pytest.mark.parametrize(
    ("count", "seed"), [(200, 0), *(pytest.param(2000, seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_mutated_files_are_errors_that_name_the_file(tmp_path: Path, count: int, seed: int) -> None:
    share(ROWS).save(tmp_path / "good.arrow")
    errors, _ = mutate(tmp_path / "good.arrow", count, seed)
    assert errors > count // 20


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def write(path: Path, column: Any, said: dict[str, Any] | None = None) -> None:
    said = {"version": 1, "rows": "column", **(said or {})}
    schema = pa.schema([pa.field("", column.type)], {b"shmloader": json.dumps(said).encode()})
    with pa.ipc.new_file(path, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=schema))


def test_pickled_values_are_read_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bomb.arrow"
    write(path, PickleType(pa.binary(), types=["x"]).wrap(pa.array([pickle.dumps(Bomb())])))
    with pytest.raises(ValueError, match=r"bomb\.arrow has pickled values \(rows\).*allow_pickle=True"):
        shmloader.open(path)
    share([{"a": 1, "b": 1j}] * 3).save(path)
    with pytest.raises(ValueError, match=r"pickled values \(b\)"):
        shmloader.open(path)
    assert shmloader.open(path, columns=["a"])[2] == {"a": 1}
    assert shmloader.open(path, allow_pickle=True)[1] == {"a": 1, "b": 1j}
    assert not (tmp_path / "exploded").exists()


def test_classes_are_not_imported_and_none_of_their_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name any class: one that is not loaded is replaced, and one that is loaded must fit."""
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    fields = pa.StructArray.from_arrays([pa.array([1])], ["x"])
    for name in ("explosive:Point", "subprocess:Popen", "builtins:type", "os:path", "nowhere", ":"):
        write(tmp_path / "file.arrow", NamedTupleType(fields.type, python=name).wrap(fields))
        (row,) = shmloader.open(tmp_path / "file.arrow")
        assert tuple(row) == (1,)
        assert row._fields == ("x",)
        assert type(row).__module__.startswith("shmloader")
    numbers = pa.array([0], pa.int8())
    write(
        tmp_path / "file.arrow", EnumType(numbers.type, python="signal:Signals", members=["A"]).wrap(numbers)
    )
    (member,) = shmloader.open(tmp_path / "file.arrow")
    assert (member.name, type(member).__name__) == ("A", "Signals")
    assert "explosive" not in sys.modules


HOSTILE: dict[str, Any] = {
    "pointers": lambda: ArrayType(pa.list_(pa.uint8(), 8), dtype="|O", shape=[1]).wrap(
        pa.FixedSizeListArray.from_arrays(pa.array(bytes(8)[:8] and [0] * 8, pa.uint8()), 8)
    ),
    "a shape that is too large": lambda: ArrayType(
        pa.list_(pa.uint8(), 8), dtype="|u1", shape=[1 << 40]
    ).wrap(pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8)),
    "a negative shape": lambda: ArrayType(pa.list_(pa.uint8(), 8), dtype="|u1", shape=[-8]).wrap(
        pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8)
    ),
    "links": lambda: LinkType(pa.int8(), link=0).wrap(pa.array([0], pa.int8())),
    "a tensor of no dtype": lambda: ArrayType(
        pa.list_(pa.uint8(), 8), dtype="|u1", shape=[8], tensor="os"
    ).wrap(pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_types_that_contradict_themselves_are_errors_that_name_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.arrow"
    write(path, HOSTILE[name]())
    with pytest.raises(ValueError, match=r"hostile\.arrow"):
        list(shmloader.open(path))


@pytest.mark.parametrize("said", [{"version": 2}, {"rows": "mapping"}, {"rows": "anything"}])
def test_metadata_of_another_format_is_an_error_that_names_the_file(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    write(tmp_path / "other.arrow", pa.array([1]), said)
    with pytest.raises(ValueError, match=r"other\.arrow"):
        shmloader.open(tmp_path / "other.arrow")
