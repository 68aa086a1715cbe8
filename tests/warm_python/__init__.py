"""Programs that start with torch imported, for tests: an import of torch takes seconds of a processor.

`warm_python()` stands at the head of a command in place of `sys.executable`. The command is a small client
(`client.py`) of one template process (`template.py`), which has imported torch and nothing of shmloader. The
template forks the program and gives it the client's arguments, folder, environment and standard files. The
program is the main module anew, and ends as one does: with exception hooks, ``atexit`` and its exit status,
which is the client's too. If the client is killed, so is the program.

Use `sys.executable` where a test sends the program other signals, limits it, sets what an interpreter or a
library reads once (``PYTHONHASHSEED``, ``OMP_NUM_THREADS``, ``MALLOC_ARENA_MAX``; /proc/PID/environ has the
template's), or asserts what is collected when the interpreter ends. A program that gets signals may print
its pid, and call ``os.setsid()`` if they go to its group.
"""

import atexit
import os
import subprocess
import sys
from pathlib import Path

STRICT = [
    "-W", "error",
    "-W", "ignore:This process:DeprecationWarning",  # Python 3.12, of each fork with threads
    "-W", "ignore:This DataLoader will create:UserWarning",  # torch, of more workers than cores
]  # fmt: skip
"""Options by which warnings are errors, as in the tests."""

_HERE = Path(__file__).parent
_TEMPLATE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from template import next_program; exec(next_program())"
)

_templates: dict[int, tuple[str, "subprocess.Popen[bytes]"]] = {}  # one for each process that asked


def warm_python() -> list[str]:
    """The head of a command; the template starts when first asked for, and ends with this process.

    ``-W`` options, then ``-c``, ``-m`` or the path of a script come next, as after an interpreter.
    """
    me = os.getpid()
    if me not in _templates:
        name = f"shmloader-tests-{me}-{os.urandom(4).hex()}"  # containers may share such names, and pids
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-c", _TEMPLATE, str(_HERE), name, str(me)]
        template = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        _templates[me] = name, template
        atexit.register(_end_template, me)
    return [sys.executable, "-IS", str(_HERE / "client.py"), _templates[me][0]]


def _end_template(owner: int) -> None:
    if owner == os.getpid():  # forked processes inherit the call
        _, template = _templates.pop(owner)
        template.kill()
        template.wait()
