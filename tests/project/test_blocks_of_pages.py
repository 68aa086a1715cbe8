"""Every Python block of the README and the pages runs as it is pasted, in an empty folder.

Most are written for the start method fork, as docs/index.md says. A block that imports a library which is not
installed is skipped, with its name. Those for torchrun get its environment.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import os
import socket
import subprocess
from pathlib import Path

import pytest
from blocks_of_pages import Block, blocks
from warm_python import STRICT, warm_python

BLOCKS = blocks()
UNDER_FORK = (
    "import multiprocessing, runpy; multiprocessing.set_start_method('fork'); "
    "runpy.run_path('program.py', run_name='__main__')"
)


def missing(block: Block) -> list[str]:
    """The modules that a block imports and that are neither installed nor beside it."""
    names = set()
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    if "torch.utils.tensorboard" in block.code:
        names.add("tensorboard")
    beside = {name.removesuffix(".py") for name in block.files}
    return sorted(name for name in names - beside if importlib.util.find_spec(name) is None)


def of_torchrun() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"
    )
    return names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_all_pages_have_blocks() -> None:
    pages = {block.page for block in BLOCKS}
    assert {"README.md", "docs/stores.md", "docs/resume.md", "docs/integrations/README.md"} <= pages
    assert len(BLOCKS) >= 45


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_a_block_runs_as_it_is_pasted(block: Block, tmp_path: Path) -> None:
    if without := missing(block):
        pytest.skip(f"{', '.join(without)} is not installed")
    for name, code in block.files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "program.py").write_text(block.code, encoding="utf-8")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    strict = [] if "/integrations/" in block.page else STRICT  # other libraries warn of this and that
    works_anywhere = "__main__" in block.code or multiprocessing.get_start_method() == "fork"
    program = ["program.py"] if works_anywhere else ["-c", UNDER_FORK]
    for _ in range(2):
        if "init_process_group" in block.code:
            environment |= of_torchrun()
        done = subprocess.run(
            [*warm_python(), *strict, *program],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        if "EADDRINUSE" not in done.stderr:  # else another program has taken the port meanwhile
            break
    assert done.returncode == 0, f"{block.page}, line {block.line}:\n{done.stderr[-3000:]}"
