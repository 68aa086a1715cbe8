"""A loader's arguments: `Settings`, their values as one pass begins, and the checks of the loader's own.

Those about workers are checked once more when it starts workers: frameworks set some attributes late.
"""

from __future__ import annotations

import numbers
import operator
import threading
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any, Final, Literal, Self, get_args

import torch
from torch.utils.data import IterableDataset

from shmloader.messages import shown

OnError = Literal["raise", "skip", "replace"]
Dispatch = Literal["static", "dynamic"]
WorkerType = Literal["process", "thread"]
Shard = Literal["auto"]
SharedBy = Literal["host"]

AUTO: Final = "auto"
STATIC: Final = "static"
DYNAMIC: Final = "dynamic"
PROCESS: Final = "process"
THREAD: Final = "thread"

_WORDS = {
    "on_error": get_args(OnError),
    "dispatch": get_args(Dispatch),
    "worker_type": get_args(WorkerType),
    "shard": get_args(Shard),
    "shared_by": get_args(SharedBy),
}
_WHOLE = {
    "memory_budget_nbytes": (1, "a whole number of bytes or None", "int(1e9)"),
    "worker_restarts": (0, "a whole number", "3"),
    "worker_max_nbytes": (1, "a whole number of bytes or None", "int(4e9)"),
    "snapshot_every_n_steps": (0, "a whole number or None", "100"),
}
"""Options that are whole numbers: the least, what to pass, an example."""
_COUNTS = {"num_workers": "a whole number or 'auto'", "prefetch_factor": "a whole number, 'auto' or None"}
"""torch's arguments that may be chosen automatically, and what to pass."""
_DEVICE = "_shmloader_device"


class AutoCount(int):
    """A number chosen by the loader, as the value of its attribute. ``int(...)`` of it is a plain number.

    As an argument it means ``"auto"``, beginning with that number: frameworks build loaders from the
    attributes of others.
    """


def _number_or_auto(name: str, argument: Any, start: int) -> Any:
    """An argument, or an `AutoCount` of ``start`` for ``"auto"``; torch checks what is no number."""
    if not isinstance(argument, str):
        if isinstance(argument, numbers.Real):
            _whole(name, argument, _COUNTS[name], 2)
        return argument
    if argument != AUTO:
        raise ValueError(f"{name} must be a number or {AUTO!r}, not {argument!r}")
    return AutoCount(start)


def dispatch_of(dispatch: Dispatch | None, num_workers: object) -> Dispatch:
    """The mode of dispatch of a loader; dynamic by default for ``num_workers="auto"``, else static."""
    if dispatch is None:
        return DYNAMIC if isinstance(num_workers, AutoCount) else STATIC
    return dispatch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A loader's arguments as one pass begins, parsed; see `DataLoader`. Main process only.

    They are read anew for each pass, as frameworks set some attributes late, and options of torch's class
    come and go with ``install()``.
    """

    dataset: Any
    sampler: Any
    batch_sampler: Any
    batch_size: Any
    drop_last: bool
    collate_fn: Any
    num_workers: int  # now
    prefetch_factor: int  # now; 0 without workers
    in_order: bool
    persistent_workers: bool
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any
    generator: torch.Generator | None
    device: torch.device | None  # as given; `target` is the accelerator
    # Options that torch's loader lacks, with the values that turn them off:
    memory_budget_nbytes: int | None = None
    worker_restarts: int = 0
    worker_max_nbytes: int | None = None
    on_error: OnError = "raise"
    dispatch: Dispatch = STATIC
    seed_per_sample: bool | None = None
    prefetch_epochs: bool = False
    worker_type: WorkerType = PROCESS
    share_dataset: bool = False
    shard: Shard | None = None
    snapshot_every_n_steps: int | None = None
    place_results: bool = True
    shared_by: SharedBy | None = None

    @classmethod
    def of(cls, loader: Any) -> Self:
        """The settings of a loader's attributes now; `TypeError` for counts that are not whole."""
        read = {name: getattr(loader, name) for name in _TORCHS}
        read |= {name: option_of(loader, name) for name in OWN_DEFAULTS}
        if isinstance(read["num_workers"], AutoCount):
            read["dispatch"] = DYNAMIC
        for name in ("num_workers", "prefetch_factor"):
            read[name] = _whole(name, read[name] or 0, _COUNTS[name], 2)
        return cls(**read, device=getattr(loader, _DEVICE, None))

    @property
    def seeds_samples(self) -> bool:
        """Whether generators are seeded for each sample."""
        return self.dispatch == DYNAMIC if self.seed_per_sample is None else bool(self.seed_per_sample)

    @property
    def index_sampler(self) -> Any:
        """The sampler that index batches are drawn from; single indices without automatic batching."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset is iterable-style."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def is_undivided(self) -> bool:
        """Whether each worker has the whole dataset, unless that divides itself: a stream, no ``shard``."""
        return self.is_iterable and self.shard is None

    @property
    def comes_in_order(self) -> bool:
        """Whether batches come in the sampler's order; ``"auto"``, which is dynamic, may add a worker."""
        return bool(self.in_order) or self.num_workers < (1 if self.dispatch == DYNAMIC else 2)

    @property
    def target(self) -> torch.device | None:
        """The accelerator that batches go to; None if they stay on the CPU.

        Without a number it is the current one; to ask for that initialises the accelerator, which has to
        wait until workers were forked.

        Raises:
            RuntimeError: If there is no such accelerator.
        """
        device = self.device
        if device is None or device.type == "cpu":
            return None
        there: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if there is None or there.type != device.type:
            found = "no accelerator" if there is None else f"torch's accelerator is {there.type!r}"
            raise RuntimeError(f"device='{device}' is not available: {found}. Pass device='cpu', or None")
        index: int | None = device.index
        if index is not None and index >= (count := torch.get_device_module(there).device_count()):
            raise RuntimeError(
                f"device='{device}' is not available: torch finds {count} device(s), numbered from 0"
            )
        return device


OWN_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(Settings) if field.default is not MISSING
}
"""Options that torch's loader lacks, with the values that turn them off."""

_TORCHS = [field.name for field in fields(Settings) if field.name not in {*OWN_DEFAULTS, "device"}]


def set_given(loader: Any, given: dict[str, Any]) -> None:
    """Check a loader's arguments, parse torch's in place, and set the others as attributes.

    Raises:
        TypeError, ValueError: See `check_arguments`.
    """
    for name, start in (("num_workers", 1), ("prefetch_factor", 2)):
        given[name] = _number_or_auto(name, given[name], start)
    _check_torchs(given)
    given["dispatch"] = dispatch_of(given["dispatch"], given["num_workers"])
    options = _set_options(loader, {name: given[name] for name in OWN_DEFAULTS})
    set_device(loader, given["device"])
    names = ("dataset", "num_workers", "persistent_workers", "multiprocessing_context")
    check_arguments(options, *(given[name] for name in names))


def _set_options(loader: Any, given: dict[str, Any]) -> Any:
    """Set a loader's own options as attributes; returns them all, as they are in effect.

    A subclass's own attributes of these names stay where the argument is the default or the same value.
    """
    options = SimpleNamespace(**given)
    kinds = [kind for kind in type(loader).__mro__ if kind is not torch.utils.data.DataLoader]
    for name, value in given.items():
        if name in vars(loader) or any(name in vars(kind) for kind in kinds):
            own = getattr(loader, name, value)  # a property may need what is set later
            if own is value or value in (OWN_DEFAULTS[name], own):
                setattr(options, name, option_in_effect(name, own))
                continue
        setattr(loader, name, value)
    return options


def option_in_effect(name: str, value: Any) -> Any:
    """An option's value; the default for one of a subclass that means something else by an option's name."""
    words = _WORDS.get(name)
    return OWN_DEFAULTS[name] if words and not (isinstance(value, str) and value in words) else value


def option_of(loader: Any, name: str) -> Any:
    """The value of a loader's own option now; the default for one that was made of a loader of torch's."""
    return option_in_effect(name, getattr(loader, name, OWN_DEFAULTS[name]))


def options_asked_for(loader: Any) -> list[str]:
    """The options in use that torch's loader lacks, as ``name=value``."""
    counts = {name: getattr(loader, name) for name in ("num_workers", "prefetch_factor")}
    own = {name: option_of(loader, name) for name in OWN_DEFAULTS}
    automatic = [f"{name}='auto' (it is {n})" for name, n in counts.items() if isinstance(n, AutoCount)]
    return automatic + [f"{name}={value!r}" for name, value in own.items() if value != OWN_DEFAULTS[name]]


def set_device(loader: Any, device: torch.device | str | int | None) -> None:
    """Keep the argument ``device`` for `Settings`, and as an attribute unless a subclass has its own."""
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is not a device. Pass 'cuda', 'cuda:1', 'cpu' or None. torch says: {error}"
        ) from None
    setattr(loader, _DEVICE, device)
    if not hasattr(type(loader), "device") and "device" not in vars(loader):
        loader.device = device


def _check_torchs(given: dict[str, Any]) -> None:
    """Check those arguments of torch's that it takes, or refuses without their names."""
    batch_size, timeout, generator = given["batch_size"], given["timeout"], given["generator"]
    if isinstance(batch_size, str):
        raise ValueError(  # noqa: TRY004 - as torch's
            f"batch_size should be a positive integer value, but got batch_size={batch_size!r}: pass an int, "
            "such as 32"
        )
    if not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout must be a number of seconds, not {shown(timeout)}: pass one, such as 60")
    if not float(timeout) < float("inf"):  # nor a NaN
        raise ValueError(f"timeout must be finite, not {timeout}: 0 waits as long as the workers live")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, not {shown(generator)}: pass "
            "torch.Generator().manual_seed(0)"
        )
    workers, prefetch_factor = given["num_workers"], given["prefetch_factor"]
    if workers and prefetch_factor is not None and prefetch_factor == 0:
        raise ValueError(
            f"prefetch_factor must be at least 1 with num_workers={workers}, not 0: pass 2, say, or None"
        )


def check_arguments(
    options: Any, dataset: object, num_workers: object, persistent_workers: bool, context: object
) -> None:
    """Check all of the loader's own arguments; torch's are not set yet.

    Raises:
        TypeError: For a wrong type. Any object with an ``__index__`` is a whole number, as usual in Python.
        ValueError: For a wrong value, and for arguments that exclude each other.
    """
    for name, default in OWN_DEFAULTS.items():
        if (value := getattr(options, name)) is default:
            continue
        if name in _WHOLE:
            least, wanted, such_as = _WHOLE[name]
            if (number := _whole(name, value, wanted, such_as)) < least:
                raise ValueError(f"{name} must be at least {least}, not {number}")
        elif name in _WORDS and value not in _WORDS[name]:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, _WORDS[name]))}, not {value!r}")
        elif name not in _WORDS and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r:.100}")
    for why in _contradictions(options, dataset, num_workers, persistent_workers):
        raise ValueError(why)
    check_workers(options, context)


def check_workers(options: Any, context: object) -> None:
    """Refuse what worker threads do not support, and ``multiprocessing`` contexts that use threads."""
    kind, why = threads_of(context), ""
    if options.worker_type != THREAD:
        if kind is not None:
            why = (
                f"multiprocessing_context={type(context).__qualname__}: its workers are threads that pose as "
                f"processes ({kind.__module__}.{kind.__qualname__}), which cannot write to slots. Pass "
                "worker_type='thread' for worker threads (with MONAI: no use_thread_workers), or no context"
            )
    elif context is not None:
        why = (
            f"worker_type='thread' starts no processes: multiprocessing_context={context!r} means nothing "
            "with it, leave one of them out"
        )
    elif options.worker_restarts:
        why = (
            f"worker_restarts={options.worker_restarts} needs worker_type='process': a thread that hangs "
            "cannot be ended, and one that crashes ends the program"
        )
    elif options.worker_max_nbytes is not None:
        why = (
            f"worker_max_nbytes={options.worker_max_nbytes} needs worker_type='process': threads have the "
            "program's memory, which none of them gives back at its end"
        )
    if why:
        raise ValueError(why)


def threads_of(context: object) -> type | None:
    """The class of thread that a ``multiprocessing`` context starts in place of a process, or None."""
    kind = getattr(context, "Process", None)
    return kind if isinstance(kind, type) and issubclass(kind, threading.Thread) else None


def _contradictions(
    options: Any, dataset: object, num_workers: object, persistent_workers: bool
) -> Iterator[str]:
    """Arguments that exclude each other or the kind of dataset: each with the reason and what to pass."""
    is_stream, is_automatic = isinstance(dataset, IterableDataset), isinstance(num_workers, AutoCount)
    if options.seed_per_sample and is_stream:
        yield (
            "seed_per_sample=True needs a map-style dataset: it seeds before dataset[index] is called, and "
            "an iterable-style dataset is not asked for single samples"
        )
    if options.worker_restarts and is_stream:
        yield (
            "worker_restarts needs a map-style dataset: only the dead worker knew how far it had come in an "
            "iterable-style one, so its batches cannot be made again"
        )
    if options.worker_max_nbytes is not None and is_stream:
        yield (
            "worker_max_nbytes needs a map-style dataset: only a worker knows how far it has come in its "
            "stream. Take a state, close() the loader, load the state: that begins with new workers"
        )
    if not num_workers and (options.worker_restarts or options.worker_max_nbytes is not None):
        name = "worker_restarts" if options.worker_restarts else "worker_max_nbytes"
        yield f"{name} needs num_workers: without, samples take this process's memory, and may end it"
    if options.prefetch_epochs and not persistent_workers:
        yield "prefetch_epochs=True needs persistent_workers=True: other workers end with their epoch"
    if is_automatic and is_stream:
        yield (
            "num_workers='auto' needs a map-style dataset: each worker has its own stream of an "
            "iterable-style one, so samples would depend on the number of workers. Pass a number"
        )
    if is_automatic and options.dispatch == STATIC:
        yield (
            "num_workers='auto' needs dispatch='dynamic', which is its default: if workers take turns, "
            "random draws of samples would depend on the number of workers. Leave dispatch out, or pass a "
            "number of workers"
        )
    if options.dispatch == DYNAMIC and is_stream:
        yield (
            "dispatch='dynamic' needs a map-style dataset: each worker has its own stream of an "
            "iterable-style one, so samples and their order would depend on which worker is free. Leave "
            "dispatch='static'"
        )
    if options.shared_by is not None and options.shard is not None:
        yield (
            "shard='auto' divides a stream among all ranks, and shared_by='host' gives those of a host the "
            "same batches: leave one of them out"
        )
    if options.shard is not None and not is_stream:
        yield (
            "shard='auto' needs an iterable-style dataset: workers share a map-style one by its indices, and "
            "ranks by a shmloader.ShardedSampler"
        )


def _whole(name: str, value: Any, wanted: str, such_as: object) -> int:
    """A number as a plain int; `TypeError` if it is not whole, or a truth value for the loader's own."""
    try:
        if isinstance(value, bool) and name in _WHOLE:
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be {wanted}, not {value!r:.100}: pass an int, such as {such_as}"
        ) from None
