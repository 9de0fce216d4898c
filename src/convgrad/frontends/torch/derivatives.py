"""Derivatives of the operators, of every order, in reverse and in forward mode.

A convolution is bilinear, and so is each of its gradients: the derivative of one operator is another. Each operator has
an `autograd.Function`, called by the operator's own Autograd kernel. So its derivative is found where PyTorch looks for
those of its own operators: in eager mode, under torch.func at any depth, in what torch.compile and export trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .geometry import Geometry, plain
from .operators import library, ops

Grads = tuple[Tensor | None, ...]  # one for every differentiated tensor, or for every result
Saved = tuple[Tensor, ...]
Rest = tuple[Any, ...]  # arguments behind the tensors
Backward = Callable[[Grads, Saved, Rest, Sequence[bool]], Grads]
Tangent = Callable[[Grads, Saved, Rest], Any]
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
functorch: Any = torch._C._functorch


@contextlib.contextmanager
def outer_levels() -> Iterator[None]:
    """Let the transforms around this one see what is computed, but not this one, whose derivative is ours.

    `Function` turns off recording for all levels of torch.func, where only the innermost has to be left out.
    """
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below_autograd():
        yield


def differentiable(name: str, tensors: int, saved: int, backward: Backward, tangent: Tangent) -> None:
    """Give an operator its derivatives: of its leading `tensors`, from the first `saved` of them and the arguments
    behind the tensors."""
    operator = getattr(ops, name).default

    class Derivative(Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            with outer_levels() if torch._C._are_functorch_transforms_active() else below_autograd():
                return operator(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[:saved])
            if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
                ctx.save_for_forward(*inputs[:saved])
            ctx.rest = inputs[tensors:]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            wanted = ctx.needs_input_grad[:tensors]
            return (*backward(grads, ctx.saved_tensors, ctx.rest, wanted), *[None] * len(ctx.rest))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            # At the outermost level PyTorch records what this computes; a level of torch.func must not see itself.
            with outer_levels() if torch._C._are_functorch_transforms_active() else contextlib.nullcontext():
                return tangent(tangents[:tensors], ctx.saved_tensors, ctx.rest)

    def kernel(*arguments: Any) -> Any:
        if not recording(arguments[:tensors]):
            with below_autograd():
                return operator(*arguments)
        # Function.apply would hand this to torch.func, which has done its part already: it has called this kernel.
        apply = super(Function, Derivative).apply  # type: ignore[misc]
        allowed = functorch.get_single_level_autograd_function_allowed()
        functorch.set_single_level_autograd_function_allowed(True)
        try:
            return apply(*arguments)
        finally:
            functorch.set_single_level_autograd_function_allowed(allowed)

    Derivative.__name__ = Derivative.__qualname__ = f"{name}_derivative"
    library.impl(name, kernel, "Autograd")


def recording(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether anyone may ask for a derivative."""
    return (torch.is_grad_enabled() and any([one is not None and one.requires_grad for one in tensors])) or \
        forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active() or \
        torch._C._len_torch_dispatch_stack() > 0


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms that there are."""
    found = [term for term in terms if term is not None]
    return sum(found[1:], found[0]) if found else None


def over_channels(bias: Tensor, shape: Sequence[int]) -> Tensor:
    return bias.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)


# --- convolution ------------------------------------------------------------------------------------------------------

def convolution_backward(grads: Grads, saved: Saved, rest: Rest, wanted: Sequence[bool]) -> Grads:
    (grad,), (input, weight) = grads, saved
    if grad is None:
        return (None, None, None)
    found: Grads = ops.convolution_backward(grad, input, weight, [grad.shape[1]], *rest, list(wanted))
    return found


def convolution_tangent(tangents: Grads, saved: Saved, rest: Rest) -> Tensor | None:
    (of_input, of_weight, of_bias), (input, weight) = tangents, saved
    found = total(None if of_input is None else ops.convolution(of_input, weight, None, *rest),
                  None if of_weight is None else ops.convolution(input, of_weight, None, *rest))
    if of_bias is None:
        return found
    if found is None:
        geometry = Geometry(*rest)
        size = geometry.output_size(input.shape[2:], weight.shape[2:])
        return over_channels(of_bias, (input.shape[0], of_bias.shape[0], *size)).contiguous()
    return found + over_channels(of_bias, found.shape)


# --- all gradients at once --------------------------------------------------------------------------------------------

def one_gradient(place: int, grad_output: Tensor, input: Tensor, weight: Tensor, rest: Rest) -> Tensor:
    """The gradient with respect to input (0), weight (1) or bias (2); other arguments only say how large they are."""
    mask = [place == other for other in range(3)]
    found = ops.convolution_backward(grad_output, input, weight, [grad_output.shape[1]], *rest[:-1], mask)
    return found[place]  # type: ignore[no-any-return]


def gradients_backward(grads: Grads, saved: Saved, rest: Rest, wanted: Sequence[bool]) -> Grads:
    (of_dx, of_dw, of_db), (grad_output, input, weight) = grads, saved
    rest = rest[1:]  # without bias_sizes
    geometry = rest[:-1]
    terms = (None if of_dx is None else ops.convolution(of_dx, weight, None, *geometry),
             None if of_dw is None else ops.convolution(input, of_dw, None, *geometry),
             None if of_db is None else over_channels(of_db, grad_output.shape)) if wanted[0] else ()
    return (total(*terms),
            one_gradient(0, grad_output, input, of_dw, rest) if wanted[1] and of_dw is not None else None,
            one_gradient(1, grad_output, of_dx, weight, rest) if wanted[2] and of_dx is not None else None)


def gradients_tangent(tangents: Grads, saved: Saved, rest: Rest) -> Grads:
    (of_dy, of_input, of_weight), (grad_output, input, weight) = tangents, saved
    rest = rest[1:]
    found = (
        total(None if of_dy is None else one_gradient(0, of_dy, input, weight, rest),
              None if of_weight is None else one_gradient(0, grad_output, input, of_weight, rest)),
        total(None if of_dy is None else one_gradient(1, of_dy, input, weight, rest),
              None if of_input is None else one_gradient(1, grad_output, of_input, weight, rest)),
        None if of_dy is None else one_gradient(2, of_dy, input, weight, rest))
    bias = grad_output.new_empty((grad_output.shape[1],))
    return tuple(None if not asked else tangent if tangent is not None else torch.zeros_like(result)
                 for tangent, asked, result in zip(found, rest[-1], (input, weight, bias)))


# --- single gradients -------------------------------------------------------------------------------------------------
# Behind the tensors: size, stride, padding, dilation, groups and perhaps out_dtype.

def forward_of(input: Tensor, weight: Tensor, rest: Rest) -> Tensor:
    found: Tensor = ops.convolution(input, weight, None, *plain(*rest[1:5]))
    return found


def input_grad_backward(grads: Grads, saved: Saved, rest: Rest, wanted: Sequence[bool]) -> Grads:
    (grad,), (grad_output, weight) = grads, saved
    if grad is None:
        return (None, None)
    grad = grad.to(weight.dtype)
    return (forward_of(grad, weight, rest) if wanted[0] else None,
            ops.weight_grad(grad_output, grad, weight.shape[2:], *rest[1:5]) if wanted[1] else None)


def weight_grad_backward(grads: Grads, saved: Saved, rest: Rest, wanted: Sequence[bool]) -> Grads:
    (grad,), (grad_output, input) = grads, saved
    if grad is None:
        return (None, None)
    grad = grad.to(input.dtype)
    return (forward_of(input, grad, rest) if wanted[0] else None,
            ops.input_grad(grad_output, grad, input.shape[2:], *rest[1:5]) if wanted[1] else None)


def bilinear_tangent(operator: Any) -> Tangent:
    def tangent(tangents: Grads, saved: Saved, rest: Rest) -> Tensor | None:
        (of_first, of_second), (first, second) = tangents, saved
        return total(None if of_first is None else operator(of_first, second, *rest),
                     None if of_second is None else operator(first, of_second, *rest))

    return tangent


def bias_grad_backward(grads: Grads, saved: Saved, rest: Rest, wanted: Sequence[bool]) -> Grads:
    (grad,), (grad_output,) = grads, saved
    return (None if grad is None else over_channels(grad.to(grad_output.dtype), grad_output.shape),)


def bias_grad_tangent(tangents: Grads, saved: Saved, rest: Rest) -> Tensor | None:
    return None if tangents[0] is None else ops.bias_grad(tangents[0], *rest)  # type: ignore[no-any-return]


differentiable("convolution", 3, 2, convolution_backward, convolution_tangent)
differentiable("convolution_backward", 3, 3, gradients_backward, gradients_tangent)
differentiable("input_grad", 2, 2, input_grad_backward, bilinear_tangent(ops.input_grad))
differentiable("weight_grad", 2, 2, weight_grad_backward, bilinear_tangent(ops.weight_grad))
differentiable("bias_grad", 1, 1, bias_grad_backward, bias_grad_tangent)
