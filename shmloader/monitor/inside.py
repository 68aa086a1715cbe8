"""Looks at a program's datasets from inside the program, when an iterator over a loader begins.

Runs in the process that iterates, in the thread that calls ``iter(loader)``. It reads objects as a search for
what can be shared does, and runs none of the program's code. What fails here is reported, and never raised.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.multiprocessing

from shmloader.patches import Patches
from shmloader.store import objects, static
from shmloader.store.graph import Graph, Node
from shmloader.store.originals import is_original
from shmloader.store.unshared import largest_holder
from shmloader.torch_private import worker_pids

REPORTS = "SHMLOADER_MEMORY_REPORTS"
"""The environment variable that names the file to which reports are appended, a line of JSON each."""


@dataclass(frozen=True)
class Report:
    """The objects that one loader's workers hold, as seen in the process that started them."""

    pid: int  # that process
    loader: int  # the ``id`` of the loader there
    dataset: str  # the program's name for it
    start_method: str = ""  # of its workers; "" without worker processes
    workers: tuple[int, ...] = ()  # their process ids
    owner: str = ""  # the expression for the object in the dataset that holds most of what workers copy
    nbytes: int = 0  # of it that workers copy: objects that they read under fork, all of it otherwise
    is_shareable: bool = False  # whether `shmloader.share` takes the owner
    original: str = ""  # the variable by which the program still holds a list or dict that it has shared
    original_nbytes: int = 0
    error: str = ""  # why the dataset could not be looked at; "" if it was
    owned: int = 0  # the ``id`` of the owner, or of the dataset without one: loaders may be made anew


_REFERENCES = 3  # to the copy of a frame's variables: the frame's, ours, and that of a call
_seen: dict[int, Report] = {}  # by the ``id`` of a loader that lives: one may be equal to another
_listeners: list[Callable[[Report], None]] = []
_patches = Patches()  # once for all listeners: they need not end in the order in which they began


def begin(loader: Any, torchs_iter: Callable[[Any], Any]) -> Any:
    """Begin an iterator as ``torchs_iter`` does, and report on the loader."""
    # No variable for the frame: one that holds itself keeps the iterator.
    report = _look(loader, inspect.currentframe())
    if report.start_method not in ("", "fork"):
        _send(report)  # now: these workers are sent the whole dataset, which may take long
    iterator = torchs_iter(loader)
    try:
        report = replace(report, workers=tuple(worker_pids(iterator)))
    except Exception as error:  # noqa: BLE001 - of an unknown torch; the program must not see it
        report = replace(report, error=repr(error))
    _send(report)
    return iterator


def listen(listener: Callable[[Report], None]) -> Callable[[], None]:
    """Have reports of this process given to a function; returns the function that ends it."""
    loader_class = torch.utils.data.DataLoader
    _listeners.append(listener)
    _patches.wrap(loader_class, "__iter__", lambda torchs_iter, loader: begin(loader, torchs_iter))

    def stop() -> None:
        _listeners.remove(listener)
        if not _listeners:
            _patches.undo()

    return stop


def read_reports(path: Path, offset: int) -> tuple[list[Report], int]:
    """The reports that were appended to a file since ``offset``, and where they end."""
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read()
    text = text[: text.rfind(b"\n") + 1]
    lines = map(json.loads, text.splitlines())
    return [Report(**line | {"workers": tuple(line["workers"])}) for line in lines], offset + len(text)


def _send(report: Report) -> None:
    for listener in _listeners:
        listener(report)
    if path := os.environ.get(REPORTS):
        line = json.dumps(asdict(report)).encode() + b"\n"
        with contextlib.suppress(OSError):  # the command has ended, or the disk is full
            fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(fd, line)  # in one piece, beside those of other ranks
            finally:
                os.close(fd)


def _look(loader: Any, frame: types.FrameType | None) -> Report:
    report = Report(os.getpid(), id(loader), "dataset")
    try:
        known = _seen.get(id(loader))
        if known is None:
            weakref.finalize(loader, _seen.pop, id(loader), None)
        elif known.pid == report.pid:
            return known
        report = replace(report, owned=id(loader.dataset))
        report = _seen[id(loader)] = _report(loader, report, frame)
    except Exception as error:  # noqa: BLE001 - of objects of any kind; the program must not see it
        report = replace(report, error=repr(error))
    return report


def _report(loader: Any, report: Report, frame: types.FrameType | None) -> Report:
    dataset = loader.dataset
    own_name = name = _name_of(dataset, frame)
    if not name:
        holder = _name_of(loader, frame)
        name = f"{holder}.dataset" if holder else "dataset"
    original, value = _variable(frame, is_original)
    held_nbytes = objects.estimate_nbytes(value) if original else 0
    report = replace(report, dataset=name, original=original, original_nbytes=held_nbytes)
    if not loader.num_workers or getattr(loader, "worker_type", "process") == "thread":
        return report
    method = (loader.multiprocessing_context or torch.multiprocessing).get_start_method()
    report = replace(report, start_method=method)
    graph = Graph(dataset)
    if method == "fork":
        nbytes, owner = largest_holder(graph)
    else:
        nbytes, owner = _largest_copied(graph)
    shareable = any(one.plan and owner in (one, one.holder) for one in graph.nodes.values())
    path = name + owner.path.removeprefix(static.name_of(type(dataset)))
    if not own_name:  # a loader may be made anew for each epoch: what was given to its dataset is shared once
        path = _name_of(owner.value, frame) or path
    return replace(report, owner=path, nbytes=nbytes, is_shareable=shareable, owned=id(owner.value))


def _largest_copied(graph: Graph) -> tuple[int, Node]:
    """The largest of the objects that are rebuilt in each spawned worker, and its bytes.

    Tensors are not: torch moves them to shared memory.
    """
    root = next(iter(graph.nodes.values()))
    sized = [(objects.estimate_nbytes(node.value), node) for node in graph.nodes.values() if node.plan]
    sized += [(nbytes, node) for node, nbytes, _ in graph.left]
    copied = [pair for pair in sized if not static.is_a(pair[1].value, torch.Tensor)]
    return max(copied, key=lambda pair: pair[0], default=(0, root))


def _name_of(value: Any, frame: types.FrameType | None) -> str:
    return _variable(frame, lambda held: held is value)[0]


def _variable(frame: types.FrameType | None, test: Callable[[Any], bool]) -> tuple[str, Any]:
    """The first object that passes a test, and the program's name for it; "" if there is none.

    Looked at are the variables of the calling frames, and the attributes of their ``self``.
    """
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("shmloader.", "torch.", "sitecustomize")):
            for name, held in _variables(frame):
                if name.isidentifier() and test(held):
                    return name, held
                if name == "self":
                    for key, attribute in static.dict_of(held).items():
                        if test(attribute):
                            return f"self.{key}", attribute
        frame = frame.f_back
    return "", None


def _variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    names = frame.f_locals
    held = list(names.items())
    # Before Python 3.13 a function's are a copy, which would keep its variables alive. The program has it
    # too, if it has called ``locals()``.
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(names) is dict
    if is_copy and sys.getrefcount(names) <= _REFERENCES:
        names.clear()
    return held
