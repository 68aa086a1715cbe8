"""Support for frameworks that build a loader anew from another one: Lightning, accelerate, ignite.

Nothing here imports a framework.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.utils.data
from torch.utils.data import DistributedSampler, IterableDataset

from shmloader.distributed import rank_and_ranks
from shmloader.errors import warn_once
from shmloader.memory import why_unavailable
from shmloader.settings import options_asked_for
from shmloader.store_hooks import hooks


def list_options(kind: type, options: dict[str, inspect.Parameter]) -> None:
    """Give a subclass whose ``__init__`` takes ``**kwargs`` a signature that lists the loader's own options.

    Lightning builds a loader anew from those attributes that the signature lists. Where there is ``**kwargs``
    it adds the arguments of torch's loader, and no others. An ``__init__`` that was inherited is looked up
    when it is called: a subclass with another base may have one that comes before.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    is_own = "__init__" in vars(kind)
    try:
        parameters = inspect.signature(init).parameters
    except ValueError:  # a compiled __init__ that does not say
        return
    listed = list(parameters.values())
    added = [option for name, option in options.items() if name not in parameters]
    if not added or listed[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if is_own:
            init(self, *args, **kwargs)
        else:
            super(kind, self).__init__(*args, **kwargs)  # type: ignore[arg-type]

    __init__.__signature__ = inspect.Signature([*listed[:-1], *added, listed[-1]])  # type: ignore[attr-defined]
    kind.__init__ = __init__  # type: ignore[misc]


def shared_if_asked(loader: Any, dataset: Any) -> Any:
    """The dataset, shared if ``share_dataset`` asks for that and the platform has shared memory.

    Lightning notes the arguments on a loader before its ``__init__`` runs, and builds the loader anew from
    them. There too the shared one replaces the original, which would be shared twice, and stay alive.
    """
    if not loader.share_dataset or why_unavailable() is not None:
        return dataset
    shared = hooks.share_dataset(dataset)
    for name, record in list(vars(loader).items()):
        if name.startswith("__pl_saved_") and isinstance(record, tuple | dict):
            keyed = record if isinstance(record, dict) else dict(enumerate(record))
            replaced = {key: shared if value is dataset else value for key, value in keyed.items()}
            vars(loader)[name] = replaced if isinstance(record, dict) else tuple(replaced.values())
    return shared


class PreparedFlag:
    """The attribute that tells accelerate that a loader is not prepared; ``notify`` hears that it is read.

    An attribute that accelerate or the program sets on the loader takes precedence.
    """

    def __init__(self, notify: Callable[[Any], None]) -> None:
        self._notify = notify

    def __get__(self, loader: Any, owner: type | None = None) -> bool:
        """False: an attribute of the loader itself is found first."""
        if loader is not None:
            self._notify(loader)
        return False


def warn_of_ray(loader: Any) -> None:
    """Warn once, in a worker of Ray Train, that Ray replaces a loader by one of torch's class."""
    if "ray.train.torch" not in sys.modules or hasattr(torch.utils.data.DataLoader, "statistics"):
        return  # the latter only after install()
    if isinstance(loader.sampler, DistributedSampler) or isinstance(loader.dataset, IterableDataset):
        return
    if rank_and_ranks()[1] > 1:
        warn_once(
            "ray.train.torch.prepare_data_loader() builds a loader of torch's class in the place of this "
            "shmloader.DataLoader, without its options, and reads one batch ahead of its state. Call "
            "shmloader.install() first, or pass it a ShardedSampler, and Ray move_to_device=False."
        )


def warn_of_torchs_class(loader: Any) -> None:
    """Warn once that accelerate replaces a loader with these options by one of torch's class."""
    lost = options_asked_for(loader)
    if "accelerate" in sys.modules and (lost or loader.num_workers):
        options = f" and without its options ({', '.join(lost)})" if lost else ""
        warn_once(
            "accelerate builds a loader of torch's class in the place of this shmloader.DataLoader: batches "
            f"come without slots{options}. Call shmloader.install() before accelerator.prepare()."
        )
