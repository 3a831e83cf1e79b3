"""Shapes of real models' parameters, written down as data: what there is to reduce in one training step."""

from __future__ import annotations

from math import prod

__all__ = ["resnet50"]

Shape = tuple[int, ...]

# He et al., "Deep Residual Learning for Image Recognition", table 1: stages of bottleneck blocks
_BLOCKS = (3, 4, 6, 3)
_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4
_CLASSES = 1000


def resnet50() -> list[Shape]:
    """The 161 parameters of ResNet-50, 25,557,032 numbers in all, in the order of the layers."""
    shapes: list[Shape] = [(64, 3, 7, 7), *_norm(64)]
    channels = 64
    for blocks, width in zip(_BLOCKS, _WIDTHS, strict=True):
        for block in range(blocks):
            wide = width * _EXPANSION
            shapes += [(width, channels, 1, 1), *_norm(width)]
            shapes += [(width, width, 3, 3), *_norm(width)]
            shapes += [(wide, width, 1, 1), *_norm(wide)]
            if block == 0:
                shapes += [(wide, channels, 1, 1), *_norm(wide)]
            channels = wide
    return [*shapes, (_CLASSES, channels), (_CLASSES,)]


def _norm(channels: int) -> tuple[Shape, Shape]:
    """Weight and bias of a batch norm."""
    return (channels,), (channels,)


if __name__ == "__main__":
    print(f"ResNet-50: {len(resnet50())} parameters, {sum(map(prod, resnet50())):,} numbers")
