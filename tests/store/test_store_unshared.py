"""Forked workers that copy a list by reading it cause one warning, with the line of code that helps."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from caught_warnings import caught_warnings

from shmloader import DataLoader, NotSharedWarning, share
from shmloader.store import unshared
from shmloader.store.unshared import CopyWatch, largest_unshared

FORK = multiprocessing.get_context("fork")


class Dataset:
    def __init__(self, samples: Any) -> None:
        self.size = (224, 224)
        self.images = {"samples": samples, "names": ["a", "b"]}
        self.array = np.zeros(1 << 20)


def make() -> list[dict[str, Any]]:
    return [{"path": f"folder/image-{number}.jpeg", "label": number + 1000} for number in range(200_000)]


def read(dataset: Dataset, pipe: Connection) -> None:
    pipe.recv()
    total = sum(sample["label"] for sample in dataset.images["samples"])
    pipe.send(total)
    pipe.recv()


def warned(dataset: Dataset) -> list[str]:
    """Read all samples in a forked worker, and return the warnings of two checks."""
    watch = CopyWatch(dataset)
    ours, theirs = FORK.Pipe()
    worker = FORK.Process(target=read, args=(dataset, theirs))
    worker.start()
    try:
        watch.started([worker])
        ours.send("read")
        ours.recv()
        said = [watch.ended([worker]) for _ in range(2)]
    finally:
        ours.send("end")
        worker.join()
        worker.close()
        ours.close()
        theirs.close()
    return list(filter(None, said))


def test_a_list_that_a_worker_copies_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unshared, "LEAST_NBYTES", 16 << 20)
    (text,) = warned(Dataset(make()))
    assert "Dataset.images['samples'] has about" in text
    assert "DataLoader(..., share_dataset=True)" in text


def test_a_store_in_its_place_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unshared, "LEAST_NBYTES", 16 << 20)
    assert warned(Dataset(share(make()))) == []
    assert largest_unshared(Dataset(share(make()))) is None


def test_small_containers_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CopyWatch(Dataset(make()[:1000]))
    assert watch.unshared is None
    monkeypatch.setattr(unshared, "private_nbytes", None)  # nothing is read for them
    watch.started([multiprocessing.current_process()])
    watch.ended([multiprocessing.current_process()])


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = make()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return self.rows[index]["label"]


def test_the_loader_warns_once_at_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unshared, "LEAST_NBYTES", 16 << 20)
    loader = DataLoader(Rows(), batch_size=2000, num_workers=1, multiprocessing_context="fork")
    with caught_warnings() as said:
        assert sum(len(batch) for batch in loader) == 200_000
        assert sum(len(batch) for batch in loader) == 200_000
    (warning,) = said
    assert warning.category is NotSharedWarning
    assert re.search(r"Rows\.rows has about .*share_dataset=True", str(warning.message))
    assert warning.filename == __file__
    with (
        DataLoader(
            Rows(), batch_size=2000, num_workers=2, multiprocessing_context="fork", share_dataset=True
        ) as shared,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", NotSharedWarning)
        assert sum(len(batch) for batch in shared) == 200_000
