"""Little memory, /dev/shm, descriptors, address space: correct batches or an error with numbers."""

import os
import resource
import subprocess
import sys

import pytest
from loading import Growing, Numbered

import shmloader
from robustness.confined import FEW_DESCRIPTORS, NO_PROC, SMALL_SHM, memory_cgroup, works
from robustness.datasets import Dicts, first_indices
from robustness.processes import ENVIRONMENT, TESTS, descriptors, mappings, python
from shmloader import DataLoader

MIB = 1 << 20

FAST = (
    "loader/test_zero_copy.py",
    "slots/test_slots.py",
    "loader/test_lifecycle.py::test_batches_that_grow_a_hundred_thousandfold_are_exact",
    "loader/test_lifecycle.py::test_leaving_early_leaves_nothing",
)
"""A part of the suite that makes large batches, keeps batches and opens descriptors."""


def _suite(wrap: tuple[str, ...]) -> None:
    if not works(wrap):
        pytest.skip(f"{wrap[0]} is not possible here")
    command = [*wrap, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *[str(TESTS / name) for name in FAST]],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def test_a_part_of_the_suite_passes_with_a_small_dev_shm() -> None:
    _suite(SMALL_SHM)


def test_a_part_of_the_suite_passes_with_few_descriptors() -> None:
    _suite(FEW_DESCRIPTORS)


def test_batches_larger_than_dev_shm_are_exact() -> None:
    if not works(SMALL_SHM):
        pytest.skip("no mount namespaces here")
    printed = python(
        """
        import os, warnings
        import shmloader
        from loading import Growing, Numbered
        from robustness.datasets import first_indices
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 16 << 20
        warnings.simplefilter("ignore", shmloader.SpillWarning)
        loader = shmloader.DataLoader(Numbered(40, items=1 << 20), batch_size=4, num_workers=2)
        assert first_indices(loader) == list(range(0, 40, 4))
        print(loader.statistics().spills, os.listdir("/dev/shm"))
        """,
        wrap=SMALL_SHM,
    )
    spills, entries = printed.split(maxsplit=1)
    assert spills == "0"
    assert entries.strip() == "[]"


def test_a_loader_needs_no_proc() -> None:
    """Where it is not mounted, or hidden, torch's loader works too."""
    if not works(NO_PROC):
        pytest.skip("no mount namespaces here")
    printed = python(
        """
        import os
        import shmloader
        from loading import Numbered
        from robustness.datasets import first_indices
        assert os.listdir("/proc") == ["cpuinfo"]
        loader = shmloader.DataLoader(Numbered(40, items=1 << 18), 4, num_workers=2, persistent_workers=True)
        for _ in range(2):
            assert first_indices(loader) == list(range(0, 40, 4))
        print(loader.statistics().batches)
        """,
        wrap=NO_PROC,
    )
    assert printed.split() == ["20"]


def test_a_queue_without_proc_is_refused_and_leaves_nothing() -> None:
    if not works(NO_PROC):
        pytest.skip("no mount namespaces here")
    printed = python(
        """
        import os
        import shmloader
        before = os.dup(0)
        try:
            shmloader.Queue(4)
        except shmloader.LoaderError as error:
            print(os.dup(0) - before, error)
        """,
        wrap=NO_PROC,
    )
    assert printed.startswith("1 shmloader.Queue learns from /proc which processes have ended")


def test_thousands_of_retained_batches_of_a_hundred_tensors_keep_descriptors_and_mappings_flat() -> None:
    loader = DataLoader(Dicts(5000, leaves=100), batch_size=None, num_workers=2)
    kept, seen = [], []
    for batch in loader:
        kept.append(batch)
        if len(kept) % 500 == 0:
            seen.append((descriptors(), mappings()))
    assert len(kept) == 5000
    assert len({count for count, _ in seen}) == 1
    # Private memory for kept batches comes from arenas, not from a mapping per batch.
    assert max(count for _, count in seen) - seen[0][1] < 400
    for index in (0, 63, 64, 2500, 4999):
        assert kept[index]["leaf99"].tolist() == [index + 99] * 4
    del batch, kept


SCARCE = """
    import os, sys, warnings
    from pathlib import Path
    import shmloader
    from loading import Growing, Numbered
    from robustness.datasets import first_indices
    from robustness.datasets import GrowsAt
    from shmloader.memory.limits import memory_headroom

    limit_file, room_nbytes = Path(sys.argv[1]), int(sys.argv[2])
    loader = shmloader.DataLoader(
        GrowsAt(24, at=9, items=12 << 20), batch_size=None, num_workers=1, persistent_workers=True,
        memory_budget_nbytes=8 << 30,
    )
    iterator = iter(loader)
    assert [int(next(iterator)[0]) for _ in range(6)] == list(range(6))
    unlimited = limit_file.read_text()
    room = memory_headroom()
    limit_file.write_text(str(room.limit_nbytes - room.available_nbytes + room_nbytes))
    got, errors = [], []
    while True:
        try:
            got.append(int(next(iterator)[0]))
        except StopIteration:
            break
        except shmloader.SharedMemoryExhausted as error:
            errors.append(error)
    error, = errors
    assert isinstance(error, MemoryError)
    assert error.needed_nbytes >= 96 << 20, error
    assert error.available_nbytes < error.needed_nbytes, error
    assert f"{error.needed_nbytes:,}" in str(error) and f"{error.available_nbytes:,}" in str(error)
    assert "memory cgroup" in str(error)
    assert any("worker 0" in note and "9" in note for note in error.__notes__)
    assert got == [n for n in range(6, 24) if n != 9], got
    limit_file.write_text(unlimited)
    del iterator
    warnings.simplefilter("ignore", shmloader.SpillWarning)
    assert [int(sample[0]) for sample in loader] == list(range(24))
    loader.close()
    """


def test_a_worker_short_of_memory_says_so_with_numbers_and_goes_on() -> None:
    """The sample itself (96 MiB, made once and returned each time) fits; its slot does not."""
    with memory_cgroup(1500 * MIB) as cgroup:
        python(SCARCE, str(cgroup.folder / cgroup.limit_name), str(150 * MIB), wrap=cgroup.wrap)
        assert cgroup.oom_kills() == 0


def test_many_small_growths_are_measured_against_the_cgroup_too() -> None:
    code = """
        import sys
        import shmloader
        from shmloader.memory.limits import memory_headroom
        from shmloader.memory import Extent, Segment
        segment, number = Segment(), 0
        try:
            while True:
                segment.reserve(number, 0, 2 << 20)
                number += 1
        except shmloader.SharedMemoryExhausted as error:
            assert error.available_nbytes is not None
            print(number)
        """
    with memory_cgroup(500 * MIB) as cgroup:
        assert int(python(code, wrap=cgroup.wrap)) > 50
        assert cgroup.oom_kills() == 0


def test_a_cgroup_smaller_than_the_slots_has_fewer_batches_made_ahead_and_no_error() -> None:
    """34 slots of 16 MiB are wanted, in 700 MiB: the loader says once that it makes fewer."""
    code = """
        import warnings
        import shmloader
        from loading import Growing, Numbered
        from robustness.datasets import first_indices
        loader = shmloader.DataLoader(
            Numbered(400, items=1 << 19), batch_size=4, num_workers=2, prefetch_factor=16
        )
        most_nbytes = 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            iterator = iter(loader)
            for number in range(0, 400, 4):
                assert first_indices([next(iterator)]) == [number]
                most_nbytes = max(most_nbytes, loader.statistics().reserved_nbytes)
        warning, = [each for each in caught if each.category is shmloader.SpillWarning]
        assert "memory_budget_nbytes" in str(warning.message), warning
        assert 1 <= iterator.table.budget.most_tasks < 32, iterator.table.budget.most_tasks
        assert 100 << 20 < most_nbytes <= iterator.table.budget.nbytes, most_nbytes
        print(loader.statistics().spills)
        """
    with memory_cgroup(700 * MIB) as cgroup:
        # Only batches that were sent before the second one had shown the size.
        assert int(python(code, wrap=cgroup.wrap)) <= 33
        assert cgroup.oom_kills() == 0


def test_a_batch_that_a_cgroup_cannot_hold_is_an_error_with_both_numbers() -> None:
    code = """
        import shmloader
        from robustness.datasets import GrowsAt
        loader = shmloader.DataLoader(GrowsAt(24, at=9, items=20 << 20), batch_size=None, num_workers=1)
        got, errors, iterator = [], [], iter(loader)
        while True:
            try:
                got.append(int(next(iterator)[0]))
            except StopIteration:
                break
            except shmloader.SharedMemoryExhausted as error:
                errors.append(error)
        error, = errors
        assert error.needed_nbytes >= 160 << 20 and error.available_nbytes < error.needed_nbytes, error
        assert f"{error.needed_nbytes:,}" in str(error) and f"{error.available_nbytes:,}" in str(error)
        assert got == [number for number in range(24) if number != 9], got
        """
    with memory_cgroup(450 * MIB) as cgroup:
        python(code, wrap=cgroup.wrap)
        assert cgroup.oom_kills() == 0


def test_memory_that_becomes_short_has_fewer_batches_made_ahead() -> None:
    """The host refuses what the budget allows: the budget becomes what the host has."""
    code = """
        import sys, warnings
        from pathlib import Path
        import shmloader
        from loading import Growing
        from shmloader.memory.limits import memory_headroom

        limit_file = Path(sys.argv[1])
        sizes = [1000] * 20 + [2 << 20] * 60  # samples of 16 MiB from the twentieth on
        loader = shmloader.DataLoader(
            Growing(sizes), batch_size=None, num_workers=2, prefetch_factor=4, memory_budget_nbytes=8 << 30
        )
        iterator = iter(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [len(next(iterator)) for _ in range(2)] == sizes[:2]
            room = memory_headroom()
            limit_file.write_text(str(room.limit_nbytes - room.available_nbytes + (300 << 20)))
            budget_nbytes = iterator.table.budget.nbytes
            for number in range(2, 80):
                sample = next(iterator)
                assert len(sample) == sizes[number] and bool((sample == number).all())
        warning, = [each for each in caught if each.category is shmloader.SpillWarning]
        assert iterator.table.budget.nbytes < budget_nbytes
        assert iterator.table.budget.most_tasks < 8, iterator.table.budget.most_tasks
        """
    with memory_cgroup(1500 * MIB) as cgroup:
        python(code, str(cgroup.folder / cgroup.limit_name), wrap=cgroup.wrap)
        assert cgroup.oom_kills() == 0


def test_with_a_budget_there_are_fewer_slots_and_one_warning() -> None:
    with pytest.warns(shmloader.SpillWarning) as caught:
        loader = DataLoader(
            Numbered(400, items=1 << 17),
            batch_size=4,
            num_workers=2,
            prefetch_factor=8,
            memory_budget_nbytes=24 * MIB,
        )
        for batch in loader:
            assert first_indices([batch])
            assert loader.statistics().reserved_nbytes <= 24 * MIB
    assert len(caught) == 1
    # Those that were outstanding when the second batch showed the size: 16, and one sent for the first.
    assert loader.statistics().spills <= 17


LITTLE_ADDRESS_SPACE = """
    import resource, sys, warnings
    import shmloader
    from loading import Growing, Numbered
    from robustness.datasets import first_indices

    def shrink(worker_id):
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (40 << 20),) * 2)

    warnings.simplefilter("ignore", shmloader.SpillWarning)
    # 1 MiB a batch in 62 slots: mapping all of them takes what the worker has, and more.
    loader = shmloader.DataLoader(
        Numbered(600, items=1 << 15), batch_size=4, num_workers=1, prefetch_factor=60, worker_init_fn=shrink
    )
    iterator, got, errors = iter(loader), [], []
    for number in range(0, 600, 4):
        try:
            assert first_indices([next(iterator)]) == [number]
            got.append(number)
        except (RuntimeError, MemoryError) as error:
            assert not isinstance(error, shmloader.WorkerDied), error
            errors.append(number)
    assert next(iterator, None) is None
    print(len(got), len(errors))
    """


def test_a_worker_without_address_space_gives_exact_batches_and_errors_and_lives() -> None:
    got, errors = map(int, python(LITTLE_ADDRESS_SPACE).split())
    assert got >= 20
    assert got + errors == 150


def test_a_main_process_without_address_space_gets_an_error_with_numbers() -> None:
    code = """
        import resource
        import shmloader
        from loading import Growing, Numbered
        from robustness.datasets import first_indices
        loader = shmloader.DataLoader(
            Numbered(600, items=1 << 18), batch_size=4, num_workers=1, persistent_workers=True
        )
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        iterator = iter(loader)
        next(iterator)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (4 << 20), unlimited[1]))
        batch, kept = None, []
        try:
            for batch in iterator:
                kept.append(batch)
        except shmloader.SharedMemoryExhausted as error:
            assert error.needed_nbytes > 8 << 20, error
            assert "ulimit -v" in str(error), error
        else:
            raise AssertionError(len(kept))
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        taken = 1 + len(kept)
        kept.clear()
        assert first_indices(iterator) == list(range(4 * taken, 600, 4))
        del iterator, batch
        assert first_indices(loader) == list(range(0, 600, 4))
        loader.close()
        """
    python(code)


def test_a_limit_on_the_size_of_files_is_an_error_that_names_it() -> None:
    code = """
        import shmloader
        from loading import Growing, Numbered
        try:
            list(shmloader.DataLoader(Numbered(64), batch_size=4, num_workers=2))
        except shmloader.SharedMemoryExhausted as error:
            assert "ulimit -f" in str(error), error
            assert error.needed_nbytes > 0
        else:
            raise AssertionError
        """
    python(code, wrap=("prlimit", f"--fsize={100 * MIB}", "--"))


def test_too_few_descriptors_for_the_workers_leave_nothing() -> None:
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loader = DataLoader(Numbered(64), batch_size=4, num_workers=2)
    # With 8 spare ones it is os.fork's caller in the standard library that loses a pipe.
    for spare in range(2, 8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                next(iter(loader))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before
    assert first_indices(loader) == list(range(0, 64, 4))


def test_a_loader_goes_on_while_the_program_has_every_descriptor() -> None:
    """Batches grow from 8 KiB to 4 MiB: the main process then asks how much memory the host has."""
    sizes = [1 << power for power in range(10, 20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with DataLoader(Growing(sizes), num_workers=2) as loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        filled = [os.open(os.devnull, os.O_RDONLY) for _ in range(30)]  # no gap below the last
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1, hard))
        try:
            kept += iterator
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in filled:
                os.close(fd)
    assert [batch.shape for batch in kept] == [(1, size) for size in sizes]
    assert all((batch == index).all() for index, batch in enumerate(kept))


def test_a_worker_that_the_kernel_kills_for_memory_is_told_so_with_figures() -> None:
    code = """
        import shmloader
        from robustness.datasets import Eats

        loader = shmloader.DataLoader(Eats(200, at=41, nbytes=2 << 30), batch_size=4, num_workers=2)
        try:
            for batch in loader:
                pass
        except shmloader.WorkerDied as error:
            assert error.exit_code == -9, error
            assert "out-of-memory killer has ended 1 process" in str(error), error
            assert "The loader's slots have" in str(error), error
            assert f"of {500 << 20:,} bytes are available" in str(error), error
            assert [40, 41, 42, 43] in error.indices, error
        else:
            raise AssertionError
        """
    with memory_cgroup(500 * MIB) as cgroup:
        python(code, wrap=cgroup.wrap)
        assert cgroup.oom_kills() == 1
