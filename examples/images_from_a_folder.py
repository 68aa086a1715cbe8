"""Trains on images in a folder: a class for each subfolder, decoded and cropped by workers.

The folder is made of crops of two photographs that come with matplotlib.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib import cbook
from PIL import Image
from torch.utils.data import Dataset

from shmloader import DataLoader

SIDE = 64


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """Images of the subfolders of a folder, and the number of the subfolder."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.glob("*/*.png"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        image = torch.from_numpy(np.array(Image.open(path).convert("RGB")))  # also of grey ones
        top, left = torch.randint(0, 9, (2,)).tolist()  # a random crop: workers draw as torch's do
        crop = image[top : top + SIDE - 8, left : left + SIDE - 8]
        return crop.permute(2, 0, 1).float() / 255, self.classes.index(path.parent.name)


def write_images(root: Path) -> None:
    """Write crops of photographs to a subfolder for each."""
    for name in ("grace_hopper.jpg", "Minduka_Present_Blue_Pack.png"):
        path = str(cbook.get_sample_data(name, asfileobj=False))
        photograph = np.array(Image.open(path).convert("RGB").resize((640, 640)))
        folder = root / name.split(".")[0]
        folder.mkdir()
        for number, (top, left) in enumerate(np.ndindex(16, 16)):
            crop = photograph[top * 36 : top * 36 + SIDE, left * 36 : left * 36 + SIDE]
            Image.fromarray(crop).save(folder / f"{number:03}.png")


def main() -> None:
    """Train for two epochs."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        loader = DataLoader(
            ImageFolder(Path(folder)), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True
        )
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 5, stride=4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(2)
        )
        model(torch.zeros(1, 3, SIDE - 8, SIDE - 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with loader:
            for epoch in range(2):
                right = seen = 0
                for images, labels in loader:
                    answers = model(images)
                    torch.nn.functional.cross_entropy(answers, labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    right += int((answers.argmax(1) == labels).sum())
                    seen += len(labels)
                print(f"epoch {epoch}: {right / seen:.0%} of {seen} images right")
            print(loader.statistics())


if __name__ == "__main__":  # workers that are spawned import this file
    main()
