"""Loading as torch's loader does, if torch or the platform lacks what slots need."""

from __future__ import annotations

from typing import Any

from shmloader.errors import ResumeError, warn_once
from shmloader.memory import why_unavailable
from shmloader.settings import AUTO, OWN_DEFAULTS, AutoCount
from shmloader.torch_features import Feature, missing_message, why_missing


def must_load_as_torch(loader: Any) -> bool:
    """Whether a loader has to leave its batches to torch's own iterator.

    The first time this gives a warning that names the lack and the loader's options that have no effect.

    Raises:
        NotImplementedError: For a loader with ``shard="auto"``: its batches would differ.
    """
    if why_missing(Feature.SLOTS) is not None:
        text = missing_message(Feature.SLOTS)
    elif loader.num_workers and (lack := why_unavailable()) is not None:
        text = missing_message(Feature.SLOTS, lack)
    else:
        return False
    if loader.shard == AUTO:
        raise NotImplementedError(f"{text} It does not divide streams as shard={loader.shard!r} asks for.")
    if ignored := options_asked_for(loader):
        text += f" Without effect: {', '.join(ignored)}."
    warn_once(text)
    return True


def check_resumable(num_workers: int) -> None:
    """Refuse states for a loader with so many workers, if they cannot be made.

    Raises:
        ResumeError: With the reason.
    """
    lack = why_missing(Feature.SLOTS) or (why_unavailable() if num_workers else None)
    if lack is not None:
        raise ResumeError(
            "torch's own iterator loads here, which does not record how far the program has come: "
            f"{lack}. With num_workers=0 and a torch that shmloader knows there is a state."
        )


def options_asked_for(loader: Any) -> list[str]:
    """The options in use that torch's loader lacks, as ``name=value``."""
    automatic = [
        f"{name}='auto' (it is {value})"
        for name in ("num_workers", "prefetch_factor")
        if isinstance(value := getattr(loader, name), AutoCount)
    ]
    return automatic + [
        f"{name}={value!r}"
        for name, nothing in OWN_DEFAULTS.items()
        if (value := getattr(loader, name)) != nothing
    ]
