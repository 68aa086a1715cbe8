"""Forked workers of a main process with threads, and locks held by them, start every time."""

import threading

from robustness.processes import LONG, python

PROGRAM = """
    import io, logging, sys, threading
    import pyarrow, pyarrow.compute
    import torch
    from robustness.datasets import Logs, first_indices
    from shmloader import DataLoader

    loaders = int(sys.argv[1])
    torch.randn(512, 512) @ torch.randn(512, 512)  # starts OpenMP's threads
    column = pyarrow.chunked_array([pyarrow.array(range(100_000))] * 8)
    assert pyarrow.compute.sum(column).as_py() > 0  # and Arrow's
    assert pyarrow.table({"a": column}).group_by("a").aggregate([("a", "count")]).num_rows == 100_000

    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(handler)
    holding, done = threading.Event(), threading.Event()

    def hold_a_logging_lock():  # not the module's own, for which fork itself waits
        with handler.lock:
            holding.set()
            done.wait()

    def run():
        while not done.is_set():
            torch.ones(64).sum()  # also allocates

    threads = [threading.Thread(target=hold_a_logging_lock), threading.Thread(target=run)]
    for thread in threads:
        thread.start()
    holding.wait()
    active = threading.active_count()
    for number in range(loaders):
        loader = DataLoader(Logs(16), batch_size=4, num_workers=2, timeout=60)
        assert first_indices(loader) == [0, 4, 8, 12]
        assert threading.active_count() == active
    done.set()
    for thread in threads:
        thread.join()
    print("no hang")
    """


def test_loaders_start_while_threads_run_and_hold_locks() -> None:
    assert python(PROGRAM, "100" if LONG else "15", timeout_s=240) == "no hang\n"


def test_the_loader_starts_no_thread_whatever_it_does() -> None:
    from loading import Numbered

    from shmloader import DataLoader

    before = threading.active_count()
    with DataLoader(Numbered(64), batch_size=4, num_workers=2, persistent_workers=True) as loader:
        for _ in range(2):
            for _batch in loader:
                assert threading.active_count() == before
        loader.statistics()
        assert threading.active_count() == before
    assert threading.active_count() == before
