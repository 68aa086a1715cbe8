"""``python -m shmloader memory`` over real programs: what it says, and that the program stays as it is."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from robustness.confined import SMALL_SHM, works

from shmloader.cli import memory
from shmloader.memory.process_memory import read_memory

pytestmark = pytest.mark.skipif("Pss" not in read_memory(os.getpid()), reason="there is no smaps_rollup")

COMMAND = [sys.executable, "-m", "shmloader", "memory", "--every", "0.3"]
LIMIT_S = 120

TRAIN = """
import sys, time
import torch.utils.data

class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.samples = [{"path": f"folder/image-{number}.jpeg", "label": number} for number in range(200_000)]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        return len(self.samples[index]["path"])

if __name__ == "__main__":
    train = Images()
    loader = torch.utils.data.DataLoader(
        train, 256, shuffle=True, num_workers=1, multiprocessing_context=sys.argv[1], persistent_workers=True
    )
    while True:
        for batch in loader:
            time.sleep(0.002)
"""


def run(words: list[str], **arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, **arguments)  # type: ignore[call-overload,no-any-return]


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fork", "towards the "),
        ("spawn", "each worker of train is sent, and rebuilds, the "),
        ("forkserver", "each worker of train is sent, and rebuilds, the "),
    ],
)
def test_growth_cause_and_cure_are_named(tmp_path: Path, method: str, said: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    report, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    words = [*COMMAND, "--json", str(report), "--picture", str(picture), "--"]
    environment = os.environ | {"MPLCONFIGDIR": str(tmp_path)}
    # A /dev/shm of its own: torch's loader, ended while it starts, may leave a semaphore behind.
    wrap = SMALL_SHM if works(SMALL_SHM) else ()
    with subprocess.Popen(
        [*wrap, *words, sys.executable, str(tmp_path / "train.py"), method],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as command:
        assert command.stderr is not None
        line = next(line for line in command.stderr if line.startswith("shmloader memory: "))
        children = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGTERM)
        end = command.stderr.read()
        said_before_growth = [
            one for one in (line, *end.splitlines()) if "rebuilds" in one and "(" not in one
        ]
    assert said in line
    assert len([one for one in said_before_growth if one.startswith("shmloader memory: ")]) <= 1
    assert "MB of `train.samples`" in line
    assert line.endswith("Cure: train.samples = shmloader.share(train.samples)\n")
    assert command.returncode == 128 + signal.SIGTERM
    assert "at its peak" in end
    answer = json.loads(report.read_text(encoding="utf-8"))
    assert "shmloader.share(train.samples)" in answer["findings"][0]["text"]
    assert answer["readings"][-1]["processes"][0]["private_nbytes"] > 1 << 20
    assert picture.read_bytes().startswith(b"\x89PNG")
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_the_programs_output_and_exit_status_are_its_own() -> None:
    code = "import sys; print('out'); print(sys.stdin.read(), end=''); sys.exit(7)"
    done = run([*COMMAND, "--", sys.executable, "-c", code], input="in\n")
    assert (done.stdout, done.returncode) == ("out\nin\n", 7)


@pytest.mark.parametrize("separator", [["--"], []])
def test_options_after_the_command_are_the_programs(separator: list[str]) -> None:
    code = "import sys; print(sys.argv[1:])"
    done = run([*COMMAND, *separator, sys.executable, "-c", code, "--pid", "1", "--", "--json"])
    assert done.stdout == "['--pid', '1', '--', '--json']\n"


def test_a_program_that_cannot_be_started_gives_the_shells_status(tmp_path: Path) -> None:
    assert memory.main(["--", str(tmp_path / "none")]) == 127
    (tmp_path / "text").write_text("text", encoding="utf-8")
    assert memory.main(["--", str(tmp_path / "text")]) == 126


HANDLES = """
import signal, sys, time
def handle(number, _):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGINT: sys.exit(5)
for number in (signal.SIGINT, signal.SIGUSR1): signal.signal(number, handle)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


def test_signals_to_the_command_reach_the_program_once() -> None:
    with subprocess.Popen(
        [*COMMAND, "--", sys.executable, "-c", HANDLES],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # without a terminal, which would send Ctrl-C to both
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        command.send_signal(signal.SIGUSR1)
        assert command.stdout.readline() == "SIGUSR1\n"
        command.send_signal(signal.SIGINT)
        assert command.stdout.read() == "SIGINT\n"
    assert command.returncode == 5


def in_terminal(words: list[str], react: Callable[[str, int], bool], columns: int = 80) -> tuple[str, int]:
    """Runs a command as the foreground job of a terminal of its own; what it printed, and how it ended."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"] = str(columns)
        os.execv(words[0], words)
    text, reacted = "", False
    while True:
        try:
            part = os.read(fd, 65536)
        except OSError:  # it has ended
            break
        text += part.decode(errors="replace")
        reacted = reacted or react(text, fd)
    os.close(fd)
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_ctrl_c_reaches_the_program_once_and_ends_both() -> None:
    def interrupt(text: str, fd: int) -> bool:
        return "ready" in text and os.write(fd, b"\x03") == 1

    text, status = in_terminal([*COMMAND, "--", sys.executable, "-c", HANDLES], interrupt)
    assert text.count("SIGINT") == 1
    assert status == 5
    assert "at its peak" in text
    assert "Traceback" not in text


def test_a_process_that_runs_is_followed_by_its_id_until_ctrl_c() -> None:
    pytest.importorskip("rich")
    with subprocess.Popen([sys.executable, "-c", HANDLES], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()

        def interrupt(text: str, fd: int) -> bool:
            return "together:" in text and os.write(fd, b"\x03") == 1

        text, status = in_terminal([*COMMAND, "--pid", str(program.pid)], interrupt, columns=40)
        alive = program.poll() is None
        program.kill()
    assert alive
    assert status == 0
    assert "\x1b[" in text  # the live view
    assert f"{program.pid}" in text
    assert "Traceback" not in text


CLEANS_UP = """
import os, pathlib, shutil, sys
shutil.rmtree(pathlib.Path(os.environ["SHMLOADER_MEMORY_REPORTS"]).parent)  # as what tidies /tmp would
sys.stdin.read()
sys.exit(3)
"""


def test_a_program_that_cannot_be_followed_any_more_is_waited_for() -> None:
    pipe = subprocess.PIPE
    words = [*COMMAND, "--", sys.executable, "-c", CLEANS_UP]
    with subprocess.Popen(words, stdin=pipe, stderr=pipe, text=True) as command:
        assert command.stderr is not None
        assert command.stdin is not None
        said = [command.stderr.readline()]
        while "FileNotFoundError" not in said[-1]:
            said.append(command.stderr.readline())
        command.stdin.close()
    assert command.returncode == 3
    assert any("runs on, and is followed no more" in line for line in said)


def test_the_command_ends_with_the_process_that_it_follows(capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"]) as program:
        assert memory.main(["--pid", str(program.pid), "--every", "0.2"]) == 0
        assert program.wait() == 0
    assert "python" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["memory", "profile"])
@pytest.mark.parametrize(("own", "status"), [(0, 1), (7, 7)])
def test_a_file_that_cannot_be_written_is_named(command: str, own: int, status: int) -> None:
    head = [sys.executable, "-m", "shmloader", command, "--json", "/dev/full", "--"]
    done = run([*head, sys.executable, "-c", f"raise SystemExit({own})"])
    assert done.returncode == status
    assert "error: /dev/full: No space left on device" in done.stderr.splitlines()


def test_a_process_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(["--pid", "4194305"]) == 1
    assert "process 4194305 does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--pid", "1", "--", "true"],
        ["--every", "0", "--", "true"],
        ["--json", "/none/x", "true"],
        ["--pid", str(1 << 40)],
    ],
)
def test_wrong_words_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        memory.main(words)
    assert end.value.code == 2
