"""Mixed precision with convgrad's gradients: float16 with a gradient scaler on CUDA, bfloat16 on the CPU.

    python examples/torch_amp.py --steps 100
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import convgrad.torch


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=4), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


def images(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose brightest quarter is their class."""
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(16, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 4, (16,), generator=generator)
    for image, label in zip(pixels, labels.tolist()):
        image[:, 8 * (label // 2):8 * (label // 2) + 8, 8 * (label % 2):8 * (label % 2) + 8] += 1.5
    return pixels.to(device, memory_format=torch.channels_last), labels.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, dtype = options.device, torch.float16 if options.device == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    model = network().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    with convgrad.torch.installed():
        for step in range(options.steps):
            pixels, labels = images(step, device)
            with torch.autocast(device, dtype=dtype):
                loss = nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step in (0, options.steps - 1):
                print(f"{device} {dtype} step {step}: loss {float(loss.detach()):.4f}")


if __name__ == "__main__":
    main()
