"""One loader's part of the demo, in a process of its own, so that memory figures do not mix.

``python -m shmloader.cli.demo SPEC RESULT`` runs a `RunSpec`, given as JSON, and writes its `RunResult` to a
file.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import zlib
from collections.abc import Iterable, Sequence
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
    """Settings of one run; all but ``loader`` is the same for both loaders."""

    loader: str  # "torch" or "shmloader"
    steps: int  # of training
    batch_size: int
    workers: int
    start_method: str  # of ``multiprocessing``
    max_bytes: int  # of source text
    demo_pid: int  # the process that has started this one


@dataclass
class RunResult:
    """Figures of one run."""

    corpus: str = ""  # what was read, for people
    first_batch_s: float = 0.0  # from ``iter(loader)`` on, starting the workers included
    waited_s: float = 0.0  # that the training loop waited for the batches after the first
    training_rate: float = 0.0  # samples per second of training, after the first batch
    loader_alone_rate: float = 0.0  # samples per second without a model, after the first batch
    loss_before: float = 0.0  # on held-out samples before training, in nats per byte
    loss_after: float = 0.0
    checksum: int = 0  # CRC-32 over all bytes of all batches, in order
    peak_nbytes: int = 0  # most PSS of all its processes together, read by the demo; 0 if unknown


class Stop:
    """The end of this process between two batches: on SIGTERM, or when the demo that started it is gone.

    Raising at once might interrupt torch's loader while it starts its workers, which it would report.
    """

    def __init__(self, demo_pid: int) -> None:
        self._demo_pid = demo_pid
        self._own_pid = os.getpid()
        self._is_asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        if os.getpid() != self._own_pid:  # a forked worker, which ends on it as before
            os._exit(INTERRUPTED)
        self._is_asked = True

    def check(self) -> None:
        """Raise `SystemExit` if this process should end."""
        if self._is_asked or os.getppid() != self._demo_pid:
            raise SystemExit(INTERRUPTED)


def make_loader(spec: RunSpec, dataset: SourceDataset) -> Iterable[Batch]:
    """The loader under comparison: one class or the other, with the same arguments."""
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


def extend_checksum(checksum: int, batch: Batch) -> int:
    """The CRC-32 with all bytes of a batch added."""
    checksum = zlib.crc32(batch.lengths.numpy().data, checksum)
    return zlib.crc32(batch.tokens.numpy().data, checksum)


def with_progress_bar(steps: int, label: str) -> Iterable[int]:
    """The numbers of steps, with tqdm's bar if tqdm is installed and standard error is a terminal."""
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
    batches = itertools.chain.from_iterable(itertools.repeat(make_loader(spec, dataset)))
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
    """The samples per second without a model, and the checksum over these batches too: each is read."""
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
    """The dataset to train on, the held-out batches, and a description of what was read.

    With this project's loader the dataset is over a shared store, with torch's over a list.
    """
    corpus = Corpus(library_folders(), spec.max_bytes)
    pieces = corpus.training_pieces()
    samples = list(pieces) if spec.loader == "torch" else shmloader.share(pieces)
    if len(samples) < 2 * spec.batch_size:
        raise SystemExit(
            f"the Python sources found gave {len(samples)} samples, fewer than two batches: "
            "raise --max-bytes or lower --batch-size"
        )
    held_out = SourceDataset(corpus.held_out)
    numbers = range(len(held_out))
    parts = [numbers[begin : begin + _HELD_OUT_BATCH] for begin in numbers[::_HELD_OUT_BATCH]]
    batches = [pad_batch([held_out[number] for number in part]) for part in parts]
    return SourceDataset(samples), batches, str(corpus)


def main(arguments: Sequence[str]) -> int:
    """Run one `RunSpec` and write its `RunResult`."""
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
