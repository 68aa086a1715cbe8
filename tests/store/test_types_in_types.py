"""Types inside of types, as files bring them: many more than a cache would hold."""

from __future__ import annotations

import subprocess

from warm_python import warm_python

PROGRAM = """
import gc
import pyarrow as pa
from shmloader.store.columns.kind import types_in
from shmloader.store.columns.lists import Sets
from shmloader.store.columns.records import Dataclasses

def nested(number):
    kind = pa.struct([("a", pa.int64()), (f"b{number % 7}", pa.string())])
    for depth in range(4):
        fields = [("x", kind), (f"y{number}", pa.int64()), ("z", Sets(pa.list_(kind)))]
        kind = Dataclasses(pa.struct(fields), python=f"m:C{(number + depth) % 5}")
    return kind

schemas = [pa.schema([("rows", nested(number))]).serialize() for number in range(150)]
schemas = [pa.ipc.read_schema(schema) for schema in schemas]
gc.collect()
print(sum(len(types_in(schema.field(0).type)) for schema in schemas))
"""


def test_many_types_are_looked_at_in_one_process() -> None:
    """In a program of its own, as it would end with a segmentation fault."""
    done = subprocess.run([*warm_python(), "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) % 150 == 0
