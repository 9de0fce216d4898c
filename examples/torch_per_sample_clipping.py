"""Clip the gradient of every image by itself, as differentially private training does, without unfolding anything.

    python examples/torch_per_sample_clipping.py --steps 50

`vmap(grad(loss))` over layers of convgrad.torch computes the weight gradients of all images in one grouped call.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import convgrad.torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--clip", type=float, default=0.5, help="largest norm of an image's gradient")
    parser.add_argument("--noise", type=float, default=0.1, help="deviation of the noise, in clipping norms")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        convgrad.torch.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        convgrad.torch.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 3 * 3, 2))
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = functional_call(model, parameters, (image[None],))
        return nn.functional.cross_entropy(logits, label[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    for step in range(options.steps):
        labels = torch.randint(0, 2, (16,))
        pixels = torch.randn(16, 1, 8, 8) + labels[:, None, None, None]
        gradients = per_sample(parameters, pixels, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (options.clip / norms).clamp(max=1.0)
        for name, each in gradients.items():
            clipped = torch.einsum("n,n...->...", factors, each)
            noise = options.noise * options.clip * torch.randn_like(clipped)
            parameters[name] = parameters[name] - 0.5 * (clipped + noise) / len(labels)
        mean = float(vmap(loss, in_dims=(None, 0, 0))(parameters, pixels, labels).mean())
        if step in (0, options.steps - 1):
            print(f"step {step}: norms {float(norms.min()):.2f} to {float(norms.max()):.2f}, loss {mean:.4f}")
    alone = grad(loss)(parameters, pixels[3], labels[3])
    together = per_sample(parameters, pixels, labels)
    assert all(torch.allclose(alone[name], together[name][3], atol=1e-5) for name in alone)
    print("the gradient of one image alone is the same")


if __name__ == "__main__":
    main()
