"""ResNet-18 (He et al., 2015, https://arxiv.org/abs/1512.03385), for a training step on images."""

from __future__ import annotations

import torch
from torch import nn

_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride of the first block


class Block(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut, which is projected if the shape changes."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        same = stride == 1 and inner == outer
        projection = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.shortcut: nn.Module = nn.Identity() if same else projection

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Applies it."""
        result: torch.Tensor = torch.relu(self.body(images) + self.shortcut(images))
        return result


def resnet18(classes: int = 1000) -> nn.Module:
    """Makes the network, for images of three channels."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inner = 64
    for outer, stride in _STAGES:
        layers += [Block(inner, outer, stride), Block(outer, outer, 1)]
        inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))
