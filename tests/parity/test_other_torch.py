"""A torch that lacks or changes something: importing works, loaders load torch's way, and a message names it.

Each test changes torch in a program of its own, before shmloader is imported.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_python import warm_python

BEGIN = """
import multiprocessing, sys, types, warnings
multiprocessing.set_start_method("fork", force=True)  # forced: the children run this, too
warnings.simplefilter("always")
import numpy as np
import torch
import torch.utils.data
import torch.utils.data.dataloader
from torch.utils.data import DataLoader as TorchLoader, TensorDataset, default_collate
from torch.utils.data._utils import collate
"""

LOAD = """
import shmloader
from shmloader.torch_private import why_missing

def told():
    "Warnings of shmloader, in the order in which they came."
    return [str(one.message) for one in caught if str(one.message).startswith("shmloader: ")]

def loads_as_torch(dataset=range(40), **arguments):
    "Whether two epochs are equal to torch's, from the same seed."
    arguments = {"batch_size": 4, "num_workers": 1, **arguments}
    def epochs(kind):
        torch.manual_seed(3)
        loader = kind(dataset, **arguments)
        return [[batch.tolist() for batch in loader] for _ in range(2)] + [torch.get_rng_state().tolist()]
    return epochs(TorchLoader) == epochs(shmloader.DataLoader)

catching = warnings.catch_warnings(record=True)
caught = catching.__enter__()
warnings.simplefilter("always")
"""

# Runs a program that changes torch, imports shmloader and then checks something.
Run = Callable[[str, str], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run_program(change: str, check: str) -> None:
        program = tmp_path / "program.py"
        lines = "\n".join(f"    {line}" for line in check.strip().splitlines())
        program.write_text(f"{BEGIN}\n{change}\n{LOAD}\nif __name__ == '__main__':\n{lines}\n")
        command = [*warm_python(), program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr

    return run_program


def test_the_torch_at_hand_has_everything(run: Run) -> None:
    run("", "assert why_missing() is None\nassert loads_as_torch()\nassert told() == []")


def test_a_loader_class_with_two_type_parameters(run: Run) -> None:
    change = """
from typing import Generic, TypeVar
T, U = TypeVar("T"), TypeVar("U")
class Two(TorchLoader, Generic[T, U]):
    pass
Two.__module__, Two.__name__ = "torch.utils.data.dataloader", "DataLoader"
torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = TorchLoader = Two
try:
    Two[int]
except TypeError:
    pass
else:
    raise AssertionError("two parameters are needed")
"""
    check = """
assert issubclass(shmloader.DataLoader, Two)
assert shmloader.DataLoader[int](range(3)).batch_size == 1
assert loads_as_torch()
assert why_missing() is None and told() == []
"""
    run(change, check)


DATALOADER = "torch.utils.data.dataloader"
NAMES = [
    (DATALOADER, "_BaseDataLoaderIter", True),
    (DATALOADER, "_SingleProcessDataLoaderIter", True),
    (DATALOADER, "_DatasetKind", True),
    ("torch.utils.data", "IterDataPipe", False),
    ("torch.utils.data", "MapDataPipe", False),
    ("torch.utils.data._utils.collate", "default_collate_fn_map", True),
    ("torch.utils.data._utils.collate", "collate_tensor_fn", True),
    ("torch.utils.data._utils.worker", "WorkerInfo", True),
    ("torch.utils.data._utils.worker", "_worker_info", True),
    ("torch.utils.data._utils.pin_memory", "pin_memory", True),
    ("torch.autograd.profiler", "_is_profiler_enabled", False),
    ("torch._C._dynamo.eval_frame", "set_code_exec_strategy", False),
    ("torch._C._dynamo.eval_frame", "_FrameAction", False),
    ("torch._C._dynamo.eval_frame", "_FrameExecStrategy", False),
]


@pytest.mark.in_ci(4)
@pytest.mark.parametrize(("module", "name", "needed"), NAMES, ids=[name for _, name, _ in NAMES])
def test_without_a_name_importing_works_and_the_reason_names_it(
    run: Run, module: str, name: str, needed: bool
) -> None:
    check = f"""
assert (why_missing() is not None) == {needed}, why_missing()
assert not {needed} or "{name}" in why_missing(), why_missing()
"""
    run(f"import {module}\ndel {module}.{name}", check)


# Behaviour without a name. torch's own loader reads some of the names itself, so they are restored for it.


@pytest.mark.parametrize("workers", [0, 1])
def test_without_its_iterator_torch_loads_and_one_warning_says_so(run: Run, workers: int) -> None:
    change = """
known = torch.utils.data.dataloader._BaseDataLoaderIter
del torch.utils.data.dataloader._BaseDataLoaderIter
"""
    check = f"""
torch.utils.data.dataloader._BaseDataLoaderIter = known
assert loads_as_torch(num_workers={workers}, shuffle=True)
(text,) = told()
assert text.startswith("shmloader: loading through shared-memory slots is not available with torch"), text
assert "it has no torch.utils.data.dataloader._BaseDataLoaderIter" in text
"""
    run(change, check)


def test_an_iterator_with_other_attributes_is_left_to_torch(run: Run) -> None:
    change = """
base = torch.utils.data.dataloader._BaseDataLoaderIter
original = base.__init__
def renamed(self, loader):
    original(self, loader)
    if type(self) is base:  # torch's own iterators go on working
        del self._base_seed
base.__init__ = renamed
"""
    check = """
assert loads_as_torch()
(text,) = told()
assert "its iterators have no attribute _base_seed" in text
"""
    run(change, check)


def test_worker_info_that_is_kept_elsewhere_leaves_loading_to_torch(run: Run) -> None:
    change = """
from torch.utils.data._utils import worker
def get_worker_info():
    return vars(worker)["_worker_info"]
torch.utils.data.get_worker_info = get_worker_info
"""
    check = """
assert loads_as_torch()
(text,) = told()
assert "get_worker_info() does not read a global name _worker_info" in text
"""
    run(change, check)


OLD_WORKER_INFOS = {
    "a dataclass": """
@dataclasses.dataclass(frozen=True, slots=True)
class WorkerInfo:
    id: int
    num_workers: int
    seed: int
    dataset: object
""",
    "any keywords": """
class WorkerInfo:
    __initialized = False
    def __init__(self, **kwargs):
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.__keys = tuple(kwargs.keys())
        self.__initialized = True
    def __setattr__(self, name, value):
        if self.__initialized:
            raise RuntimeError(name)
        super().__setattr__(name, value)
    def __repr__(self):
        return f"WorkerInfo({', '.join(f'{name}={getattr(self, name)}' for name in self.__keys)})"
""",
}


@pytest.mark.parametrize("kind", OLD_WORKER_INFOS)
def test_older_worker_infos_have_generators_too(run: Run, kind: str) -> None:
    change = f"""
import dataclasses
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker
{OLD_WORKER_INFOS[kind]}
worker.WorkerInfo = WorkerInfo
class Facts:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        info = get_worker_info()
        try:
            info.id = 5
        except (RuntimeError, dataclasses.FrozenInstanceError):
            frozen = True
        return isinstance(info, WorkerInfo) and frozen, info.worker_method, info.rng.random_generator.random()
class Stream(IterableDataset):
    def __init__(self, divides):
        self.divides = divides
    def __iter__(self):
        info = get_worker_info()
        assert "num_workers=2" in repr(info), info  # which is no read of it
        yield from range(info.id, 12, info.num_workers) if self.divides else range(12)
"""
    check = """
for method in ("process", "thread"):
    ((is_one, (name,), _),) = shmloader.DataLoader(Facts(), num_workers=1, worker_type=method)
    assert is_one.item() and name == {"process": "multiprocessing"}.get(method, method)
    loader = shmloader.DataLoader(Stream(False), num_workers=2, worker_type=method, shard="auto")
    assert sorted(batch.item() for batch in loader) == list(range(12))
    try:
        list(shmloader.DataLoader(Stream(True), num_workers=2, worker_type=method, shard="auto"))
    except RuntimeError as error:
        assert "get_worker_info().num_workers" in str(error), error
    else:
        raise AssertionError("nothing was raised")
assert told() == []
"""
    run(change, check)


def test_without_its_collate_map_batches_are_the_same(run: Run) -> None:
    change = """
known = collate.default_collate_fn_map
del collate.default_collate_fn_map
"""
    check = """
collate.default_collate_fn_map = known
data = TensorDataset(torch.arange(8.0))
assert loads_as_torch([[1.5, 2], [3.5, 4]] * 4, batch_size=2, collate_fn=lambda s: default_collate(s)[0])
got = list(shmloader.DataLoader(data, batch_size=4, num_workers=1))
assert [batch[0].tolist() for batch in got] == [[0, 1, 2, 3], [4, 5, 6, 7]]
(text,) = told()
assert "it has no torch.utils.data._utils.collate.default_collate_fn_map" in text, text
assert "gathering whole batches is not available" in shmloader.why_per_sample(data)
"""
    run(change, check)


def test_a_collate_function_that_gives_another_dtype_is_followed(run: Run) -> None:
    change = """
def collate_float_fn(batch, *, collate_fn_map=None):
    return torch.tensor(batch, dtype=torch.float32)
keywords = collate_float_fn.__kwdefaults__
collate_float_fn = types.FunctionType(collate_float_fn.__code__, vars(collate))
collate_float_fn.__kwdefaults__ = keywords
collate.default_collate_fn_map[float] = collate_float_fn
"""
    check = """
(batch,) = shmloader.DataLoader([0.5, 1.5], batch_size=2, num_workers=1)
assert batch.dtype is torch.float32
(text,) = told()
assert "default_collate makes [torch.int8, torch.int16, torch.float32, torch.int64] of two of" in text
"""
    run(change, check)


ADDED = """
class Added:
    pass
def collate_added_fn(batch, *, collate_fn_map=None):
    return torch.zeros(len(batch))
"""
GATHERED = """
from shmloader.sources.gatherer import joins_by_default
def in_a_worker():
    data = TensorDataset(torch.arange(8))
    return shmloader.why_per_sample(data) is None and joins_by_default(default_collate)
"""


def test_a_key_that_torch_adds_keeps_the_fast_paths(run: Run) -> None:
    change = f"{ADDED}\ncollate_added_fn.__module__ = collate.__name__\n"
    change += "collate.default_collate_fn_map[Added] = collate_added_fn"
    check = """
assert joins_by_default(default_collate)
assert shmloader.why_per_sample(TensorDataset(torch.arange(8))) is None
(batch,) = shmloader.DataLoader([Added(), Added()], batch_size=2, num_workers=1)
assert batch.tolist() == [0, 0]
assert why_missing() is None and told() == []
"""
    run(change + GATHERED, check)


def test_a_programs_key_counts_where_it_is_for_a_type_that_is_joined_here(run: Run) -> None:
    check = """
import collections
keys = collate.default_collate_fn_map
Record = collections.namedtuple("Record", "a b")
for key, harmless in [(Added, True), (object, False), (dict, False), (list, False), (Record, False),
                      (np.float32, False), ((Added, tuple), False), ("no class", False)]:
    keys[key] = collate_added_fn
    assert joins_by_default(default_collate) is harmless, key
    del keys[key]
known = keys[int]
for changed in (collate_added_fn, None):
    keys[int] = changed
    assert not joins_by_default(default_collate)
del keys[int]
assert not joins_by_default(default_collate)
keys[int] = known
assert joins_by_default(default_collate)
"""
    run(ADDED + GATHERED, check)


def test_a_key_that_worker_init_fn_adds_keeps_collation_in_the_slot(run: Run) -> None:
    change = f"""{ADDED}
def add(_):
    collate.default_collate_fn_map[Added] = collate_added_fn
    from shmloader.worker import collate as ours
    stack = ours._stack_tensors
    def noted(samples, writer):
        return stack([sample + 100 for sample in samples], writer)
    ours._JOIN[torch.Tensor] = noted
"""
    check = """
data = [torch.tensor([1.0]), torch.tensor([2.0])]
(batch,) = shmloader.DataLoader(data, batch_size=2, num_workers=1, worker_init_fn=add)
assert batch.tolist() == [[101], [102]]  # by way of the fast path
"""
    run(change, check)


CHANGED_SAMPLERS = {
    "order": (
        "RandomSampler",
        "yield from torch.randperm(n, generator=generator).tolist()",
        "yield from torch.randperm(n, generator=generator).tolist()[::-1]",
    ),
    "seed": ("RandomSampler", "torch.empty((), dtype=torch.int64).random_()", "torch.randint(7, ())"),
    "further batches": ("BatchSampler", "yield", "yield [*range(1000, 1064)]; yield"),
    "one draw more": ("BatchSampler", "if self", "torch.rand(1)\n    if self"),
}


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("case", CHANGED_SAMPLERS)
def test_changed_samplers_are_followed_and_a_warning_says_so(run: Run, case: str) -> None:
    name, old, new = CHANGED_SAMPLERS[case]
    change = f"""
import inspect, textwrap
from torch.utils.data import sampler
source = textwrap.dedent(inspect.getsource(sampler.{name}.__iter__))
assert {old!r} in source
exec(source.replace({old!r}, {new!r}, 1), vars(sampler))
sampler.{name}.__iter__ = vars(sampler)["__iter__"]
"""
    check = """
assert loads_as_torch(range(200), batch_size=64, shuffle=True)
(text,) = told()
assert text.startswith("shmloader: drawing index batches as arrays is not available"), text
assert "draws in another way" in text
assert why_missing() is None
"""
    run(change, check)


def test_the_comparison_of_samplers_leaves_the_global_generator_alone(run: Run) -> None:
    check = """
from shmloader.indices.array_samplers import why_unlike_torchs
before = torch.get_rng_state()
assert why_unlike_torchs(torch.utils.data.RandomSampler) is None
assert torch.equal(before, torch.get_rng_state())
"""
    run("", check)


def test_options_without_effect_are_named(run: Run) -> None:
    change = (
        "torch_worker = torch.utils.data._utils.worker\n"
        "torch.utils.data.get_worker_info = lambda: vars(torch_worker)['_worker_info']"
    )
    check = """
assert len(list(shmloader.DataLoader(range(4), num_workers=1, worker_type="thread"))) == 4
(text,) = told()
assert text.endswith("Without effect: worker_type='thread'."), text
"""
    run(change, check)
