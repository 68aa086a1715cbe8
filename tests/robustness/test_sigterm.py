"""SIGTERM to the process group, as Slurm sends it: workers go on until the program has saved its state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from warm_python import warm_python

from robustness.processes import ENVIRONMENT, wait_gone, workers_of

PROGRAM = """
    import json, os, signal, sys
    from pathlib import Path
    from loading import Numbered
    from shmloader import DataLoader

    STEP = 10  # batches between two places at which a checkpoint is possible

    def main():
        method, handles, path = sys.argv[1:]
        os.setsid()  # a process group of its own
        asked = []
        if handles != "does not":
            signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        data = Numbered(40_000, items=1, delay_s=0.002)
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
        seen = []
        if (path := Path(path)).exists():
            checkpoint = json.loads(path.read_text())
            seen = checkpoint["seen"]
            loader.load_state_dict(checkpoint["loader"])
        begun = len(seen)
        for number, batch in enumerate(loader, len(seen)):
            seen.append(batch[0, 0].item())
            if number == 5:
                print("ready", os.getpid(), flush=True)
            if len(seen) % STEP == 0 and (asked or (begun and len(seen) == begun + 50)):
                path.write_text(json.dumps({"loader": loader.state_dict(), "seen": seen}))
                print("saved", len(seen), flush=True)
                return

    if __name__ == "__main__":
        main()
    """


def start(method: str, handles: str, path: Path, grace_s: str = "") -> subprocess.Popen[str]:
    command = [*warm_python(), "-c", textwrap.dedent(PROGRAM), method, handles, str(path)]
    environment = ENVIRONMENT | {"SHMLOADER_SIGTERM_GRACE_S": grace_s}
    ends = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=environment, text=True, **ends)


def family_of(program: subprocess.Popen[str]) -> tuple[int, list[psutil.Process]]:
    """The program's pid, and its workers, as soon as it has batches."""
    assert program.stdout is not None
    word, _, pid = program.stdout.readline().partition(" ")
    assert word == "ready", program.communicate()
    family = workers_of(int(pid))
    assert len(family) >= 2
    return int(pid), family


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_go_on_until_the_program_has_saved_its_state(method: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    program = start(method, "handles", path)
    pid, family = family_of(program)
    for _ in range(3):  # some senders do it again
        os.killpg(pid, signal.SIGTERM)
    out, error = program.communicate(timeout=60)
    assert (program.returncode, error) == (0, "")
    word, _, saved = out.partition(" ")
    assert word == "saved", out
    assert not wait_gone(family, 30)[1]
    program = start(method, "handles", path)
    out, error = program.communicate(timeout=60)
    assert (program.returncode, error) == (0, ""), out
    seen = json.loads(path.read_text())["seen"]
    assert seen == list(range(0, 4 * len(seen), 4))
    assert len(seen) == int(saved) + 50


def test_workers_end_after_the_grace(tmp_path: Path) -> None:
    """The signal went to them alone. The program ends when the first of them does, and says how."""
    program = start("fork", "all", tmp_path / "checkpoint.json", "1")
    _, family = family_of(program)
    began_s = time.monotonic()
    for worker in family:
        worker.terminate()
    _, error = program.communicate(timeout=60)
    assert "exited with code 143" in error
    assert time.monotonic() - began_s > 0.9
    assert not wait_gone(family, 30)[1]


def test_without_a_handler_all_end_at_once(tmp_path: Path) -> None:
    program = start("fork", "does not", tmp_path / "checkpoint.json")
    _, family = family_of(program)
    family[0].terminate()
    _, error = program.communicate(timeout=60)
    assert "killed by signal: Terminated" in error
    assert not wait_gone(family, 30)[1]


def test_the_main_process_still_ends_a_worker_that_hangs(tmp_path: Path) -> None:
    """Seconds for two workers that would go on for two minutes."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        import torch
        from loading import Numbered

        from shmloader import DataLoader
        from shmloader.torch_private import worker_pids

        assert torch.get_num_threads()
        loader = DataLoader(Numbered(8, delay_s=60.0), num_workers=2)
        iterator = iter(loader)
        family = [psutil.Process(pid) for pid in worker_pids(iterator)]
        time.sleep(0.3)  # they are past their start
        began_s = time.monotonic()
        iterator._all_workers.close(grace_s=0.0)
        assert time.monotonic() - began_s < 30
        assert not wait_gone(family, 30)[1]
        loader.close()
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_program_that_the_dataset_starts_has_the_default(tmp_path: Path) -> None:
    """It is not ignored there: subprocess.Popen.terminate() ends it."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        from robustness.datasets import Subprocesses
        from shmloader import DataLoader

        (code,) = DataLoader(Subprocesses(), batch_size=1, num_workers=1)
        assert code.item() == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_grace_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from loading import Numbered

    from shmloader import DataLoader

    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        monkeypatch.setenv("SHMLOADER_SIGTERM_GRACE_S", "long")
        with pytest.raises(
            ValueError, match="SHMLOADER_SIGTERM_GRACE_S must be a number of seconds, not 'long'"
        ):
            iter(DataLoader(Numbered(8), num_workers=2))
    finally:
        signal.signal(signal.SIGTERM, handler)
