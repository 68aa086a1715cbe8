"""Start hook of ``python -m shmloader memory``: Python imports it when an interpreter of the program starts.

The command puts this folder first in ``PYTHONPATH``, which all interpreters inherit: spawned workers, fork
servers, ranks. The hook leaves ``sys.path`` as it would be without it, and imports the program's own
``sitecustomize`` in its place. It starts no thread, handles no signal, imports neither torch nor shmloader.
When the program imports torch's loader, that class's ``__iter__`` is wrapped; the first call looks at the
dataset.
"""

from __future__ import annotations

import sys
from typing import Any

_LOADERS = {"torch.utils.data.dataloader": "DataLoader"}
_LOADERS["torchdata.stateful_dataloader.stateful_dataloader"] = "StatefulDataLoader"  # which has its own


class _LoaderFinder:
    """Finds the modules of loaders, by asking the finders after it, and has their classes wrapped."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _LOADERS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        source: Any = None if spec is None else spec.loader
        if hasattr(source, "exec_module"):

            def exec_module(module: Any) -> None:
                del vars(source)["exec_module"]  # the class's own method again
                source.exec_module(module)
                _wrap(vars(module).get(_LOADERS[name]))

            vars(source)["exec_module"] = exec_module
        return spec


def _wrap(loader_class: Any) -> None:
    torchs_iter = vars(loader_class or object).get("__iter__")
    if torchs_iter is None:
        return

    import contextlib
    import functools

    @functools.wraps(torchs_iter)
    def __iter__(loader: Any) -> Any:  # noqa: N807
        begin: Any = None
        with contextlib.suppress(Exception):  # without shmloader the command says that nothing was reported
            from shmloader.monitor.inside import begin
        # Not while an exception is handled: forked workers would inherit that as the context of theirs.
        return torchs_iter(loader) if begin is None else begin(loader, torchs_iter)

    vars(__iter__)["_torchdynamo_disable"] = True  # torch.compile leaves it alone, as torch's own
    loader_class.__iter__ = __iter__


if __name__ == "sitecustomize":
    _FOLDER = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    sys.meta_path.insert(0, _LoaderFinder())
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")  # the program's own; Python is silent if there is none
