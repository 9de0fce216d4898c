"""One of two processes of a job on gloo: trains a small model in every distributed way, with and without install().

    python two_processes.py FILE RANK

FILE is where the processes meet. Prints how many calls were ours; fails where the gradients differ.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import convgrad.torch


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))


def data(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    return found


def replicated(rank: int) -> list[torch.Tensor]:
    model = nn.parallel.DistributedDataParallel(new_model())
    model(data(rank)).square().mean().backward()
    return gradients(model)


def fully_sharded(rank: int) -> list[torch.Tensor]:
    model = new_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    for _ in range(2):  # storages are freed and filled again between the steps
        model.zero_grad()
        model(data(rank)).square().mean().backward()
    return gradients(model)


def batch_of_a_dtensor(rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(copy.deepcopy(new_model()), mesh)
    x = distribute_tensor(torch.cat([data(0), data(1)]), mesh, [Shard(0)])
    loss = model(x).square().mean()
    loss.redistribute(mesh, [Replicate()]).backward()
    return gradients(model)


def main(place: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    ways: list[Callable[[int], list[torch.Tensor]]] = [replicated, fully_sharded, batch_of_a_dtensor]
    for way in ways:
        theirs = way(rank)
        with convgrad.torch.installed():
            ours = way(rank)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        calls = sum(line.calls for line in convgrad.torch.report(reset=True) if line.served_by == "native")
        assert calls >= 2, f"{way.__name__}: {calls} calls were ours"
        print(way.__name__, calls, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
