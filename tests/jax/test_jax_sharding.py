"""Sharded programs on four devices of the host: the same bits, and no more communication than the sums need."""

from __future__ import annotations

import os
import subprocess
import sys

import oracle
import pytest

pytest.importorskip("jax", reason="jax is not installed: the JAX front end is not tested")
pytestmark = pytest.mark.skipif("native" not in oracle.available_backends(), reason="needs the native backend")

# One process for all cases: the number of devices is settled when JAX starts.
PROGRAM = """
import os
import jax, jax.numpy as jnp, numpy as np, convgrad
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
def integers(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), np.float32)

# groups, sharding of x and of w, reductions that the three products of a gradient need
CASES = [(1, P("a"), P(), 1), (1, P(), P("b"), 1), (1, P("a"), P("b"), 2), (1, P(None, "a"), P(None, "a"), 1),
         (1, P("a", "b"), P(), 2), (1, P(("a", "b")), P(), 1), (2, P("a"), P(), 1), (2, P(), P("b"), 0),
         (4, P("a"), P("b"), 1), (4, P("a", "b"), P(), 1), (8, P(None, "a"), P("a"), 0)]
for groups, x_spec, w_spec, reductions in CASES:
    x, w = integers((4, 8, 9, 7), 1), integers((8, 8 // groups, 3, 3), 2)
    def loss(x, w):
        return (convgrad.jax.conv(x, w, padding=1, groups=groups, backend="native") ** 2).sum()
    expected = jax.grad(loss, (0, 1))(x, w)
    step = jax.jit(jax.grad(loss, (0, 1)))
    placed = jax.device_put(x, NamedSharding(mesh, x_spec)), jax.device_put(w, NamedSharding(mesh, w_spec))
    for found, exact in zip(step(*placed), expected):
        assert np.array_equal(found, exact), (groups, x_spec, w_spec)
    text = step.lower(*placed).compile().as_text()
    counts = {name: text.count(name + "(") + text.count(name + "-start(")
              for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")}
    # A callback is not cut: XLA gathers its operands.
    allowed = {"all-gather": 0, "all-reduce": reductions, "all-to-all": 0, "collective-permute": 0}
    assert os.environ["CONVGRAD_JAX"] == "callback" or counts == allowed, (groups, x_spec, w_spec, counts)

# shard_map: the batch is cut by hand, the weight is on every device, its gradient is summed over the mesh
x, w = integers((4, 4, 9), 1), integers((6, 4, 3), 2)
def local(x, w):
    return (convgrad.jax.conv(x, w, padding=1, backend="native") ** 2).sum()[None]
flat = jax.make_mesh((4,), ("n",), axis_types=(jax.sharding.AxisType.Auto,))
mapped = jax.shard_map(local, mesh=flat, in_specs=(P("n"), P()), out_specs=P("n"))
assert np.array_equal(jax.jit(jax.grad(lambda w: mapped(x, w).sum()))(w), jax.grad(lambda w: local(x, w).sum())(w))
print("right")
"""


@pytest.mark.parametrize("route", ["ffi", "callback"])
def test_sharded_gradients(route: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu",
                   "CONVGRAD_JAX": route}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "right", done.stderr[-3000:]
