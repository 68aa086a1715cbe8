"""The program of docs/queues.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from robustness.processes import ENVIRONMENT
from warm_python import STRICT, warm_python

PAGE = Path(__file__).parents[2] / "docs" / "queues.md"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_program_runs(tmp_path: Path, method: str) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    program = tmp_path / "program.py"
    program.write_text(
        found[1].replace("multiprocessing.Process(", f"multiprocessing.get_context({method!r}).Process(")
    )
    done = subprocess.run(
        [*warm_python(), *STRICT, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "6 batches\n", "")
