"""Private and movable names of torch: the only module that uses them.

They were written against torch 2.13; `make test-matrix` tries 2.6 and 2.14 too. Where another torch lacks a
name that loading needs, loaders load torch's own way (`loading`), with `why_missing` as the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.utils.data
from torch.autograd import profiler

from shmloader.patches import Patches

_missing: list[str] = []  # reasons


def why_missing() -> str | None:
    """The reason why this torch has no slots to load through; None if it has all that is needed."""
    return _missing[0] if _missing else None


def unavailable(what: str, why: str) -> str:
    """A sentence on a part of shmloader that this torch lacks something for."""
    return f"shmloader: {what} is not available with torch {torch.__version__} (2.13 has it), because {why}."


def _find(module: str, name: str, default: Any = None) -> Any:
    """Look up a name of torch; if it is missing, note it as a reason and give the default."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        _missing.append(f"it has no {module}.{name}")
        return default


# --- iterators

_DATALOADER = "torch.utils.data.dataloader"
_ITERATOR_ATTRIBUTES = (
    "_dataset _index_sampler _sampler_iter _next_index _num_workers _persistent_workers "
    "_num_yielded _IterableDataset_len_called _timeout _base_seed _pin_memory _pin_memory_device"
).split()
"""Attributes of `BaseIterator` that shmloader's iterators read or replace."""

# BaseIterator is subclassed because Lightning recognises live iterators by it when it pickles checkpoints,
# and because its __init__ and _reset fix the order of calls to the sampler and of draws from the generator,
# which must stay torch's. Frameworks and users may look for the type SingleProcessIterator.
if TYPE_CHECKING:
    from torch.utils.data import dataloader

    BaseIterator = dataloader._BaseDataLoaderIter
    SingleProcessIterator = dataloader._SingleProcessDataLoaderIter
else:
    BaseIterator = _find(_DATALOADER, "_BaseDataLoaderIter", object)
    SingleProcessIterator = _find(_DATALOADER, "_SingleProcessDataLoaderIter", BaseIterator)


def _check_iterator() -> None:
    """Note whether torch's iterators lack an attribute that ours need."""
    if _missing:
        return
    try:
        # With its own generator: the global one must not be drawn from.
        dataset: Any = [0]
        iterator = BaseIterator(torch.utils.data.DataLoader(dataset, generator=torch.Generator()))
    except Exception as error:  # noqa: BLE001 - the constructor of an unknown torch
        _missing.append(f"{_DATALOADER}._BaseDataLoaderIter(loader) raises {error!r}")
        return
    absent = [name for name in _ITERATOR_ATTRIBUTES if not hasattr(iterator, name)]
    if absent:
        _missing.append(f"its iterators have no attribute {', '.join(absent)}")


_workers_iterator = getattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter", None)
_put_index = getattr(_workers_iterator, "_try_put_index", None)
LIMITS_TASKS = "_workers_num_tasks" in getattr(getattr(_put_index, "__code__", None), "co_names", ())
"""Whether torch limits a worker to its share of tasks when batches come out of order: 2.6 does not."""

GET_ITERATOR = "_get_iterator"
"""The method of torch's class that makes an iterator, for `install`, which replaces it."""

_iter_code = getattr(inspect.unwrap(torch.utils.data.DataLoader.__iter__), "__code__", None)
_is_called = GET_ITERATOR in getattr(_iter_code, "co_names", ())
WHY_NOT_INSTALLED = "" if _is_called else f"its DataLoader.__iter__ does not call {GET_ITERATOR}()"
"""The reason why `install` has no effect on torch's class, or ""."""


class OwnOrder(BaseIterator):
    """torch's iterator, whose `_reset` leaves the sampler alone: the order comes from elsewhere."""

    def _reset(self, loader: torch.utils.data.DataLoader[Any], first_iter: bool = False) -> None:
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called


def iterator_of(loader: Any) -> Any:
    """The iterator that a loader with ``persistent_workers`` keeps from epoch to epoch; None without one."""
    return getattr(loader, "_iterator", None)


def drop_iterator(loader: Any) -> None:
    """Let a loader forget the iterator that it keeps, so that it begins its next epoch with a new one."""
    loader._iterator = None


def worker_pids(iterator: Any) -> list[int]:
    """The process ids of the workers of an iterator, torch's or ours; empty without worker processes."""
    return [process.pid for process in getattr(iterator, "_workers", ())]


# --- DataPipes

_PIPES = ("IterDataPipe", "MapDataPipe")
DATAPIPES = tuple(vars(torch.utils.data)[name] for name in _PIPES if name in vars(torch.utils.data))
"""torch's classes of DataPipes, for ``isinstance``; empty in a torch without them."""


# --- collation

_COLLATE = "torch.utils.data._utils.collate"

collate_fn_map: dict[Any, Callable[..., Any]] = _find(_COLLATE, "default_collate_fn_map", {})
"""The map that torch's ``default_collate`` reads at each call. Workers change it so that a user's
``collate_fn`` built on ``default_collate`` collates into the slot too."""

collate_tensor_fn = _find(_COLLATE, "collate_tensor_fn")


def is_torchs_collation(function: object) -> bool:
    """Whether a function is one of torch's module for collation."""
    # Not by __module__, which functools.wraps copies to a function that a program puts in its place.
    return getattr(function, "__globals__", {}).get("__name__") == _COLLATE


def _check_collation() -> None:
    """Note whether torch's functions give other dtypes than they did in torch 2.13."""
    if not collate_fn_map or not all(map(is_torchs_collation, collate_fn_map.values())):
        return
    samples = [torch.zeros(1, dtype=torch.int8), np.zeros(3, np.int16), 0.5, 1]
    expected = [torch.int8, torch.int16, torch.float64, torch.int64]
    try:
        found: Any = [torch.utils.data.default_collate([sample] * 2).dtype for sample in samples]
    except Exception as error:  # noqa: BLE001 - functions of an unknown torch
        found = error
    if found != expected:
        _missing.append(f"default_collate makes {found!r} of two of {samples}, not {expected}")


with torch.device("cpu"):  # whatever the program's default device is
    _check_iterator()
    _check_collation()

# --- calls whose results are placed in a slot

NN_FUNCTIONS: Any = getattr(torch._C, "_nn", None)
"""The module that has ``pad_sequence`` for torch's function of that name, which programs import by name."""
NEW_SHARED = "_new_shared"
"""The method of ``UntypedStorage`` with which older versions of torch's default collate made their output."""


def is_intercepted(arguments: tuple[Any, ...]) -> bool:
    """Whether a call of torch goes to more than torch's own function: to a subclass, a mode, a tracer."""
    core: Any = torch._C
    parts = arguments[0] if arguments and type(arguments[0]) in (list, tuple) else arguments
    numbers = parts and type(parts[0]) in (int, float)  # perhaps thousands
    try:
        return bool(
            (not numbers and torch.overrides.has_torch_function(parts))
            or core._len_torch_function_stack()
            or core._len_torch_dispatch_stack()
            or core._functorch.peek_interpreter_stack()
            or torch.is_inference_mode_enabled()
            or torch.is_autocast_enabled("cpu")
            or core._get_tracing_state()
            or torch.compiler.is_compiling()
        )
    except (AttributeError, TypeError):  # a torch that lacks a name
        return True


_before_compiling: list[Callable[[], None]] = []


def before_compiling(call: Callable[[], None]) -> None:
    """Have a function called before torch's compiler reads a function, once the program uses it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or call in _before_compiling:
        return
    with contextlib.suppress(AttributeError, ImportError):
        callbacks = importlib.import_module("torch._dynamo.callback").callback_handler
        callbacks.register_start_callback(lambda *_: call())
        _before_compiling.append(call)


def move_to_private_memory(storage: Any) -> Any:
    """Move a storage to memory that torch can resize; returns one of its former memory, or None."""
    private = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage().copy_(storage)
    try:
        storage._swap_data_ptr_(private)
    except AttributeError:
        return None
    return private


_OF_ONE_TENSOR = 2  # references to its storage: the tensor's, and that of the storage's Python object


def has_one_tensor(storage: Any) -> bool:
    """Whether a storage is one tensor's alone: no view or NumPy array refers to it. False if unknown."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) <= _OF_ONE_TENSOR


def before_sharing(call: Callable[[Any], None]) -> None:
    """Have a function called with each storage that is about to get memory that processes share."""

    def sharing(share: Callable[..., Any], storage: Any, *args: Any, **kwargs: Any) -> Any:
        call(storage)
        return share(storage, *args, **kwargs)

    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):  # for torch's queues and ``share_memory_()``
        if hasattr(torch.UntypedStorage, name):
            Patches().wrap(torch.UntypedStorage, name, sharing)


# --- which worker this is

_WORKER = "torch.utils.data._utils.worker"
_IN_THREADS = "_thread_local_worker_info"  # torch's name for it from 2.14 on
_installing = threading.Lock()

_TorchsWorkerInfo: Any = _find(_WORKER, "WorkerInfo", object)
_find(_WORKER, "_worker_info")
if "_worker_info" not in getattr(getattr(torch.utils.data.get_worker_info, "__code__", None), "co_names", ()):
    _missing.append("its get_worker_info() does not read a global name _worker_info")


class WorkerInfo(_TorchsWorkerInfo):  # type: ignore[misc]
    """torch's worker info, with ``rng`` and ``worker_method`` also where torch is older than these."""

    def __init__(self, *, rng: Any = None, worker_method: str = "multiprocessing", **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "rng", rng)  # it is frozen
        object.__setattr__(self, "worker_method", worker_method)


class _Refusing(WorkerInfo):
    """A worker info whose ``num_workers`` raises."""

    def __init__(self, refusal: str, **fields: Any) -> None:
        object.__setattr__(self, "refusal", refusal)
        super().__init__(**fields)

    def __getattribute__(self, name: str) -> Any:
        if name == "num_workers":
            raise RuntimeError(self.refusal)
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return repr(WorkerInfo(**_fields_of(self)))


def _fields_of(info: Any) -> dict[str, Any]:
    """The fields of a worker info, also of one that refuses."""
    fields = {name: object.__getattribute__(info, name) for name in ("id", "num_workers", "seed", "dataset")}
    return fields | {"rng": getattr(info, "rng", None), "worker_method": getattr(info, "worker_method", None)}


def set_worker_info(info: WorkerInfo, *, in_thread: bool = False) -> None:
    """Make ``get_worker_info()`` return ``info`` in this process, or only in this thread."""
    if in_thread:
        _have_worker_info_in_threads().worker_info = info
    else:
        vars(importlib.import_module(_WORKER))["_worker_info"] = info


def refusing_worker_info(dataset: Any, refusal: str) -> Any:
    """The worker's own worker info, whose ``num_workers`` raises; without workers, that of worker 0 of 1."""
    own = torch.utils.data.get_worker_info()
    fields = {"id": 0, "num_workers": 1, "seed": torch.initial_seed(), "dataset": dataset}
    return _Refusing(refusal, **(fields if own is None else _fields_of(own)))


def only_worker_info() -> Any:
    """The worker's own worker info, as if there were no other worker; None outside a worker."""
    own = torch.utils.data.get_worker_info()
    return None if own is None else WorkerInfo(**(_fields_of(own) | {"id": 0, "num_workers": 1}))


def show_worker_info(info: Any) -> None:
    """Make ``get_worker_info()`` return ``info`` from now on, in this worker or without workers."""
    in_threads: Any = vars(importlib.import_module(_WORKER)).get(_IN_THREADS)
    set_worker_info(info, in_thread=getattr(in_threads, "worker_info", None) is not None)


@functools.cache
def _have_worker_info_in_threads() -> Any:
    """Make ``get_worker_info()`` prefer the calling thread's worker info, as it does in torch 2.14.

    Programs hold the function itself, so in an older torch its code is replaced, for good: in threads without
    a worker info it answers as before.
    """
    with _installing:
        names = vars(importlib.import_module(_WORKER))
        in_threads: Any = names.get(_IN_THREADS)
        if in_threads is None:
            in_threads = names[_IN_THREADS] = threading.local()
            names["get_worker_info"].__code__ = _get_worker_info.__code__
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=functools.partial(_keep_after_fork, in_threads))
    return in_threads


def _get_worker_info() -> Any:
    # Runs as torch's own function, among the names of torch's module.
    info = getattr(_thread_local_worker_info, "worker_info", None)  # type: ignore[name-defined]  # noqa: F821
    return _worker_info if info is None else info  # type: ignore[name-defined]  # noqa: F821


def _keep_after_fork(in_threads: Any) -> None:
    """Keep a worker thread's worker info in a process that the thread forked, until that becomes a worker."""
    info = getattr(in_threads, "worker_info", None)
    if info is not None:
        in_threads.worker_info = None
        set_worker_info(info)


pin_memory = _find("torch.utils.data._utils.pin_memory", "pin_memory")
"""Copies a batch to pinned memory as torch's pin-memory thread does."""


# --- the rest


def default_store() -> Any:
    """The store through which the ranks of ``torch.distributed`` found each other."""
    return importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()


profiler_enabled: Callable[[], bool] = functools.partial(getattr, profiler, "_is_profiler_enabled", True)
"""Whether torch's profiler is recording: only then ``next()`` opens a profiler range, in 10 µs."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Keep a function, and all that it calls, out of ``torch.compile``: it runs as it is written.

    ``torch.compiler.disable`` is public, but imports the compiler, which takes seconds. A torch without this
    setting compiles the function.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # it is not traced as a part of its caller
    core: Any = torch._C
    with contextlib.suppress(AttributeError, TypeError):
        frames = core._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def use_one_core_in_this_thread() -> None:
    """Let torch's operations in the calling thread use no further threads, where torch uses OpenMP.

    ``set_num_threads(1)`` would also change the number that later threads of the program begin with.
    """
    torch.get_num_threads()  # settles this thread's number, which torch would otherwise do later
    try:
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(1)  # of the OpenMP that torch is linked with
    except (AttributeError, OSError, TypeError):
        return
