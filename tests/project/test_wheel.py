"""The wheel has the pages, and what is installed finds them."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ASKED = """
import shmloader.messages
from importlib.metadata import metadata
print(shmloader.messages.page("docs/messages.md"))
print(metadata("shmloader")["Description"] or metadata("shmloader").get_payload())
"""


@pytest.mark.long
def test_an_installed_package_has_the_pages(tmp_path: Path) -> None:
    kept = shutil.ignore_patterns(".*", "build", "tests", "__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY, tmp_path / "source", ignore=kept)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    made = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path)]
    subprocess.run([*pip, *made, str(tmp_path / "source")], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "new", with_pip=False, symlinks=True)
    python = tmp_path / "new" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    (packages,) = (tmp_path / "new" / "lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.check_output([python, "-c", ASKED], cwd=tmp_path, env=environment, text=True)
    messages = Path(said.splitlines()[0])
    assert messages.is_relative_to(tmp_path / "new")
    installed = messages.parents[1]
    for page in [*REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "README.md"]:
        there = installed / page.relative_to(REPOSITORY)
        assert there.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
        for link in re.findall(
            r"\]\((?!https?:|#)([^)#\s]+\.(?:md|png|ipynb))", there.read_text(encoding="utf-8")
        ):
            assert (there.parent / link).is_file(), f"{page}: {link}"
    assert "](" not in said  # what a package index shows has no links into the checkout
    shown = subprocess.check_output(
        [python, "-m", "shmloader", "--help"], cwd=tmp_path, env=environment, text=True
    )
    assert str(installed / "docs" / "index.md") in shown
