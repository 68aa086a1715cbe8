"""A callback for transformers' Trainer: the training loader's state in each checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class LoaderState(TrainerCallback):  # type: ignore[misc]  # without transformers it is Any
    """Saves the training loader's state in each checkpoint, and loads it when training is resumed.

    It needs ``shmloader.install(stateful=True)``, and ``TrainingArguments(ignore_data_skip=True)``, or
    Trainer would skip the batches a second time. Without this callback Trainer draws all index batches of the
    epoch again and skips those that were trained on; then random augmentation is drawn anew. Each rank has a
    file of its own.

    Args:
        checkpoint: The folder that training is resumed from; None for Trainer's own folder of that step in
            ``output_dir``.
    """

    def __init__(self, checkpoint: str | Path | None = None) -> None:
        self._checkpoint = checkpoint

    def on_save(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any) -> None:
        """Write the state beside what Trainer has saved. Called on each rank."""
        path = _path(_folder(args, state), args)
        path.write_text(json.dumps(train_dataloader.state_dict()), encoding="utf-8")

    def on_train_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any) -> None:
        """Load the state, if training is resumed.

        Raises:
            RuntimeError: Without ``install(stateful=True)``.
            ValueError: Without ``ignore_data_skip``.
            FileNotFoundError: If the checkpoint was saved without this callback, or by fewer ranks.
            ResumeError: If the state does not fit the loader.
        """
        if not hasattr(train_dataloader, "dl_state_dict"):
            raise RuntimeError(
                "LoaderState needs shmloader.install(stateful=True): Trainer's loader has no state"
            )
        if not state.global_step:
            return
        if not args.ignore_data_skip:
            raise ValueError(
                "LoaderState continues after the batches that were trained on, and Trainer would skip as "
                "many again: pass TrainingArguments(ignore_data_skip=True)"
            )
        path = _path(Path(self._checkpoint or _folder(args, state)), args)
        train_dataloader.load_state_dict(json.loads(path.read_text(encoding="utf-8")))


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _path(folder: Path, args: Any) -> Path:
    return folder / f"loader_state_{args.process_index}.json"
