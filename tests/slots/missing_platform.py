"""A program on a platform that lacks or refuses what slots need: run as ``missing_platform.py WHAT METHOD``.

Under spawn its workers read this file too, so they lack the same.
"""

import ctypes
import errno
import mmap
import os
import sys
from typing import Any

WHAT = sys.argv[1]


class _NoLibc(ctypes.CDLL):
    def __init__(self, name: Any, *arguments: Any, **options: Any) -> None:
        if name is None:
            raise OSError("no libc in a test")
        super().__init__(name, *arguments, **options)


def refuse(name: str, code: int) -> None:
    """Make a function of ``os`` raise the error of a sandbox."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    setattr(os, name, refused)


REFUSED = {
    "memfd refused": ("memfd_create", errno.ENOSYS),
    "posix_fallocate refused": ("posix_fallocate", errno.EPERM),
    "eventfd refused": ("eventfd", errno.ENOSYS),
}

if WHAT in REFUSED:
    refuse(*REFUSED[WHAT])
elif WHAT == "memfd":
    del os.memfd_create
elif WHAT == "eventfd":
    del os.eventfd
elif WHAT == "libc":
    ctypes.CDLL = _NoLibc  # type: ignore[misc]
elif WHAT == "windows":  # as far as shared memory is concerned
    del os.memfd_create, os.posix_fallocate
    ctypes.CDLL = _NoLibc  # type: ignore[misc]

import warnings  # noqa: E402

import psutil  # noqa: E402, F401
import torch  # noqa: E402

if WHAT == "windows":  # after these imports, which check for Windows by its name
    sys.modules["fcntl"] = sys.modules["resource"] = None  # type: ignore[assignment]
    for name in ("MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_ANON", "PROT_READ", "PROT_WRITE"):
        delattr(mmap, name)

import shmloader  # noqa: E402


class Pairs(torch.utils.data.Dataset):
    """A row of numbers, drawn numbers and a word for each index."""

    def __len__(self) -> int:
        return 50

    def worker_setup(self, info: Any) -> None:
        """Without effect where torch's own workers load."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        return torch.full((3, 4), index), torch.rand(5), str(index)


def epochs(build: Any, **options: Any) -> list[Any]:
    """Two epochs of batches, drawn from the same seeds."""
    torch.manual_seed(0)
    loader = build(Pairs(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, **options)
    return [batch for _ in range(2) for batch in loader]


def shared(data: Any) -> str:
    """The error of `shmloader.share`, or that there is none."""
    try:
        assert list(shmloader.share(data)) == data
    except shmloader.LoaderError as error:
        return str(error)
    return "shared"


def main() -> None:
    method = sys.argv[2]
    expected = epochs(torch.utils.data.DataLoader, multiprocessing_context="fork")  # which starts soonest
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = epochs(shmloader.DataLoader, multiprocessing_context=method, on_error="skip", worker_restarts=2)
    assert len(got) == len(expected) == 26
    for ours, theirs in zip(got, expected, strict=True):
        assert all(map(torch.equal, ours[:2], theirs[:2]))
        assert ours[2] == theirs[2]
    (warning,) = [each for each in caught if "shmloader" in str(each.message)]
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__, warning.filename

    loader = shmloader.DataLoader(Pairs(), num_workers=1, persistent_workers=True)
    with warnings.catch_warnings(), loader:
        warnings.simplefilter("ignore")
        processes = iter(loader)._workers
        assert processes[0].is_alive()
    assert not processes[0].is_alive()
    assert len(list(shmloader.DataLoader(Pairs(), batch_size=5))) == 10
    assert loader.statistics().torchs_way
    print(warning.message)
    print(loader.statistics())
    print(shared([{"row": number} for number in range(5)]))


if __name__ == "__main__":
    main()
