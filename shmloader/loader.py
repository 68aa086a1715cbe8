"""`DataLoader`: torch's arguments and behaviour, with workers that collate into shared-memory slots."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler

from shmloader.framework_rebuilds import (
    PreparedFlag,
    list_options,
    shared_if_asked,
    warn_of_ray,
    warn_of_torchs_class,
)
from shmloader.loading import loading_of
from shmloader.settings import Dispatch, OnError, Shard, SharedBy, WorkerType, options_asked_for, set_given
from shmloader.statistics import LoaderStatistics
from shmloader.torch_private import never_compiled

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

if TYPE_CHECKING:
    from shmloader.in_process import InProcessIterator
    from shmloader.iterator import SlotIterator
    from shmloader.profiling import Profile, ProfileReport

    _Base = torch.utils.data.DataLoader
else:

    class _Base:
        """torch's class, whatever type parameters it has: newer torch has two of them."""

        def __class_getitem__(cls, _: object) -> type:
            return torch.utils.data.DataLoader


class _Rows(Protocol[_T_co]):
    """A map-style dataset of any class, such as a list or a store."""

    def __getitem__(self, index: int, /) -> _T_co: ...
    def __len__(self) -> int: ...


_TORCHS = tuple(inspect.signature(torch.utils.data.DataLoader.__init__).parameters)[1:]  # torch's arguments


class DataLoader(_Base[_T_co], Generic[_T_co]):
    """A drop-in for ``torch.utils.data.DataLoader`` whose workers write batches where the program reads them.

    All arguments of torch's loader have torch's meaning. Batches, their order, the random numbers that
    datasets draw in workers and the state of the global generators afterwards are identical to torch's. With
    ``num_workers=0`` samples are fetched and joined in this process, with torch's results.

    With workers, each collates its batch straight into a **slot** of shared memory, and the tensors that
    ``next()`` returns are views of it. A slot is written again only after the last view of its batch is
    gone, whatever kind of view it is (``.numpy()``, ``.detach()``, a slice, an ``nn.Parameter``), so batches
    may be kept. While nothing is kept there are at most ``prefetch_factor * num_workers + 2`` slots, each as
    large as the largest batch so far; slots that were made for batches that are no longer kept give their
    memory back.

    Args:
        num_workers: Worker processes; 0 loads in the main process. ``"auto"`` begins with one and adds
            workers while the program waits for busy ones, at most one for each usable core, in the first 200
            batches. The attribute is the number now; ``statistics().autotune`` says why. It implies
            ``dispatch="dynamic"``. For map-style datasets. See docs/autotune.md.
        collate_fn: Joins samples to a batch, in the worker. Results of torch, ``numpy.stack`` and
            ``shmloader.empty`` are made in the slot (``place_results``); others are copied there once.
        pin_memory: Return tensors in page-locked memory, if there is an accelerator. With CUDA the slots
            themselves are page-locked, and none is written again before the device has done what was queued
            when the program dropped its batch. See docs/gpu.md.
        timeout: Most seconds to wait for any worker to finish a batch; 0 waits as long as workers live.
            Choose it larger than the time of the slowest batch.
        multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"`` or a context object; None for
            the platform's default.
        prefetch_factor: Batches made in advance per worker; 2 if None and there are workers. ``"auto"``
            begins with 2 and takes more, up to 16, if the program waits although the workers have time.
        memory_budget_nbytes: Most bytes that the slots of one iterator may take together. If they are too
            few, fewer batches are made in advance, and those that still do not fit are copied to private
            memory; one warning tells of it. None: half of what the machine and its memory cgroup have
            available when iteration begins, and again when batches have grown.
        worker_restarts: How many dead workers, and with ``timeout`` silent ones, an iterator replaces before
            one of them is an error. The batches that a replaced worker held are made again, in the same
            order; one that has ended two workers is an error at once. The new worker is seeded like the first
            one at its start, so samples' random numbers are others. For map-style datasets.
        worker_max_nbytes: Most private memory of a worker process. One that has more is replaced by a new
            process between two of its batches; order and random numbers stay. A state of the dataset that
            would be lost is an error from ``next()``, unless its ``state_dict()`` pair hands it over. For
            map-style datasets. None for no limit. See docs/robustness.md.
        on_error: What to do with a sample whose ``dataset[i]`` raises (for an iterable-style dataset, its
            iterator): ``"raise"`` it from ``next()``; ``"skip"`` it, so that its batch is smaller; or
            ``"replace"`` it by a copy of the next good sample of its batch (of a stream, by its next sample).
            A batch without a good sample is left out of the epoch. `statistics` lists bad samples, and one
            `BadSampleWarning` for the loader sums them up. Never skipped: ``SystemExit``,
            ``KeyboardInterrupt``, out-of-memory errors, errors of a loader inside the dataset, and exceptions
            of samplers and ``collate_fn``. See docs/errors.md.
        dispatch: Which worker makes which batch. ``"static"``, the default: they take turns, as torch's do.
            ``"dynamic"``: a free worker makes the next one, and while ``next()`` waits for a slow batch the
            others make further ones in advance, in up to 64 more slots within the memory budget. Batches come
            in the same order either way. It implies ``seed_per_sample``. For map-style datasets. See
            docs/dispatch.md.
        prefetch_epochs: With ``persistent_workers``: draw and send the next epoch's first index batches as
            soon as this epoch's last task is sent. Batches are the same, as long as only the loader uses the
            sampler's ``generator``. Where it has no effect, ``iter()`` warns. See docs/dispatch.md.
        worker_type: ``"process"``, or ``"thread"`` for datasets that release the interpreter lock and for
            free-threaded Python: ``num_workers`` threads of this process, with no start-up cost and nothing
            pickled or copied for them, that share a map-style dataset with each other. They leave the global
            random generators alone: draw from those of ``get_worker_info().rng``. Not with
            ``worker_restarts`` or a ``multiprocessing_context``. See docs/threads.md.
        share_dataset: Move the dataset's large containers to shared memory first, as `shmloader.share` does:
            ``loader.dataset`` is then the shared dataset, and ``dataset`` itself is not changed. A sequence
            or mapping with a class of its own keeps it, since its samples may be new at each access. It saves
            memory only if nothing else (a sampler, a variable) keeps the original.
        shard: ``"auto"`` divides an iterable-style dataset among all workers of all ranks, so that each item
            comes once: by the dataset's ``shard(num_shards, index)``; else each worker iterates over all of
            it and gives its share of the items, which must come in the same order in all workers. Ranks have
            equally many batches, or an error names one that has fewer. See docs/sharding.md.
        snapshot_every_n_steps: For an iterable-style dataset with a ``state_dict()``, itself or its iterator:
            each worker's batches from one call of it to the next; the samples since are drawn again when the
            loader continues. 0: no call. None: 1 once the program has asked for a state or loaded one, until
            then once an epoch.
        seed_per_sample: Seed the generators of torch, NumPy and ``random`` in the worker before each sample,
            from the base seed, the epoch and the sample's place in it. Random augmentation is then the same
            with any number of workers, 0 included, and after `load_state_dict`. It takes 11 µs per sample.
            None: with ``dispatch="dynamic"``. For map-style datasets. See docs/resume.md.
        device: The accelerator that batches are returned on, ``"cuda"`` or ``"cuda:1"``, say. With CUDA and
            workers they are copied there ahead of the loop, straight out of their slots, on a stream of their
            own that the current stream waits for. What is neither a tensor nor has a method ``to`` stays as
            it is. ``"cpu"`` and None leave batches where they are. See docs/gpu.md.
        place_results: Whether results that a program's own ``collate_fn`` makes (with ``torch.stack``,
            ``cat``, ``zeros``, ``pad_sequence``, ``numpy.stack`` and others), and that are in the batch, are
            made in its slot instead of being copied there. The same for ``dataset[i]`` with
            ``batch_size=None``. Worker processes only. See docs/vectorised.md.
        shared_by: ``"host"``: the ranks of a host, under torchrun, all get the same batches, as tensor- and
            pipeline-parallel peers need them. They are made once, in a process that local rank 0 starts at
            the first ``iter()`` and that ends with it. See docs/serving.md.

    Raises:
        TypeError: For a wrong type, such as a number that is not whole (``1e9`` is a float), with the
            argument, its value and what to pass; and when torch raises one.
        ValueError: For arguments that torch refuses, with torch's message; for other values than those above,
            and for arguments that exclude each other, with what to pass instead.
        RuntimeError: From ``iter()``, for a missing accelerator.
        LoaderError: From ``iter()``, with ``shared_by="host"``: if the sampler divides the data among all
            ranks, or other ranks of the host have another loader; `ServerDied` if the serving process ends.
    """

    memory_budget_nbytes: int | None
    worker_restarts: int
    worker_max_nbytes: int | None
    on_error: OnError
    dispatch: Dispatch
    prefetch_epochs: bool
    worker_type: WorkerType
    share_dataset: bool
    shard: Shard | None
    snapshot_every_n_steps: int | None
    seed_per_sample: bool | None
    place_results: bool
    shared_by: SharedBy | None
    is_shmloader = True  # accelerate copies it, under install()
    _is_accelerate_prepared = PreparedFlag(warn_of_torchs_class)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the loader's own options if Lightning rebuilds a subclass that takes ``**kwargs``."""
        super().__init_subclass__(**kwargs)
        ours = list(inspect.signature(DataLoader.__init__).parameters.items())[1:]  # "self" may have any name
        list_options(cls, {name: option for name, option in ours if name not in _TORCHS})

    def __init__(
        self,
        dataset: Dataset[_T_co] | _Rows[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | Literal["auto"] | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory_budget_nbytes: int | None = None,
        worker_restarts: int = 0,
        worker_max_nbytes: int | None = None,
        on_error: OnError = "raise",
        dispatch: Dispatch | None = None,
        prefetch_epochs: bool = False,
        worker_type: WorkerType = "process",
        share_dataset: bool = False,
        shard: Shard | None = None,
        snapshot_every_n_steps: int | None = None,
        seed_per_sample: bool | None = None,
        device: torch.device | str | int | None = None,
        place_results: bool = True,
        shared_by: SharedBy | None = None,
    ) -> None:
        given = locals()
        set_given(self, given)
        given["dataset"] = shared_if_asked(self, dataset)
        super().__init__(**{name: given[name] for name in _TORCHS if name in given})
        warn_of_ray(self)

    def __repr__(self) -> str:
        try:
            counts = [f"{name}={getattr(self, name)!r}" for name in ("batch_size", "num_workers")]
            what = ", ".join([*counts, *options_asked_for(self)])
            return f"<{type(self).__name__} of {type(self.dataset).__qualname__}: {what}>"
        except AttributeError:  # it is not made yet
            return object.__repr__(self)

    @never_compiled
    def __iter__(self) -> SlotIterator | InProcessIterator:
        iterator: SlotIterator | InProcessIterator = loading_of(self).iterate(super().__iter__)
        return iterator

    @never_compiled
    def __aiter__(self) -> AsyncIterator[Any]:
        """The batches of a new pass for ``async for`` in asyncio: other tasks run while a batch is made.

        Order, exceptions, ``timeout`` and states are as with ``for``; a task that is cancelled has lost no
        batch. Without workers each batch is made in the event loop's thread. See docs/waiting.md.

        Raises:
            NotImplementedError: If torch's own iterator loads, with the reason.
        """
        return loading_of(self).iterate_async(iter(self))

    @never_compiled
    def _get_iterator(self) -> Any:
        iterator = loading_of(self).make_iterator()
        return super()._get_iterator() if iterator is None else iterator

    @never_compiled
    def close(self) -> None:
        """Stop all workers of this loader and free its slots.

        Batches that the program holds stay valid. Iterators that were live raise `LoaderClosed` from
        then on; ``iter(loader)`` starts anew. May be called any number of times.
        """
        loading_of(self).close()

    def __enter__(self) -> Self:
        """Use as ``with DataLoader(...) as loader``: `close` is called at the block's end."""
        return self

    @never_compiled
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        loading_of(self).close(warn=error is None)  # a warning that is an error would hide this one

    @never_compiled
    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch(epoch)`` of the sampler, the batch sampler and the dataset, if they have it.

        Call it before ``iter(loader)``. Persistent workers make the call too, when their next epoch begins;
        calls on the dataset itself do not reach them, as with torch. Of objects inside each other the
        outermost one that has ``set_epoch`` is called. See docs/dispatch.md.

        Args:
            epoch: The number.
        """
        loading_of(self).set_epoch(epoch)

    @never_compiled
    def state_dict(self, *, taken: int | None = None) -> dict[str, Any]:
        """The program's place in the epoch: after the batches that ``next()`` has returned so far.

        May be called at any moment, also before the first batch and between epochs, and as often as wanted:
        it takes microseconds and starts no worker. See docs/resume.md.

        If something reads ahead of the program, ``next()`` has returned more batches than were used: then
        pass what it gives through `follow`, or pass the number that was used.

        Args:
            taken: The place after so many of the batches that were returned since ``iter()``, as a wrapper
                counts them. For orders that are a count (torch's samplers, `ShardedSampler`), any number; for
                other samplers and streams, the last 1,024 and 0. None: all that were returned, or that came
                out of `follow`.

        Returns:
            A new flat dict of numbers, strings and None, mostly under 1 KB (see docs/resume.md), with the
            same keys at any moment. Empty for a DataPipe, with a warning.

        Raises:
            ResumeError: If torch's own iterator loads, unless for a DataPipe, while two iterators are in use
                at once, for a sampler or a dataset whose own state cannot be saved, with ``in_order=False``
                if ``shard="auto"`` deals out samples to several workers, and if ``taken`` is more than were
                returned, or too far back.
        """
        return loading_of(self).state_dict(taken)

    @never_compiled
    def follow(self, batches: Iterable[_T]) -> Iterable[_T]:
        """Let the loader's state follow what comes out of a look-ahead, instead of what that has read.

        ``for batch in loader.follow(prefetcher):``, where the prefetcher reads this loader, in this thread or
        another one. It may read into the next epochs. It must give one item for each batch, in the order of
        the batches. `state_dict` is then of the batch that the loop has, and after the loop of the epoch's
        end. Break off and begin again as with the loader itself. Follow each epoch, or none.

        Args:
            batches: The look-ahead: iterable once or for each epoch.

        Returns:
            An iterable over the same items; iterable as often as ``batches`` is, and as long.

        Raises:
            ResumeError: From its ``next()``, if the items are not of this loader, which has begun no epoch.
        """
        return loading_of(self).follow(batches)

    @never_compiled
    def batch(self, epoch: int, number: int) -> Any:
        """The batch that this rank has in a step of an epoch, made again in this process, for debugging.

        Iterators, samplers, workers and the program's random generators stay as they are. The order must
        follow from a seed and the epoch: of a `ShardedSampler`, `TokenBatchSampler`, `MixtureSampler`,
        torch's ``DistributedSampler``, or no shuffling. It is that of a whole epoch with this number of ranks
        and batch size, or of the resumed rest of the epoch in progress or of the state that was loaded.

        What samples draw at random is exact with ``seed_per_sample`` (and so ``dispatch="dynamic"``), for
        epochs that this loader has begun and that of a state that was loaded before; with
        ``persistent_workers`` also for others, if their numbers go up by 1. Else it is drawn from the
        program's generators as they are. What ``worker_init_fn`` or ``get_worker_info()`` change in a dataset
        is not there. A dataset with ``set_epoch()`` is told of the epoch meanwhile: without workers, let no
        other thread iterate then.

        Args:
            epoch: The number that the program passes to `set_epoch`.
            number: The step, from 0 on.

        Raises:
            ResumeError: If the order or the seeds cannot be known, with the reason, or if worker threads
                share the dataset, which was told of another epoch.
            IndexError: If the epoch has no such batch.
        """
        return loading_of(self).batch(epoch, number)

    @never_compiled
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next ``iter(loader)`` continue from a state: with the batch after those returned.

        A state after the last batch and ``StopIteration`` begins the next epoch. An empty dict does nothing.
        Until that ``iter()``, `state_dict` returns the state again. The number and kind of workers may differ
        from those of the loader that gave the state.

        Args:
            state_dict: As `state_dict` has returned it, in this program or another one.

        Raises:
            ResumeError: If the state does not fit this loader, with the differences.
        """
        loading_of(self).load_state_dict(state_dict)

    @never_compiled
    def statistics(self) -> LoaderStatistics:
        """Counters of the loader's life so far, and the slots that it holds now."""
        return loading_of(self).statistics()

    def profile(
        self,
        *,
        every_s: float = 10.0,
        callback: Callable[[ProfileReport], object] | None = None,
        replay: bool = False,
    ) -> Profile:
        """Measure where the time goes, batch by batch, in the main process and in the workers.

        ``with loader.profile() as profile:`` measures the epochs that begin in the block, and
        ``print(profile)`` shows the table and the verdict. It costs a few microseconds per batch. See
        docs/profile.md.

        Args:
            every_s: Seconds from one call of ``callback`` to the next.
            callback: Called with the report so far, in ``next()``: ``report.scalars()`` are figures for a
                tracker.
            replay: Whether each epoch's first batch comes again and again, as often as the epoch has batches
                (1,000 times without a length). Then the figures are those of the program beside a loader that
                takes no time. What is trained meanwhile is worth nothing.
        """
        return loading_of(self).profile(every_s, callback, replay=replay)
