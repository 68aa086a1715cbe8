"""One loader's part of the demo, in a process of its own, so that memory figures do not mix.

Started by :mod:`shmloader.cli.demo` as ``python -m shmloader.cli.demo SPEC RESULT``: the first
argument is a :class:`RunSpec` as JSON, the second the file that receives the :class:`RunResult`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import shmloader
from shmloader.cli import INTERRUPTED
from shmloader.cli.demo.corpus import Batch, Corpus, SourceDataset, library_folders, pad_batch
from shmloader.cli.demo.model import Trainer

_SEED = 0  # of the model and of the shuffling
_HELD_OUT_BATCH = 32
_LOADER_ALONE_BATCHES = 5000  # Or one epoch, whichever is shorter.


@dataclass(frozen=True)
class RunSpec:
    """Settings of one run; all but ``loader`` is the same for both loaders.

    Attributes:
        loader: ``torch`` or ``shmloader``.
        steps: Training steps.
        batch_size: Samples per batch.
        workers: Worker processes.
        start_method: Name of a multiprocessing start method.
        max_bytes: Most source text to read.
        demo_pid: The process that has started this one.
    """

    loader: str
    steps: int
    batch_size: int
    workers: int
    start_method: str
    max_bytes: int
    demo_pid: int


@dataclass
class RunResult:
    """Figures of one run; times in s.

    Attributes:
        corpus: Description of what was read, for people.
        first_batch_s: From ``iter(loader)`` to the first batch, starting the workers included.
        waited_s: Time the training loop spent waiting for the batches after the first.
        training_rate: Samples per second of training, after the first batch.
        loader_alone_rate: Samples per second without a model, after the first batch.
        loss_before: Loss on held-out samples before training, in nats per byte.
        loss_after: The same, after training.
        checksum: CRC-32 over all bytes of all batches, in order.
        peak_nbytes: Most PSS of all its processes together, read by the demo; 0 if unknown.
    """

    corpus: str = ""
    first_batch_s: float = 0.0
    waited_s: float = 0.0
    training_rate: float = 0.0
    loader_alone_rate: float = 0.0
    loss_before: float = 0.0
    loss_after: float = 0.0
    checksum: int = 0
    peak_nbytes: int = 0


class Stop:
    """The end of this process between two batches: on SIGTERM, or when the demo that started it is gone.

    Raising at once might interrupt torch's loader while it starts its workers, which it would report.
    """

    def __init__(self, demo_pid: int) -> None:
        """Handle SIGTERM; workers that are forked later still end on it."""
        self._demo_pid = demo_pid
        self._own_pid = os.getpid()
        self._is_asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        if os.getpid() != self._own_pid:
            os._exit(INTERRUPTED)
        self._is_asked = True

    def check(self) -> None:
        """End this process if it should.

        Raises:
            SystemExit: If so.
        """
        if self._is_asked or os.getppid() != self._demo_pid:
            raise SystemExit(INTERRUPTED)


def make_loader(spec: RunSpec, dataset: SourceDataset) -> Iterable[Batch]:
    """Make the loader under comparison: one class or the other, with the same arguments."""
    loader_class: Any = TorchDataLoader if spec.loader == "torch" else shmloader.DataLoader
    loader: Iterable[Batch] = loader_class(
        dataset,
        batch_size=spec.batch_size,
        shuffle=True,
        num_workers=spec.workers,
        collate_fn=pad_batch,
        drop_last=True,
        generator=torch.Generator().manual_seed(_SEED),
        multiprocessing_context=spec.start_method if spec.workers else None,
    )
    return loader


def endless(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Return a loader's batches, epoch after epoch."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def extend_checksum(checksum: int, batch: Batch) -> int:
    """Add all bytes of a batch to a CRC-32."""
    checksum = zlib.crc32(batch.lengths.numpy().data, checksum)
    return zlib.crc32(batch.tokens.numpy().data, checksum)


def with_progress_bar(steps: int, label: str) -> Iterable[int]:
    """Count steps, with tqdm's bar if tqdm is installed and standard error is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return range(steps)
    bar: Iterable[int] = tqdm(range(steps), desc=f"{label:>9}", unit="step", leave=False, disable=None)
    return bar


def train(spec: RunSpec, dataset: SourceDataset, held_out: Sequence[Batch], stop: Stop) -> RunResult:
    """Train the model for a fixed number of steps, and measure the training loop."""
    result = RunResult()
    trainer = Trainer(_SEED)
    result.loss_before = trainer.evaluate(held_out)
    asked_s = time.monotonic()
    batches = endless(make_loader(spec, dataset))
    first_s = 0.0
    for step in with_progress_bar(spec.steps, spec.loader):
        stop.check()
        batch = next(batches)
        arrived_s = time.monotonic()
        if step == 0:
            first_s = arrived_s
            result.first_batch_s = first_s - asked_s
        else:
            result.waited_s += arrived_s - asked_s
        result.checksum = extend_checksum(result.checksum, batch)
        trainer.step(batch)
        asked_s = time.monotonic()
    result.training_rate = spec.steps * spec.batch_size / (asked_s - first_s)
    del batches  # Ends the workers.
    result.loss_after = trainer.evaluate(held_out)
    return result


def measure_loader_alone(
    spec: RunSpec, dataset: SourceDataset, checksum: int, stop: Stop
) -> tuple[float, int]:
    """Load batches without a model, and read every batch, for its checksum.

    Returns:
        The samples per second, and the checksum over these batches too.
    """
    first_s = 0.0
    samples = 0
    for batch in itertools.islice(make_loader(spec, dataset), _LOADER_ALONE_BATCHES):
        stop.check()
        checksum = extend_checksum(checksum, batch)
        if first_s:  # The first batch pays for the start of the workers: not counted.
            samples += len(batch.lengths)
        else:
            first_s = time.monotonic()
    return samples / (time.monotonic() - first_s), checksum


def prepare(spec: RunSpec) -> tuple[SourceDataset, list[Batch], str]:
    """Read the sources.

    Returns:
        The dataset to train on, over a shared store with this project's loader and over a list with torch's;
        the held-out batches; and a description of what was read.
    """
    corpus = Corpus(library_folders(), spec.max_bytes)
    pieces = corpus.training_pieces()
    samples = list(pieces) if spec.loader == "torch" else shmloader.share(pieces)
    if len(samples) < 2 * spec.batch_size:
        raise SystemExit(
            f"the Python sources found gave {len(samples)} samples, fewer than two batches: "
            "raise --max-bytes or lower --batch-size"
        )
    held_out = [pad_batch(samples) for samples in _grouped(SourceDataset(corpus.held_out))]
    return SourceDataset(samples), held_out, str(corpus)


def _grouped(dataset: SourceDataset) -> Iterator[list[torch.Tensor]]:
    """Yield a dataset's samples in lists of a fixed size, for judging the model."""
    for start in range(0, len(dataset), _HELD_OUT_BATCH):
        stop = min(start + _HELD_OUT_BATCH, len(dataset))
        yield [dataset[index] for index in range(start, stop)]


def main(arguments: Sequence[str]) -> int:
    """Run one :class:`RunSpec` and write its :class:`RunResult`."""
    spec = RunSpec(**json.loads(arguments[0]))
    # Sums in the backward pass must come out in one order, or equal batches give unequal losses.
    torch.use_deterministic_algorithms(True)
    # One thread for the model leaves the other cores to the workers. On two cores a second thread
    # gains little, and beside other programs the two mostly wait for one another.
    torch.set_num_threads(1)
    dataset, held_out, corpus = prepare(spec)
    stop = Stop(spec.demo_pid)
    result = train(spec, dataset, held_out, stop)
    rate, checksum = measure_loader_alone(spec, dataset, result.checksum, stop)
    result = replace(result, corpus=corpus, loader_alone_rate=rate, checksum=checksum)
    Path(arguments[1]).write_text(json.dumps(asdict(result)), encoding="utf-8")
    return 0
