"""From the primitives to what runs: XLA's own threads or stream through a handler, or a callback into Python.

The handler (native/xla_handlers.cpp) is there where the module was built beside jaxlib's headers. On the CPU a call
carries its problem as numbers, of which the handler makes the plan; on a GPU it carries the handle of a prepared call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...plan import plan
from ...problem import Plan, Problem, Unsupported
from ..numpy import from_line
from .form import FORMS, Settings, order_of, register_lowering, result_type, roles_of, shape_in_layout
from .sharding import partitioned, tell_devices_to

TARGETS = {"cpu": "convgrad_host", "CUDA": "convgrad_gpu"}


@lru_cache(maxsize=1)
def handlers() -> tuple[dict[str, Any], str | None]:
    """The handlers that were registered with XLA, by platform, and why there are none."""
    try:
        from ... import _native
    except ImportError as error:
        return {}, f"the native module is not there: {error}"
    if not _native.xla_handlers:
        return {}, "the native module was built without jaxlib's headers"
    try:
        for platform, capsule in _native.xla_handlers.items():
            jax.ffi.register_ffi_target(TARGETS[platform], capsule, platform=platform)
    except Exception as error:  # a jaxlib older than the headers says so here
        return {}, f"this jaxlib does not take the handlers: {error}"
    return dict(_native.xla_handlers), None


def settings_of(backend: str | None = None, num_threads: int | None = None,
                max_workspace_bytes: int | None = None) -> Settings:
    """The settings of a call; CONVGRAD_JAX=callback in the environment takes it through Python."""
    return Settings(backend, num_threads, max_workspace_bytes, os.environ.get("CONVGRAD_JAX") == "callback")


def planned(problem: Problem, settings: Settings) -> Plan:
    return plan(problem, backend=settings.backend, num_threads=settings.num_threads,
                max_workspace_bytes=settings.max_workspace_bytes)


def explain_route(problem: Problem | str, *, backend: str | None = None) -> str:
    """How a call of this problem inside a JAX program runs, as a sentence.

    Parameters
    ----------
    problem : Problem or str
    backend : str, optional

    Examples
    --------
    >>> import convgrad
    >>> convgrad.jax.explain_route("conv f32 n1 c1 k1 i5 w3", backend="reference")
    'pure_callback into Python: the reference backend has no handler for XLA'
    """
    found = Problem.parse(problem) if isinstance(problem, str) else problem
    settings = settings_of(backend)
    reason = "CONVGRAD_JAX=callback" if settings.callback else handlers()[1]
    if reason is not None:
        return f"pure_callback into Python: {reason}"
    if found.device == "cuda":
        return "XLA FFI: launches of a prepared call on XLA's stream"
    chosen = planned(found, settings)
    if not chosen.numbers:
        return f"pure_callback into Python: the {chosen.backend} backend has no handler for XLA"
    return "XLA FFI: a native plan on XLA's threads"


# --- the CPU ----------------------------------------------------------------------------------------------------------

def on_cpu(problem: Problem, settings: Settings, *operands: Any) -> Any:
    chosen = planned(problem, settings)
    if chosen.numbers and not settings.callback and "cpu" in handlers()[0]:
        call = jax.ffi.ffi_call(TARGETS["cpu"], result_type(problem))
        return call(*operands, numbers=np.asarray(chosen.numbers, np.int64))
    return jax.pure_callback(runner(chosen), result_type(problem), *operands)


def runner(chosen: Plan) -> Callable[..., Any]:
    """The function behind the callback: arrays of the host in, array of the host out."""
    problem = chosen.problem
    orders = [order_of(problem, role) for role in roles_of(problem)]
    shape, order = shape_in_layout(problem, problem.wrt), order_of(problem, problem.wrt)
    dtype = jnp.dtype(problem.out_dtype)

    def run(*operands: Any) -> Any:
        out = from_line(shape, dtype)
        views = tuple(np.asarray(operand).transpose(axes) for operand, axes in zip(operands, orders))
        chosen.run(views, (out.transpose(order),), None)
        return out

    return run


# --- NVIDIA GPUs ------------------------------------------------------------------------------------------------------

@lru_cache(maxsize=4096)
def prepared(problem: Problem, settings: Settings) -> Any:
    """The prepared call for dense arrays; kept for good, because compiled programs hold its handle."""
    chosen = planned(problem.with_(device="cuda"), settings)
    strides = tuple(dense_strides(problem, role) for role in (*roles_of(problem), problem.wrt))
    return chosen.prepared(strides)


def dense_strides(problem: Problem, role: str) -> tuple[int, ...]:
    """Strides in elements and canonical axis order, of a dense array in the caller's layout."""
    shape = shape_in_layout(problem, role)
    steps = [int(np.prod(shape[place + 1:], dtype=np.int64)) for place in range(len(shape))]
    return tuple(steps[place] for place in order_of(problem, role))


def on_gpu(problem: Problem, settings: Settings, *operands: Any) -> Any:
    if not settings.callback and "CUDA" in handlers()[0]:
        call = prepared(problem, settings)
        if call is not None:
            launch = jax.ffi.ffi_call(TARGETS["CUDA"], result_type(problem))
            return launch(*operands, handle=np.int64(call.handle), workspace_bytes=np.int64(call.workspace_bytes))
    if problem.device != "cpu":
        raise Unsupported(f"'{problem}' has no prepared call")
    return jax.pure_callback(runner(planned(problem, settings)), result_type(problem), *operands)


def lowered(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a platform: the call, cut along the axes in which its operands are sharded."""
    def rule(*operands: Any, problem: Problem, settings: Settings) -> Any:
        # NOTE: a callback inside a partitioned call crashes jaxlib 0.10, so such calls are not cut: XLA gathers.
        if not PARTITIONED or settings.callback or handlers()[1] is not None or not planned(problem, settings).numbers:
            return compute(problem, settings, *operands)
        return partitioned(compute, problem, settings)(*operands)

    return rule


PARTITIONED = tell_devices_to(FORMS)
register_lowering("cpu", lowered(on_cpu))
register_lowering("cuda", lowered(on_gpu))
