"""Loading as torch's loader does, on platforms without the shared memory that slots need."""

from __future__ import annotations

import warnings
from typing import Any

from shmloader.arguments import AutoCount
from shmloader.diagnostics.stack_level import level_of_the_program

_WITHOUT_EFFECT = {
    "memory_budget_nbytes": None,
    "worker_restarts": 0,
    "on_error": "raise",
    "dispatch": "static",
    "prefetch_epochs": False,
    "worker_type": "process",
    "share_dataset": False,
}
"""Options that torch's loader lacks, with the values that ask for nothing."""


def warn_of_torchs_way(loader: Any, missing: str) -> None:
    """Say why a loader's workers are torch's, and which of its options have no effect.

    Args:
        loader: The loader.
        missing: What the platform lacks.
    """
    ignored = [
        f"{name}='auto' (it is {value})"
        for name in ("num_workers", "prefetch_factor")
        if isinstance(value := getattr(loader, name), AutoCount)
    ]
    ignored += [
        f"{name}={value!r}"
        for name, nothing in _WITHOUT_EFFECT.items()
        if (value := getattr(loader, name)) != nothing
    ]
    options = f" Without effect: {', '.join(ignored)}." if ignored else ""
    warnings.warn(
        f"shmloader loads as torch's DataLoader does here, without slots in shared memory: {missing}. The "
        f"batches are the same.{options}",
        RuntimeWarning,
        stacklevel=level_of_the_program(),
    )
