"""Writes into other objects' attributes, from the syntax trees: ``python tests/project/foreign_writes.py``.

A number that another object writes has two owners. A function may write to ``self``, ``cls`` and to what it
has just made itself.
"""

import ast
import collections
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "shmloader"
OWN = {"self", "cls"}

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = Function | ast.Module


def writes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of each attribute of another object that a module sets, changes or deletes."""
    scopes: list[Scope] = [tree, *(node for node in ast.walk(tree) if isinstance(node, Function))]
    for scope in scopes:
        nodes = list(_nodes_of(scope))
        fresh = OWN | {name for node in nodes for name in _made_by(node)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                if not (isinstance(node.value, ast.Name) and node.value.id in fresh):
                    yield node.lineno, ast.unparse(node)
            elif isinstance(node, ast.Call) and _name_of(node.func) in ("setattr", "__setattr__"):
                owner = node.args[0] if node.args else None
                if not (isinstance(owner, ast.Name) and owner.id in fresh):
                    yield node.lineno, ast.unparse(node)


def _nodes_of(scope: Scope) -> Iterator[ast.AST]:
    """What is in a function itself, and not in a function inside it."""
    todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
    for node in todo:  # it grows meanwhile
        yield node
        if not isinstance(node, Function):
            todo += ast.iter_child_nodes(node)


def _made_by(node: ast.AST) -> list[str]:
    """The local names that an assignment gives to an object it makes: by a class, or by its ``__new__``."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
        return []
    made = _name_of(node.value.func)
    if not (made in ("cls", "__new__") or made.lstrip("_")[:1].isupper()):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _name_of(called: ast.expr) -> str:
    return getattr(called, "id", getattr(called, "attr", ""))


def count(files: Iterable[Path]) -> dict[str, list[tuple[int, str]]]:
    """The writes in each of these files."""
    found = {
        str(file.relative_to(PACKAGE)): list(writes(ast.parse(file.read_text(encoding="utf-8"))))
        for file in files
    }
    return {file: each for file, each in found.items() if each}


def in_package() -> dict[str, list[tuple[int, str]]]:
    """The writes in each file of shmloader."""
    return count(sorted(PACKAGE.rglob("*.py")))


if __name__ == "__main__":
    everywhere = in_package()
    by_name = collections.Counter(text.rpartition(".")[2] for each in everywhere.values() for _, text in each)
    for file, each in everywhere.items():
        sys.stdout.write("".join(f"{file}:{line}: {text}\n" for line, text in each))
    sys.stdout.write(f"{sum(map(len, everywhere.values()))} in all; most: {by_name.most_common(8)}\n")
