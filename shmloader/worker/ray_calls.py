"""Ray in a forked worker process, which has the connection of its parent, and not the threads."""

from __future__ import annotations

import sys
from typing import Any


def refuse_ray() -> None:
    """Make calls of Ray that would wait for ever errors. A process without Ray is left alone."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "Ray was asked for data in a forked worker process, where it would wait for ever: its threads "
            "are in the process that made the loader. Pass worker_type='thread' or num_workers=0 for a "
            "dataset that calls ray.get(), ray.wait(), ray.put() or iter_batches()."
        )

    vars(ray).update(dict.fromkeys(("get", "wait", "put"), refuse))
    blocks: Any = getattr(sys.modules.get("ray.data"), "DataIterator", None)
    for name in ("iter_batches", "iter_rows", "iter_torch_batches") if blocks else ():
        setattr(blocks, name, refuse)
