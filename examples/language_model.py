"""A language model of bytes: batches by a budget of tokens, a stop in mid-epoch, and an exact resume.

    python examples/language_model.py --checkpoint lm.pt --stop-after 20
    python examples/language_model.py --checkpoint lm.pt

The texts are the functions of Python's own library. The second run goes on where the first one stopped.
"""

import argparse
import ast
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import shmloader

EPOCHS = 2
LONGEST = 512


class Functions(Dataset[torch.Tensor]):
    """The sources of the functions in some modules, as bytes."""

    def __init__(self) -> None:
        modules = sorted(Path(statistics.__file__).parent.glob("[ab]*.py"))
        sources = [path.read_text(encoding="utf-8") for path in modules]
        texts = [
            "\n".join(lines[node.lineno - 1 : node.end_lineno]).encode()[:LONGEST]
            for source in sources
            for lines in [source.splitlines()]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
        ]
        self.texts = shmloader.share([text for text in texts if len(text) > 1])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.texts[index]), dtype=torch.uint8).long()


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    """A row for each text, filled up with zeros."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def save(path: Path, epoch: int, **parts: Any) -> None:
    """Replace the checkpoint: killed in here, the program still has the last one."""
    states = {name: part.state_dict() for name, part in parts.items()}
    new = path.with_suffix(".new")
    torch.save(states | {"epoch": epoch}, new)
    new.replace(path)


def main() -> None:
    """Train for two epochs, or until the program is to stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("lm.pt"))
    parser.add_argument("--stop-after", type=int, help="batches")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    dataset = Functions()
    lengths = [len(dataset.texts[index]) for index in range(len(dataset))]
    sampler = shmloader.TokenBatchSampler(lengths, max_tokens=8_192)
    loader = shmloader.DataLoader(dataset, batch_sampler=sampler, num_workers=2, collate_fn=pad)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    first_epoch = trained = 0
    if arguments.checkpoint.exists():
        checkpoint = torch.load(arguments.checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        first_epoch = checkpoint["epoch"]
        print("resumed")

    with loader:
        for epoch in range(first_epoch, EPOCHS):
            loader.set_epoch(epoch)  # each has another order
            for tokens in loader:
                answers = model(tokens[:, :-1]).transpose(1, 2)
                loss = torch.nn.functional.cross_entropy(answers, tokens[:, 1:], ignore_index=0)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"epoch {epoch}: batch {tuple(tokens.shape)}, loss {loss.item():.4f}")
                trained += 1
                if trained == arguments.stop_after:
                    save(arguments.checkpoint, epoch, **parts)
                    return
            save(arguments.checkpoint, epoch + 1, **parts)


if __name__ == "__main__":
    main()
