"""Workers have names in ``ps`` and ``top``, under every start method and as threads."""

import contextlib
import os
import threading
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from shmloader import DataLoader


def _names() -> list[str]:
    """The names of all threads of this process, by Linux, with that of the calling thread first."""
    folder = Path(f"/proc/{os.getpid()}/task")
    own = str(threading.get_native_id())
    threads = sorted((one.name for one in folder.iterdir()), key=lambda number: number != own)
    found = []
    for number in threads:
        with contextlib.suppress(OSError):  # a thread that has ended
            found.append((folder / number / "comm").read_text().rstrip("\n"))
    return found


class Pictures(Dataset):
    """Each sample is the names of all threads of the worker's process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[str]:
        return _names()


class PicturesOfAVeryLongName(Pictures):
    """Its name does not fit."""


class Bilderfüür(Pictures):  # noqa: PLC2401 - its last letters are two bytes, of which one would fit
    """Its name does not fit."""


def _as_it_is(samples: list[list[str]]) -> list[list[str]]:
    return samples


def _first_batches(dataset: Pictures, **options: object) -> list[list[str]]:
    with DataLoader(dataset, 1, num_workers=2, collate_fn=_as_it_is, **options) as loader:
        return [batch[0] for batch in loader][:2]


def test_a_process_has_its_number_and_its_dataset(start_method: str) -> None:
    first, second = _first_batches(Pictures(), multiprocessing_context=start_method)
    assert (first[0], second[0]) == ("shm0:Pictures", "shm1:Pictures")
    assert "shm0" in first[1:], "the thread that watches the main process has the first name"


@pytest.mark.parametrize(
    ("kind", "name"), [(PicturesOfAVeryLongName, "shm0:PicturesOf"), (Bilderfüür, "shm0:Bilderfü")]
)
def test_a_long_name_is_cut_between_characters(kind: type[Pictures], name: str) -> None:
    assert _first_batches(kind())[0][0] == name
    assert len(name.encode()) <= 15


def test_the_process_table_shows_the_name_to_others() -> None:
    with DataLoader(Pictures(), 1, num_workers=2, collate_fn=_as_it_is) as loader:
        batches = iter(loader)
        next(batches)
        seen = [Path(f"/proc/{worker.pid}/comm").read_text() for worker in batches._workers]
    assert seen[0] == "shm0:Pictures\n"


def test_threads_have_names_and_the_program_keeps_its_own() -> None:
    before = _names()[0]
    first, second = _first_batches(Pictures(), worker_type="thread")
    assert (first[0], second[0]) == ("shm0:Pictures", "shm1:Pictures")
    assert _names()[0] == before == Path("/proc/self/comm").read_text().rstrip("\n")
