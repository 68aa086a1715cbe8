"""A CUDA driver that does nothing, to measure the main process's own time with a device.

It is compiled here, and called as the real one is. Its calls are counted. Copies are not done, so batches on
the device hold anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from shmloader.device.driver import SIGNATURES, CudaDriver
from shmloader.exchange import delivery

_ANSWERS = {
    "cuDriverGetVersion": "*(int *)a = 13000;",
    "cuDeviceGetCount": "*(int *)a = 1;",
    "cuDeviceGet": "*(int *)a = 0;",
    "cuDevicePrimaryCtxGetState": "*(int *)c = 1;",
    "cuDevicePrimaryCtxRetain": "*(long *)a = 1;",
    "cuCtxGetCurrent": "*(long *)a = 1;",
    "cuEventCreate": "*(long *)a = calls;",
    "cuStreamCreate": "*(long *)a = 2;",
    "cuStreamIsCapturing": "*(int *)b = 0;",
}
"""What functions write through their parameters, which are a, b, c and d; all return success."""


class IdleDriver(CudaDriver):
    """The calls as they are made, to a library that does nothing; "device memory" is the host's."""

    def current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        """Memory of the host, from its allocator."""
        return torch.empty(shape, dtype=dtype)

    def use_on_current_stream(self, tensor: torch.Tensor) -> None:
        """Do nothing: there is one stream."""

    def calls(self) -> int:
        """The number of calls so far."""
        return ctypes.c_long.in_dll(self._library, "calls").value

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        super().__init__(path)


def _never() -> bool:
    return False  # quicker than a mock, since it is asked for each batch


def _stay(batch: torch.Tensor, _: torch.device) -> torch.Tensor:
    return batch


@contextlib.contextmanager
def idle_device() -> Iterator[IdleDriver]:
    """Have torch and the loaders of this process see one device, of an `IdleDriver`.

    Raises `RuntimeError` if there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("a driver that does nothing cannot be made: there is no C compiler (cc)")
    body = "".join(
        f"int {name}(void *a, void *b, void *c, void *d) {{ calls++; {_ANSWERS.get(name, '')} return 0; }}\n"
        for name in SIGNATURES
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        source, library = Path(folder) / "driver.c", Path(folder) / "driver.so"
        source.write_text("long calls;\n" + body)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        for owner, name, value in (
            (torch.cuda, "is_available", True),
            (torch.cuda, "device_count", 1),
            (torch.cuda, "current_device", 0),
            (torch.accelerator, "is_available", True),
            (torch.accelerator, "current_accelerator", torch.device("cuda")),
            (torch.accelerator, "current_device_index", 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, return_value=value))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", _never))
        numbers = itertools.count(3)
        streams = mock.Mock(side_effect=lambda *_, **__: mock.Mock(cuda_stream=next(numbers)))
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", streams))
        driver = IdleDriver(str(library))
        stack.enter_context(mock.patch.object(delivery, "open_driver", return_value=driver))
        # A batch that comes with a report moves itself.
        stack.enter_context(mock.patch.object(delivery, "to_device", _stay))
        yield driver
