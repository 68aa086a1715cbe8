"""One pass over a loader without workers: torch's single-process loading, with our fetcher.

The fetcher goes on where a sample raises, if ``on_error`` says so, and says in notes which sample it was.
"""

from __future__ import annotations

import time
from typing import Any

from shmloader import torch_private
from shmloader.diagnostics.bad_samples import LEFT_OUT, Reported, count, take_report, warn_of_bad_samples
from shmloader.scheduling.stream_progress import StreamProgress
from shmloader.statistics import Counters
from shmloader.worker.fetch import FetchRules, make_fetcher
from shmloader.worker.streams import StreamRules


class InProcessIterator(torch_private.SingleProcessIterator):
    """Iterates over a loader with ``num_workers=0``, in the main process.

    Args:
        loader: The loader; its arguments are read now, as frameworks set some late.
        counters: The loader's counters.

    Raises:
        AssertionError: If the loader has a timeout, as torch has it.
    """

    def __init__(self, loader: Any, counters: Counters) -> None:
        # Not torch's own constructor: its fetcher would begin to iterate over the dataset.
        torch_private.BaseIterator.__init__(self, loader)
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")  # torch's words
        if isinstance(self._dataset, torch_private.DATAPIPES):
            torch_private.apply_sharding(self._dataset, self._world_size, self._rank)
        self._counters = counters
        counters.begin_epoch()
        self._on_error: str = loader.on_error
        iterable = self._dataset_kind == torch_private.ITERABLE_KIND
        self._stream = StreamProgress(loader) if iterable else None
        rules = FetchRules(
            iterable=iterable,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            collate_fn=self._collate_fn,
            on_error=self._on_error,
            stream=StreamRules() if self._stream is None else self._stream.rules,
        )
        self._dataset_fetcher = make_fetcher(self._dataset, rules)

    def _next_data(self) -> Any:
        began_ns = time.perf_counter_ns()
        while True:
            try:
                index_batch = self._next_index()  # type: ignore[no-untyped-call]
                batch = self._fetch(index_batch)
            except StopIteration:
                if self._stream is not None:
                    self._stream.end_epoch()
                warn_of_bad_samples(self._counters, self._on_error)
                raise
            if batch is not LEFT_OUT:
                break
        self._counters.batches += 1
        if self._pin_memory:
            self._counters.pin_copies += 1
            batch = torch_private.pin_memory(batch, self._pin_memory_device)
        self._counters.last_next_ns = time.perf_counter_ns()
        self._counters.in_process_ns += self._counters.last_next_ns - began_ns
        return batch

    def _fetch(self, index_batch: Any) -> Any:
        """A batch, or ``LEFT_OUT``."""
        try:
            batch = self._dataset_fetcher.fetch(index_batch)
        except StopIteration:
            raise
        except BaseException:
            self._counters.failures += 1
            count(self._dataset_fetcher.take_bad_samples(), self._counters)
            raise
        if self._stream is not None:
            self._stream.count()
        if type(batch) is not Reported:
            return batch
        if self._stream is not None and batch.place is not None:
            self._stream.take(batch.place)
        return take_report(batch, self._counters)
