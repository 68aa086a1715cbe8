"""Loading as torch's loader does, if torch or the platform lacks what slots need."""

from __future__ import annotations

from typing import Any

from shmloader.errors import ResumeError, warn_once
from shmloader.memory import why_unavailable
from shmloader.settings import AUTO, OWN_DEFAULTS, AutoCount
from shmloader.torch_private import unavailable, why_missing

_SLOTS = "loading through shared-memory slots"


def why_as_torch(dataset: object, num_workers: int) -> str:
    """The sentence that tells why a loader has to load as torch's own does; "" if it need not."""
    if (lack := why_missing(dataset)) is not None:
        return unavailable(_SLOTS, lack)
    if num_workers and (lack := why_unavailable()) is not None:
        return f"shmloader: {_SLOTS} is not available on this platform: {lack}."
    return ""


def must_load_as_torch(loader: Any) -> bool:
    """Whether a loader has to leave its batches to torch's own iterator; warns once of what is lost by it.

    Raises:
        NotImplementedError: For a loader with ``shard="auto"``: its batches would differ.
    """
    why = why_as_torch(loader.dataset, loader.num_workers)
    if not why:
        return False
    text = f"{why} The loader loads as torch's DataLoader does, and the batches are the same."
    if loader.shard == AUTO:
        raise NotImplementedError(f"{text} It does not divide streams as shard={loader.shard!r} asks for.")
    if ignored := options_asked_for(loader):
        text += f" Without effect: {', '.join(ignored)}."
    warn_once(text)
    return True


def check_resumable(dataset: object, num_workers: int) -> None:
    """Raise a `ResumeError` if a loader of this dataset with so many workers has no states."""
    if why := why_as_torch(dataset, num_workers):
        raise ResumeError(
            f"torch's own iterator loads here, which does not record how far the program has come. {why} "
            "With num_workers=0 and a torch that shmloader knows there is a state."
        )


def options_asked_for(loader: Any) -> list[str]:
    """The options in use that torch's loader lacks, as ``name=value``."""
    counts = {name: getattr(loader, name) for name in ("num_workers", "prefetch_factor")}
    own = {name: getattr(loader, name) for name in OWN_DEFAULTS}
    automatic = [f"{name}='auto' (it is {n})" for name, n in counts.items() if isinstance(n, AutoCount)]
    return automatic + [f"{name}={value!r}" for name, value in own.items() if value != OWN_DEFAULTS[name]]
