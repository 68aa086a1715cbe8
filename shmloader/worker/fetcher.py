"""`Fetcher`, the base of all fetchers, and the rules that they follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from shmloader.failures.bad_samples import RAISE, pack
from shmloader.settings import Settings
from shmloader.statistics import BadSample
from shmloader.wire.stream_records import StreamReport, StreamRules
from shmloader.worker.probe import BatchProbe


class FetchRules(NamedTuple):
    """The loader's arguments that affect fetching."""

    iterable: bool  # whether the dataset is iterable-style
    auto_collation: bool  # whether an index batch is a list of indices; else it is one index
    drop_last: bool  # whether an iterable dataset's last, shorter batch is left out
    collate_fn: Callable[[Any], Any]  # joins samples (or converts the one sample, without auto collation)
    on_error: str = RAISE  # what to do with a sample that raises: see ``DataLoader``
    stream: StreamRules = StreamRules()
    # Whether a worker publishes the batches; a loader without workers, which a dataset may use inside a
    # worker, returns them to the user's code.
    in_worker: bool = False

    @classmethod
    def of(cls, settings: Settings, stream: StreamRules | None) -> Self:
        """The rules of a loader's settings; ``stream`` if its dataset is iterable-style."""
        return cls(
            iterable=stream is not None,
            auto_collation=settings.batch_sampler is not None,
            drop_last=settings.drop_last,
            collate_fn=settings.collate_fn,
            on_error=settings.on_error,
            stream=stream or StreamRules(),
        )


class Fetcher(ABC):
    """Makes one batch for one index batch, each with a new list of bad samples: none is reported twice."""

    def __init__(self, rules: FetchRules) -> None:
        self._rules = rules
        self._bad: list[BadSample] = []
        self.measure(None)

    def measure(self, probe: BatchProbe | None) -> None:
        """Have a probe measure the parts of the batches from now on; None to measure no longer."""
        collate_fn = self._rules.collate_fn
        self._collate_fn = collate_fn if probe is None else probe.around_collate(collate_fn)

    @abstractmethod
    def fetch(self, index_batch: Any) -> Any:
        """Fetch and collate; returns a `Report` if there is something to report.

        In a worker the batch has placeholders for the leaves that lie in the slot already. Raises
        `StopIteration` if an iterable dataset is exhausted.
        """

    def place(self) -> StreamReport | None:
        """The report on a stream to send with an exception; None if the main process does not need it."""
        return None

    def take_bad_samples(self) -> bytes:
        """The bad samples, packed, of a batch for which `fetch` raised: no report has them."""
        bad, self._bad = self._bad, []
        return pack(bad)
