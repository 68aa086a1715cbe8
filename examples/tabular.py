"""Tabular data: a Parquet file as a dataset. Rows are gathered column by column, in one call per batch.

The table is made of the sizes and times of the files of Python's own library.
"""

import statistics
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import shmloader


def write_table(path: Path) -> None:
    """Write a row for each line of the library's sources."""
    rows = []
    for source in sorted(Path(statistics.__file__).parent.glob("[a-c]*.py")):
        lines = source.read_text(encoding="utf-8").splitlines()
        rows += [
            (len(line), len(line) - len(line.lstrip()), "#" in line, n / len(lines))
            for n, line in enumerate(lines)
        ]
    length, indent, comment, place = map(np.array, zip(*rows, strict=True))
    columns = {
        "length": length.astype(np.float32),
        "indent": indent.astype(np.float32),
        "place": place.astype(np.float32),
        "comment": comment.astype(np.float32),
    }
    pq.write_table(pa.table(columns), path)


def main() -> None:
    """Learn which lines have a comment."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "lines.parquet")
        dataset = shmloader.open(Path(folder) / "lines.parquet")
    print(dataset.describe())
    loader = shmloader.DataLoader(dataset, 4_096, shuffle=True, num_workers=2, persistent_workers=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with loader:
        for epoch in range(3):
            losses = []
            for batch in loader:
                inputs = torch.stack([batch["length"] / 80, batch["indent"] / 20, batch["place"]], 1).float()
                answers = model(inputs)[:, 0]
                loss = torch.nn.functional.binary_cross_entropy_with_logits(answers, batch["comment"].float())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            print(f"epoch {epoch}: loss {np.mean(losses):.4f} of {len(dataset):,} lines")
        print(loader.statistics())


if __name__ == "__main__":
    main()
