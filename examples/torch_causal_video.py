"""A causal video block: it predicts the next frame of a moving square, and never looks ahead.

    python examples/torch_causal_video.py --steps 200

`CausalConv3d` pads time at its beginning only. PyTorch needs a padded copy of every activation for that; here neither
pass makes one.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import convgrad.torch


def block(channels: int) -> nn.Module:
    causal = convgrad.torch.CausalConv3d
    return nn.Sequential(
        causal(1, channels, 3, padding="same"), nn.SiLU(),
        causal(channels, channels, 3, padding="same", dilation=(2, 1, 1), groups=channels), nn.SiLU(),
        causal(channels, 1, (2, 3, 3), padding=1))


def clip(seed: int, frames: int, size: int) -> torch.Tensor:
    """A square that moves with a speed of its own, as (batch, channel, time, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    row, column, down, right = torch.randint(0, size, (4,), generator=generator).tolist()
    video = torch.zeros(1, 1, frames, size, size)
    for time in range(frames):
        rows = torch.arange(row + time * (down % 3 - 1), row + time * (down % 3 - 1) + 3) % size
        columns = torch.arange(column + time * (right % 3 - 1), column + time * (right % 3 - 1) + 3) % size
        video[0, 0, time][rows[:, None], columns] = 1.0
    return video


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--size", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = block(8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(options.steps):
        video = torch.cat([clip(4 * step + image, options.frames, options.size) for image in range(4)])
        loss = (model(video[:, :, :-1]) - video[:, :, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, options.steps - 1):
            print(f"step {step}: loss {float(loss.detach()):.4f}")
    with torch.no_grad():
        whole, beginning = model(video), model(video[:, :, :options.frames // 2])
    assert torch.allclose(whole[:, :, :options.frames // 2], beginning, atol=1e-5), "the future was seen"
    print(f"the first {options.frames // 2} frames alone give the same predictions for them: nothing looks ahead")


if __name__ == "__main__":
    main()
