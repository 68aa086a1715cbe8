"""Programs that are forked with torch imported are in all else as programs of a fresh interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from robustness.processes import TEMPLATE, wait_gone, workers_of
from warm_python import warm_python


def run(*arguments: str | Path, **options: object) -> tuple[int, str, str]:
    """Exit status, output and error of a program, which are those of a fresh interpreter."""
    fresh, warm = (
        subprocess.run([*head, *arguments], capture_output=True, text=True, check=False, **options)
        for head in ([sys.executable], warm_python())
    )
    assert (fresh.returncode, fresh.stdout) == (warm.returncode, warm.stdout)
    assert fresh.stderr.splitlines()[-1:] == warm.stderr.splitlines()[-1:]  # a traceback has one line more
    return warm.returncode, warm.stdout, warm.stderr


def test_output_and_status_of_one_that_ends_well() -> None:
    code = "import atexit; atexit.register(print, 'at exit'); print('in it')"
    assert run("-c", code) == (0, "in it\nat exit\n", "")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("raise ValueError('of the program')", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_its_status_is_its_own(end: str, status: int) -> None:
    assert run("-c", f"import os, signal, sys; {end}")[0] == status


def test_arguments_input_folder_environment_and_options(tmp_path: Path) -> None:
    code = (
        "import os, sys, warnings; print(sys.argv, input(), os.getcwd(), os.environ['PLANTED'], sys.path[0],"
        "os.path.abspath('beside') in sys.path, sorted(globals())); warnings.warn('it is an error')"
    )
    environment = os.environ | {"PLANTED": "yes", "PYTHONPATH": "beside"}
    given = ["-W", "error", "-c", code, "one", "-c"]
    status, out, _ = run(*given, input="typed\n", cwd=tmp_path, env=environment)
    assert status == 1
    assert out.startswith(f"['-c', 'one', '-c'] typed {tmp_path} yes  True ")


def test_scripts_and_modules(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('imported as', __name__)")
    (tmp_path / "script.py").write_text("import sys, beside; print(__name__, __file__, sys.argv[1:])")
    assert run(tmp_path / "script.py", "a")[1].endswith(f"__main__ {tmp_path / 'script.py'} ['a']\n")
    assert run("-m", "beside", cwd=tmp_path)[1] == "imported as __main__\n"


def test_it_has_nothing_of_the_package_and_draws_its_own_numbers() -> None:
    code = "import numpy, sys; print('shmloader' in sys.modules, numpy.random.rand())"
    first, second = (
        subprocess.run([*warm_python(), "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first.startswith("False ")
    assert first != second


def test_it_ends_with_its_client() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([*warm_python(), "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        program = psutil.Process(int(client.stdout.readline()))
        client.kill()
        assert wait_gone([program], 30)[1] == []


def template() -> psutil.Process:
    """This process's template."""
    children = psutil.Process().children()
    (found,) = [child for child in children if TEMPLATE in " ".join(child.cmdline())]
    return found


def test_the_template_is_no_worker_of_this_process_and_its_programs_are() -> None:
    code = "import os; print(os.getpid(), flush=True); input()"
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*warm_python(), "-c", code], **ends) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        pids = {worker.pid for worker in workers_of(os.getpid())}
        assert {client.pid, pid} <= pids
        assert template().pid not in pids


def test_the_template_outlives_a_client_that_is_killed_as_its_program_ends() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([*warm_python(), "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        program, stopped = psutil.Process(int(client.stdout.readline())), template()
        stopped.suspend()
        try:
            program.kill()
            assert wait_gone([program], 30)[1] == []
            client.kill()
            client.wait()
        finally:
            stopped.resume()
    command = [*warm_python(), "-c", "print('another')"]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout == b"another\n"
