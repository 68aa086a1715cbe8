"""The programs in ``examples`` run as they are written, and leave nothing behind."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from warm_python import warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))

IN_A_KERNEL = """
import sys

import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": "."}}).execute()
print([cell.get("outputs") for cell in notebook.cells])
"""


def _run(program: str, folder: Path, *arguments: str) -> str:
    """What a program prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable] if program == "ray_train" else [*warm_python()]
    command += ["-W", "error::RuntimeWarning"]
    if program == "several_ranks":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        command += [*launcher, *warm_python()]
    command += [str(EXAMPLES / f"{program}.py"), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _example(program: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(program, EXAMPLES / f"{program}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("images_from_a_folder", "of 512 images right"),
        ("detection", "torch.stack at detection.py"),
        ("tabular", "epoch 2: loss"),
        ("several_ranks", "of 1003 samples right"),
        ("actors_and_learner", "learned from 81920 steps"),
    ],
)
def test_an_example_runs(program: str, said: str, tmp_path: Path) -> None:
    assert said in _run(program, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_language_model_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = _run("language_model", tmp_path, "--checkpoint", "whole.pt").splitlines()
    first = _run("language_model", tmp_path, "--checkpoint", "lm.pt", "--stop-after", "3").splitlines()
    second = _run("language_model", tmp_path, "--checkpoint", "lm.pt", "--stop-after", "25").splitlines()
    rest = _run("language_model", tmp_path, "--checkpoint", "lm.pt").splitlines()
    assert len(first) == 3
    assert second[0] == rest[0] == "resumed"
    assert [*first, *second[1:], *rest[1:]] == whole
    sizes = [re.findall(rf"epoch {epoch}: batch (.*), loss", "\n".join(whole)) for epoch in range(2)]
    assert sizes[0] != sizes[1], "each epoch has an order of its own"
    assert _run("language_model", tmp_path, "--checkpoint", "lm.pt") == "resumed\n"
    assert {path.name for path in tmp_path.iterdir()} == {"whole.pt", "lm.pt"}


def test_the_language_model_keeps_its_checkpoint_if_a_new_one_is_not_written(tmp_path: Path) -> None:
    path, part = tmp_path / "lm.pt", torch.nn.Linear(2, 2)
    example = _example("language_model")
    example.save(path, 1, model=part)
    before = path.read_bytes()
    bad: Any = SimpleNamespace(state_dict=threading.Lock)
    with pytest.raises(TypeError, match="pickle"):
        example.save(path, 2, model=part, optimizer=bad)
    assert path.read_bytes() == before


def test_labels_are_integers_where_images_have_no_objects() -> None:
    example = _example("detection")
    photograph = np.zeros((400, 400, 3), np.uint8)
    dataset = example.Detection(photograph, [{"at": (0, 0), "objects": []}] * 2)
    assert example.collate([dataset[0], dataset[1]])["labels"].dtype == torch.int64


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "RGB"])
def test_images_of_any_kind_have_three_channels(mode: str, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    Image.new(mode, (64, 64)).save(tmp_path / "class" / "one.png")
    image, _ = _example("images_from_a_folder").ImageFolder(tmp_path)[0]
    assert image.shape == (3, 56, 56)


def test_the_ray_example_runs(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: make test-integrations")
    assert "695 of 1390 lines" in _run("ray_train", tmp_path)


def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    if importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None:
        pytest.skip("nbclient and ipykernel are not installed: make test-integrations")
    environment = os.environ | {"IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", IN_A_KERNEL, str(EXAMPLES / "notebook.ipynb")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "of 2 workers" in done.stdout or "worker" in done.stdout
    assert (tmp_path / "batches.png").is_file()


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
        "actors_and_learner",
        "ray_train",
    }
