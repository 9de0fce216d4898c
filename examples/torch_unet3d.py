"""Train a small 3-D U-Net to find balls in noise, with PyTorch's gradients and with convgrad's, and draw both losses.

    python examples/torch_unet3d.py --seconds 60 --size 32 --picture loss.svg

The two runs start from the same weights and see the same volumes. `convgrad.torch.install()` is all that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
from torch import nn

import convgrad.torch


class Block(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(nn.Conv3d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
                         nn.Conv3d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = Block(1, width), Block(2 * width, 2 * width)
        self.shrink = nn.Conv3d(width, 2 * width, 2, stride=2)
        self.grow = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.up, self.last = Block(2 * width, width), nn.Conv3d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.down1(x)
        coarse = self.down2(self.shrink(fine))
        return self.last(self.up(torch.cat([fine, self.grow(coarse)], 1)))


def volumes(step: int, size: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy volumes with a ball in each, and where the balls are; the same for every run."""
    generator = torch.Generator().manual_seed(step)
    places = torch.stack(torch.meshgrid(*[torch.arange(float(size))] * 3, indexing="ij"))
    centres = torch.rand(batch, 3, 1, 1, 1, generator=generator) * size
    radii = (0.15 + 0.2 * torch.rand(batch, 1, 1, 1, generator=generator)) * size
    inside = ((places - centres).square().sum(1) < radii.square()).float().unsqueeze(1)
    return inside + 0.7 * torch.randn(inside.shape, generator=generator), inside


def train(steps: int, seconds: float, size: int) -> tuple[list[float], float]:
    """The loss of every step, and seconds per step; stops after `steps`, or after `seconds` where steps is 0."""
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses: list[float] = []
    start = time.perf_counter()
    while len(losses) < steps or (not steps and time.perf_counter() - start < seconds):
        noisy, inside = volumes(len(losses), size)
        loss = nn.functional.binary_cross_entropy_with_logits(model(noisy), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, (time.perf_counter() - start) / len(losses)


def picture(curves: dict[str, list[float]], seconds: dict[str, float]) -> str:
    """Loss over seconds as an SVG drawing: one line for each run."""
    width, height, left = 640, 360, 50
    most = max(max(losses) for losses in curves.values())
    longest = max(len(losses) * seconds[name] for name, losses in curves.items())
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
             'font-size="13">', f'<rect width="{width}" height="{height}" fill="white"/>',
             f'<text x="{left}" y="{height - 8}">0 s</text>',
             f'<text x="{width - 50}" y="{height - 8}">{longest:.0f} s</text>',
             f'<text x="5" y="25">{most:.2f}</text><text x="5" y="{height - 30}">0</text>']
    for place, (name, losses) in enumerate(curves.items()):
        colour = ("#888888", "#d03020")[place]
        points = " ".join(
            f"{left + (step + 1) * seconds[name] / longest * (width - left - 20):.1f},"
            f"{height - 30 - loss / most * (height - 50):.1f}" for step, loss in enumerate(losses))
        parts += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
                  f'<text x="{width - 250}" y="{30 + 20 * place}" fill="{colour}">{name}: {len(losses)} steps, '
                  f"{1000 * seconds[name]:.0f} ms each</text>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="steps of each run")
    parser.add_argument("--seconds", type=float, default=0.0, help="length of each run, where no steps are given")
    parser.add_argument("--size", type=int, default=12, help="voxels along each axis of a volume (even)")
    parser.add_argument("--picture", help="SVG file for the curves")
    options = parser.parse_args()
    steps = options.steps or (0 if options.seconds else 4)
    curves, seconds = {}, {}
    for name, context in (("PyTorch", contextlib.nullcontext()), ("convgrad", convgrad.torch.installed())):
        with context:
            curves[name], seconds[name] = train(steps, options.seconds, options.size)
        print(f"{name:8}: {len(curves[name])} steps of {1000 * seconds[name]:.1f} ms, loss {curves[name][0]:.4f} -> "
              f"{curves[name][-1]:.4f}")
    both = min(map(len, curves.values()))
    apart = max(abs(a - b) for a, b in zip(curves["PyTorch"][:both], curves["convgrad"]))
    print(f"largest difference of the losses in the first {both} steps: {apart:.1e}")
    if options.picture:
        with open(options.picture, "w", encoding="utf-8") as file:
            file.write(picture(curves, seconds))


if __name__ == "__main__":
    main()
