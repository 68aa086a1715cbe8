"""Features that need private or movable names of torch, and the reasons why one is not available.

`torch_private` looks the names up. A missing name disables the feature that needs it, and
``import shmloader`` works without it. When the feature is needed, a warning or an error names it, with the
reason and the replacement.
"""

from __future__ import annotations

import functools
import importlib
from enum import StrEnum
from typing import Any, NoReturn

import torch

from shmloader.errors import warn_once


class Feature(StrEnum):
    """A part of shmloader that needs certain names of torch; the value is its name in messages."""

    SLOTS = "loading through shared-memory slots"
    INSTALL = "shmloader.install()"
    COLLATION = "collating straight into a slot"
    ARRAY_SAMPLING = "drawing index batches as arrays"
    DATAPIPES = "sharding and seeding DataPipes"
    PINNING = "pin_memory=True"
    THREADS = "worker_type='thread'"


_INSTEAD = {
    Feature.SLOTS: "The loader loads as torch's DataLoader does, and the batches are the same.",
    Feature.INSTALL: "Loaders of torch's class load torch's way; shmloader.DataLoader is not affected.",
    Feature.COLLATION: "Batches are the same, but are copied into their slot after they have been collated.",
    Feature.ARRAY_SAMPLING: "Index batches are the same, but take 36 bytes for each sample of the dataset.",
    Feature.DATAPIPES: "Load from a map-style dataset or an IterableDataset.",
    Feature.PINNING: "Pass pin_memory=False.",
    Feature.THREADS: "Pass worker_type='process'.",
}
"""The consequence for a feature that has a replacement; advice for the others."""

_reasons: dict[Feature, str] = {}


def why_missing(feature: Feature) -> str | None:
    """The reason why a feature is not available with this torch; None if it is available."""
    return _reasons.get(feature)


def disable(feature: Feature, reason: str) -> None:
    """Disable a feature for this process; the first reason counts."""
    _reasons.setdefault(feature, reason)


def is_missing(feature: Feature) -> bool:
    """Whether a feature is not available, and its replacement is to be used: warns of that, once."""
    if why_missing(feature) is None:
        return False
    warn_once(missing_message(feature))
    return True


def missing_message(feature: Feature, lack: str | None = None) -> str:
    """Sentences about a feature that is not available; ``lack`` is the reason if it lies in the platform."""
    text = f"shmloader: {feature} is not available"
    if lack is not None:
        return f"{text} on this platform: {lack}. {_INSTEAD[feature]}"
    return (
        f"{text} with torch {torch.__version__}, because {why_missing(feature)}. {_INSTEAD[feature]} It is "
        "available with torch 2.13."
    )


def find(feature: Feature, module: str, name: str, default: Any = None) -> Any:
    """Look up a name of torch; without it the feature is disabled and the default is returned."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        disable(feature, f"it has no {module}.{name}")
        return default


def find_function(feature: Feature, module: str, name: str) -> Any:
    """Look up a function of torch; a missing one is replaced by one that raises NotImplementedError."""
    return find(feature, module, name, functools.partial(_refuse, feature))


def _refuse(feature: Feature, *_: object, **__: object) -> NoReturn:
    raise NotImplementedError(missing_message(feature))
