"""A loader on a platform that lacks or refuses what slots need loads as torch's does, and says so once."""

import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

PROGRAM = Path(__file__).parent / "missing_platform.py"
MISSING = {
    "memfd": "Python's os.memfd_create is missing",
    "libc": "the C library cannot be called (ctypes.CDLL(None): no libc in a test)",
    "windows": "Python's os.memfd_create is missing",
    "eventfd": "Python's os.eventfd is missing",
    "memfd refused": "the system refuses os.memfd_create (Function not implemented)",
    "posix_fallocate refused": "the system refuses os.posix_fallocate (Operation not permitted)",
    "eventfd refused": "the system refuses os.eventfd (Function not implemented)",
}
NEEDS_NO_EVENTFD = ("eventfd", "eventfd refused")


SPAWN = pytest.param("spawn", marks=pytest.mark.long)  # such a worker imports torch anew


@pytest.mark.parametrize("method", ["fork", SPAWN])
@pytest.mark.parametrize("what", MISSING)
def test_without_it_batches_are_torchs_and_one_warning_names_it(what: str, method: str) -> None:
    result = subprocess.run(
        [*warm_python(), PROGRAM, what, method], capture_output=True, text=True, check=False, timeout=250
    )
    assert result.returncode == 0, result.stderr
    warning, statistics, shared = result.stdout.splitlines()
    assert f"is not available on this platform: {MISSING[what]}. The loader loads as torch's" in warning
    assert "Without effect: worker_restarts=2, on_error='skip', the dataset's worker_setup()." in warning
    assert statistics == (
        "Torch's own iterator loads the batches here, and nothing is counted. A RuntimeWarning says why, "
        "once in each process."
    )
    if what in NEEDS_NO_EVENTFD:
        assert shared == "shared"
    else:
        assert shared.startswith(f"data cannot be put in shared memory on this platform: {MISSING[what]}. ")
        assert "without share(), share_on_host() or open()" in shared


NO_DESCRIPTOR = """
import errno, os, sys
import shmloader
from shmloader.memory import why_unavailable

name = sys.argv[1]

def fail(code):
    def failing(*_):
        raise OSError(code, os.strerror(code))
    setattr(os, name, failing)

before = os.listdir("/proc/self/fd")
for code in (errno.EMFILE, errno.ENFILE):
    fail(code)
    assert why_unavailable() is None
fail(errno.ENOSYS)
assert why_unavailable() == f"the system refuses os.{name} (Function not implemented)", why_unavailable()
assert os.listdir("/proc/self/fd") == before
"""


@pytest.mark.parametrize("name", ["memfd_create", "eventfd"])
def test_where_descriptors_are_short_nothing_is_refused_and_it_is_tried_again(name: str) -> None:
    subprocess.run([*warm_python(), "-c", NO_DESCRIPTOR, name], check=True, timeout=120)


REFUSED = """
import errno, os, sys
import shmloader

def failing(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

setattr(os, sys.argv[1], failing)
loader = shmloader.DataLoader([1, 2])
for call in (lambda: shmloader.Queue(2), lambda: shmloader.serve(loader, "refused", epochs=1)):
    try:
        call()
    except shmloader.LoaderError as error:
        print(error)
"""


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_what_has_no_other_way_without_it_says_so(name: str) -> None:
    why = f"on this platform: the system refuses os.{name} (Function not implemented)"
    command = [*warm_python(), "-c", REFUSED, name]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.splitlines() == [
        f"shmloader.Queue cannot be used {why}. Use multiprocessing.Queue",
        f"a loader cannot be served {why}. Make one in each process",
    ]
