"""The programs in ``examples`` run as they are written, and leave nothing behind."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def _run(program: str, folder: Path, *arguments: str) -> str:
    """What a program prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [*warm_python(), "-W", "error::RuntimeWarning"]
    if program == "several_ranks":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        command += [*launcher, *warm_python()]
    command += [str(EXAMPLES / f"{program}.py"), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("images_from_a_folder", "of 512 images right"),
        ("detection", "torch.stack at detection.py"),
        ("tabular", "epoch 2: loss"),
        ("several_ranks", "of 1003 samples right"),
    ],
)
def test_an_example_runs(program: str, said: str, tmp_path: Path) -> None:
    assert said in _run(program, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_language_model_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = _run("language_model", tmp_path, "--checkpoint", "whole.pt").splitlines()
    first = _run("language_model", tmp_path, "--checkpoint", "lm.pt", "--stop-after", "3").splitlines()
    rest = _run("language_model", tmp_path, "--checkpoint", "lm.pt").splitlines()
    assert len(first) == 3
    assert rest[0] == "resumed"
    assert [*first, *rest[1:]] == whole


def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    subprocess.run([*warm_python(), "-c", code], cwd=tmp_path, check=True, timeout=240)
    assert [path.name for path in tmp_path.iterdir()] == ["batches.png"]


def test_every_example_is_listed_and_tested() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.glob("*.*") if path.suffix != ".md")
    assert set(PROGRAMS) == {
        "images_from_a_folder",
        "detection",
        "tabular",
        "several_ranks",
        "language_model",
    }
