"""Settings that may differ between a loader and the one that resumes from its state; ways to keep a state."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from shmloader import DataLoader

State = dict[str, Any]
Make = Callable[[], DataLoader[Any]]


@dataclass(frozen=True)
class Setting:
    """Workers of a loader, and the arguments about them."""

    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"num_workers": self.workers} | self.options

    @property
    def in_order(self) -> bool:
        return self.workers < 2 or bool(self.options.get("in_order", True))

    @property
    def in_threads(self) -> bool:
        return self.options.get("worker_type") == "thread"

    @property
    def persistent(self) -> bool:
        return bool(self.options.get("persistent_workers"))


def _with_workers(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[Setting]:
    return st.builds(
        lambda workers, **options: Setting(workers, options),
        workers=st.integers(1, 2),
        prefetch_factor=st.integers(1, 3),
        dispatch=st.sampled_from(["static", "dynamic"]),
        **options,
    )


def settings_with(
    methods: list[str], persistent: list[bool], in_order: list[bool]
) -> st.SearchStrategy[Setting]:
    """Settings with workers by one of the start methods."""
    common = {"persistent_workers": st.sampled_from(persistent), "in_order": st.sampled_from(in_order)}
    return _with_workers(multiprocessing_context=st.sampled_from(methods), **common)


def cheap_settings(in_order: list[bool]) -> st.SearchStrategy[Setting]:
    """Settings without workers, with forked ones and with threads."""
    threads = _with_workers(worker_type=st.just("thread"), in_order=st.sampled_from(in_order))
    return st.one_of(st.just(Setting()), threads, settings_with(["fork"], [False, True], in_order))


def by_json(state: State, make: Make | None = None) -> State:
    return dict(json.loads(json.dumps(state)))


def by_torch(state: State, make: Make | None = None) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def by_distributed_checkpoint(state: State, make: Make) -> State:
    """Loads only the keys that a new loader's own state has."""
    import torch.distributed.checkpoint  # takes a second, and few tests need it

    found = {"loader": make().state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.checkpoint.save({"loader": state}, checkpoint_id=folder)
        torch.distributed.checkpoint.load(found, checkpoint_id=folder)
    return found["loader"]


ways_to_keep = st.sampled_from([by_json, by_torch, by_distributed_checkpoint])
