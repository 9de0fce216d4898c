"""Calls on torch tensors run on torch's threads: same bits as on our pool, obedient to torch.set_num_threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest

import convgrad

torch = pytest.importorskip("torch")
native = pytest.importorskip("convgrad._native")

LAYERS = [((2, 24, 9, 11), (40, 24, 3, 3), 1), ((2, 32, 9, 11), (32, 1, 3, 3), 32), ((1, 3, 17, 19), (16, 3, 5, 5), 1)]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    native.prefer_gomp(False)


def tensors(x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    y_shape = (x_shape[0], w_shape[0], x_shape[2] - w_shape[2] + 1, x_shape[3] - w_shape[3] + 1)
    return [torch.randn(shape, generator=draw) for shape in (y_shape, x_shape, w_shape)]


def test_torch_offers_a_team() -> None:
    assert native.torch_team() == "torch_parallel_for"
    native.prefer_gomp(True)
    assert native.torch_team() == "GOMP_parallel"


@pytest.mark.parametrize(("x_shape", "w_shape", "groups"), LAYERS)
def test_same_bits_on_every_team(x_shape: tuple[int, ...], w_shape: tuple[int, ...], groups: int) -> None:
    operands = tensors(x_shape, w_shape)
    expected = convgrad.conv_backward(*[operand.numpy() for operand in operands], groups=groups)
    for gomp in (False, True):
        native.prefer_gomp(gomp)
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            for num_threads in (None, 1, 4):  # more than torch has: it gives what it has
                got = convgrad.conv_backward(*operands, groups=groups, num_threads=num_threads)
                for ours, theirs in zip(got, expected):
                    assert np.array_equal(ours.numpy(), theirs), (gomp, threads, num_threads)


def test_number_of_threads_is_torchs() -> None:
    torch.set_num_threads(1)
    assert native.threads_for_torch() == 1
    torch.set_num_threads(2)
    assert native.threads_for_torch() == min(2, convgrad.get_num_threads())
    convgrad.set_num_threads(1)
    try:
        assert native.threads_for_torch() == 1
    finally:
        convgrad.set_num_threads(0)


def test_storages_stay_resizable() -> None:
    """FSDP frees and refills the storages of parameters between steps; `Tensor.numpy()` forbids that for good."""
    operands = tensors(*LAYERS[0][:2])
    results = convgrad.conv_backward(*operands)
    for tensor in (*operands, *results):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().size() == 0


def test_a_forked_child_computes() -> None:
    """OpenMP's workers do not exist in a child after fork; a region of two threads would wait for ever."""
    script = """
        import os, sys
        import torch, convgrad
        torch.set_num_threads(2)
        x, w = torch.ones(2, 16, 12, 12), torch.ones(16, 16, 3, 3)
        before = convgrad.weight_grad(x[:, :, 2:, 2:], x, 3)
        child = os.fork()
        if child == 0:
            after = convgrad.weight_grad(x[:, :, 2:, 2:], x, 3)
            os._exit(0 if torch.equal(before, after) else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
