"""Runs a replica of the program of docs/integrations/torchft.md, which writes what it prints to a file."""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torchft

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "torchft.md"
CALL_S = 0.05  # that each call takes: then an epoch lasts seconds, in which others can come


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("replica", type=int)
    parser.add_argument("--dies", type=int, default=0, help="at this call of allreduce, in mid-step")
    parser.add_argument("--after", nargs=2, metavar=("FILE", "LINES"), help="begins once a file has so many")
    given = parser.parse_args()
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    allreduce, calls = torchft.Manager.allreduce, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == given.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(CALL_S)
        return allreduce(*arguments, **options)

    def record(*values: Any) -> None:
        with given.file.open("a") as file:
            file.write(" ".join(map(str, values)) + "\n")

    torchft.Manager.allreduce = counted
    names: dict[str, Any] = {"__name__": "page", "print": record}
    exec(compile(found[1], str(PAGE), "exec"), names)
    while given.after and lines_of(Path(given.after[0])) < int(given.after[1]):
        time.sleep(0.01)
    names["train"](given.replica)


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    main()
