"""``DataLoader(shared_by="host")``: the ranks of a host read one loader, which local rank 0 has served.

Local rank 0 starts a process that serves a copy of its loader in step to all ranks of the host, itself
included. It ends with that rank. A rank's loader is a reader there; `HostLoading` says which call goes where.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from numbers import Integral
from typing import Any

import torch

from shmloader.distributed import local_rank_and_ranks, rank_and_ranks
from shmloader.errors import LoaderError, ServerDied, ShareTimeout
from shmloader.indices.compact_states import digest_of
from shmloader.indices.samplers import length_of, with_inner
from shmloader.interrupts import HeldInterrupts
from shmloader.loading import Loading
from shmloader.messages import ending_of
from shmloader.resume.compatibility import State
from shmloader.serving import meeting
from shmloader.serving.link import Link
from shmloader.serving.reader import AttachedLoader
from shmloader.serving.roster import Roster
from shmloader.serving.server import WINDOW
from shmloader.serving.start import run_server
from shmloader.settings import Settings, set_device
from shmloader.statistics import LoaderStatistics
from shmloader.store.job import job_of_process
from shmloader.worker import parent_watch
from shmloader.worker.epoch_settings import has_set_epoch
from shmloader.workers.launch import explain_no_process

_WAIT_S = 1800.0  # for local rank 0, as in `share_on_host`
_LOOK_S = 1.0  # how often to look meanwhile whether its process has ended
_END_S = 5.0  # how long that may take to end by itself

_opened = itertools.count()
"""Numbers of the loaders that this rank has begun to read: the same in all ranks, which go in step."""
_begun_from: Counter[str] = Counter()
"""Loaders that local rank 0 has begun to serve, by the state of torch's global generator then."""


def host_loading(loader: Callable[[], Any]) -> Loading:
    """The `Loading` of a loader whose ranks share it: the usual one, if this rank is alone on its host."""
    return Loading(loader) if local_rank_and_ranks()[1] == 1 else HostLoading(loader)


def _refusing(what: str, instead: str) -> Any:
    """A method in place of one that a rank does not have."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise LoaderError(f"{what} is not there for a loader with shared_by='host'. {instead}")

    return refuse


class HostLoading(Loading):
    """The loading of one rank: epochs, states and epochs' numbers are those of the process that serves."""

    _reader: AttachedLoader | None = None
    _sampler_epoch: int | None = None  # the number that the rank's own sampler had last

    def _attached(self) -> AttachedLoader:
        """This rank's reader; attaches to the process that serves, which local rank 0 starts."""
        if self._reader is None:
            loader = self.loader()
            settings = Settings.of(loader)
            about = meeting.introduction(None) | {"join": "next", "loader": _description(settings)}
            name, (rank, ranks) = _name(), local_rank_and_ranks()
            link = _attach(name, about) if rank else _start_and_attach(loader, name, ranks, about)
            self._sampler_epoch = _epoch_of_sampler(settings)
            self._reader = AttachedLoader(link, pin_memory=loader.pin_memory, device=settings.device)
        return self._reader

    def iterate(self, torchs_iter: Callable[[], Any]) -> Any:
        """Ask for the next epoch, of the number that the program has told the loader or its sampler."""
        reader = self._attached()
        epoch = _epoch_of_sampler(Settings.of(self.loader()))
        if epoch is not None and epoch != self._sampler_epoch:
            self._sampler_epoch = epoch
            reader.set_epoch(epoch)
        return iter(reader)

    def set_dataset_epoch(self, epoch: int) -> None:
        """Tell the number of the next epoch, here and where the loader is served: to its sampler as well."""
        reader = self._attached()
        super().set_dataset_epoch(epoch)
        reader.set_epoch(epoch)

    def state_dict(self, taken: int | None = None) -> State:
        """The served loader's state after the batches that this rank has had."""
        return self._attached().state_dict(taken=taken)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the served loader continue from a state, which is the same in all ranks."""
        if state != {}:
            self._attached().load_state_dict(state)

    follow = _refusing("follow()", "Call state_dict(taken=...) with the number of batches that were used.")
    state_after_epoch = _refusing(
        "the state after an epoch that was not read", "Call state_dict() after the epoch."
    )
    batch = _refusing("batch()", "Call it of a loader without shared_by, with the state loaded.")
    iterate_async = _refusing("'async for'", "Use 'for', in a thread of its own.")
    profile = _refusing("profile()", "Profile the loader without shared_by, in one process.")

    def statistics(self) -> LoaderStatistics:
        """This rank's batches, and its time in ``next()``; the served loader's own are in its process."""
        if self._reader is None:
            return super().statistics()
        own = self._reader.statistics()
        return dataclasses.replace(super().statistics(), batches=own.batches, wait_for_workers_s=own.wait_s)

    def close(self, *, warn: bool = True) -> None:
        """Leave the process that serves, which ends with the last rank that does."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _name() -> str:
    """The name of the loader that the ranks of this run begin to read now."""
    try:
        job = job_of_process("")
    except LoaderError as error:
        raise LoaderError(
            "shared_by='host' needs a launcher that tells runs apart, such as torchrun or srun. Use "
            "shmloader.serve and shmloader.attach, with a name of your own"
        ) from error
    key = json.dumps([job, os.environ.get("TORCHELASTIC_RESTART_COUNT"), next(_opened)])
    return f"ranks-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _description(settings: Settings) -> str:
    """The loader in words, which are the same in all ranks that read it.

    Raises:
        LoaderError: If its sampler divides the data among all ranks.
    """
    length, words = length_of(settings.dataset), [type(settings.dataset).__qualname__]
    words += [] if length is None else [f"{length:,} samples"]
    words.append(f"batch_size={settings.batch_size}")
    rank, ranks = rank_and_ranks()
    for sampler in with_inner(settings.index_sampler):
        kind, replicas = type(sampler).__name__, getattr(sampler, "num_replicas", 1)
        if 1 < ranks == replicas:
            raise LoaderError(
                f"shared_by='host' gives all ranks of a host the same batches, and the sampler, a {kind}, "
                f"has the share of rank {rank} of {ranks} alone: the other shares of this host would be read "
                "by nobody. Leave out shared_by, if ranks are to have different data; else give the sampler "
                "num_replicas=(number of hosts) and rank=(number of this host)"
            )
        share = f" for {sampler.rank} of {replicas}" if replicas > 1 else ""
        words.append(kind + share)
    return ", ".join(words)


def _epoch_of_sampler(settings: Settings) -> int | None:
    """The number that ``set_epoch()`` has told the loader's sampler; None if it keeps none."""
    for sampler in with_inner(settings.index_sampler):
        if has_set_epoch(sampler):
            epoch = getattr(sampler, "epoch", None)
            return int(epoch) if isinstance(epoch, Integral) else None
    return None


# --- the process that serves


def _start_and_attach(loader: Any, name: str, ranks: int, about: dict[str, Any]) -> Link:
    """Fork the process that serves a copy of a loader, and attach to it. It ends with this rank."""
    served = copy.copy(loader)
    vars(served).update(shared_by=None, pin_memory=False)
    vars(served).pop("device", None)
    set_device(served, None)
    state = digest_of(torch.get_rng_state())
    arguments = served, name, ranks, about, os.getpid(), _begun_from[state]
    _begun_from[state] += 1
    context = multiprocessing.get_context("fork")  # with copies of this rank's generators
    process = context.Process(target=_serve, args=arguments, name="shmloader-serves")
    with HeldInterrupts():
        try:
            process.start()
        except OSError as error:
            explain_no_process(error, "The loader that ranks share")
            raise
        # Before multiprocessing waits for it, at this rank's end.
        end = Finalize(None, _end, (process,), exitpriority=1)
    try:
        return _attach(name, about, process)
    except BaseException:
        end()
        raise


def _serve(loader: Any, name: str, ranks: int, about: dict[str, Any], main_pid: int, skipped: int) -> None:
    """Serve until all ranks have left, or local rank 0 has ended."""
    parent_watch.begin(main_pid)
    torch.set_num_threads(1)  # a forked process with more hangs where its parent has computed with them
    torch.empty(skipped, dtype=torch.int64).random_()  # the rank draws none, and would begin each one alike
    run_server(loader, name, Roster(ranks, WINDOW, "wait"), about)


def _attach(name: str, about: dict[str, Any], process: Any = None) -> Link:
    """Attach to the process that serves, once it does; ``process`` is that one, where it is a child."""
    deadline_s = time.monotonic() + _WAIT_S
    while True:
        try:
            return Link(name, _LOOK_S, about)
        except ShareTimeout:
            if process is not None and process.exitcode is not None:
                ending = ending_of(process.exitcode)
                raise ServerDied(
                    f"the process that was to serve a loader to the ranks of this host {ending}. Its own "
                    "error output says why if it could.",
                    pid=process.pid,
                ) from None
            if time.monotonic() > deadline_s:
                raise ShareTimeout(
                    f"local rank 0 has not begun to read this loader for {_WAIT_S:g} s. With "
                    "shared_by='host' all ranks of a host begin to read the same loaders, in the same order"
                ) from None


def _end(process: Any) -> None:
    """End the process that serves, since this rank ends."""
    for end in (process.terminate, process.kill):
        end()
        process.join(_END_S)
