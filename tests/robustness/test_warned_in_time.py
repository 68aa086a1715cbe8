"""A program whose workers each come to hold its Python objects is warned before memory is short."""

from __future__ import annotations

import pytest

from robustness.confined import memory_cgroup
from robustness.processes import python

MIB = 1 << 20

PROGRAM = """
import sys, time, warnings
import shmloader
from robustness.datasets import Records
from shmloader.memory.limits import memory_headroom

seen = []

def show(message, category, *_):
    assert category is shmloader.NotSharedWarning
    room = memory_headroom()
    seen.append((batches, room.limit_nbytes - room.available_nbytes, str(message)))

batches = 0
dataset = Records()
warnings.simplefilter("ignore", UserWarning)
warnings.simplefilter("always", shmloader.NotSharedWarning)
warnings.showwarning = show
method, workers = sys.argv[1:]
loader = shmloader.DataLoader(
    dataset, 500, shuffle=True, num_workers=int(workers), multiprocessing_context=method
)
for batch in loader:
    batches += 1
    time.sleep(0.01)
    if seen:
        break
(at, nbytes, text), = seen
print(at, nbytes)
print(text)
loader.close()
"""


def test_what_forked_workers_copy_is_warned_of_in_the_epoch_before_half_of_the_limit_is_used() -> None:
    """With all copied the workers would need more than there is: the kernel would end one of them."""
    with memory_cgroup(1700 * MIB) as cgroup:
        printed = python(PROGRAM, "fork", "8", wrap=cgroup.wrap)
        assert cgroup.oom_kills() == 0
    numbers, text = printed.split("\n", 1)
    at, nbytes = map(int, numbers.split())
    assert 0 < at < 1200
    assert nbytes < 850 * MIB
    assert "has copied up to" in text
    assert "Records.samples, of type list" in text
    assert "DataLoader(..., share_dataset=True)" in text


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_started_workers_that_rebuild_the_objects_are_warned_of_at_the_start(method: str) -> None:
    printed = python(PROGRAM, method, "1")
    numbers, text = printed.split("\n", 1)
    assert numbers.startswith("0 ")
    assert "each of 1 workers rebuilds the dataset's Python objects from a pickle of" in text
    assert "Records.samples, of type list" in text
    assert "DataLoader(..., share_dataset=True)" in text


def test_the_error_for_a_worker_that_ran_out_of_memory_names_the_owner_and_each_process() -> None:
    program = """
        import warnings
        import shmloader
        from robustness.datasets import Eats

        class Labelled(Eats):
            def __init__(self):
                super().__init__(200, at=41, nbytes=2 << 30)
                self.labels = [{"number": number + 1000, "text": str(number)} for number in range(300_000)]

        warnings.simplefilter("ignore")
        try:
            list(shmloader.DataLoader(Labelled(), batch_size=4, num_workers=2))
        except shmloader.WorkerDied as error:
            print(error)
        """
    with memory_cgroup(700 * MIB) as cgroup:
        printed = python(program, wrap=cgroup.wrap)
    owner, cure = printed.index("Labelled.labels, of type list"), printed.index("share_dataset=True")
    assert owner < cure < printed.index("Or use fewer workers")
    assert "Processes now: this one (pid " in printed
    assert "worker 0 (pid " in printed
