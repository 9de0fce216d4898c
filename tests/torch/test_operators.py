"""`torch.ops.convgrad`: opcheck, derivatives of every kind, torch.func, compile, export, tracing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cases import CASES, operands  # noqa: E402
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: E402

import convgrad.torch  # noqa: E402

ops = torch.ops.convgrad
F = torch.nn.functional
PLAIN = [name for name, case in CASES.items() if not case[2][3]]


def reference(x, w, b, stride, padding, dilation, transposed, output_padding, groups):
    """The same by PyTorch alone: padded copies, and zeros behind a transposed convolution."""
    axes = len(stride)
    pairs = [(p, p) for p in padding] if len(padding) == axes else list(zip(padding[::2], padding[1::2]))
    if not transposed:
        x = F.pad(x, [p for pair in reversed(pairs) for p in pair])
        return torch.convolution(x, w, b, stride, [0] * axes, dilation, False, [0] * axes, groups)
    y = torch.convolution(x, w, None, stride, [0] * axes, dilation, True, [0] * axes, groups)
    y = F.pad(y, [p for (low, high), more in reversed(list(zip(pairs, output_padding))) for p in (-low, more - high)])
    return y if b is None else y + b.reshape(-1, *[1] * axes)


def gradient_arguments(case: str, requires_grad: bool = True):
    x, w, b, *rest = operands(case, requires_grad=requires_grad)
    y = reference(x, w, b, *rest).detach()
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=y.dtype).requires_grad_(requires_grad)
    return dy, x, w, rest


@pytest.mark.parametrize("case", CASES)
def test_forward_and_all_gradients_are_those_of_torch(case: str) -> None:
    x, w, b, *rest = operands(case)
    ours, theirs = ops.convolution(x, w, b, *rest), reference(x, w, b, *rest)
    torch.testing.assert_close(ours, theirs)
    dy = torch.ones_like(theirs)
    for a, e in zip(torch.autograd.grad(ours, (x, w, b), dy), torch.autograd.grad(theirs, (x, w, b), dy)):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("case", CASES)
def test_opcheck_of_convolution_and_its_backward(case: str) -> None:
    arguments = operands(case)
    torch.library.opcheck(ops.convolution, arguments)
    dy, x, w, rest = gradient_arguments(case)
    for mask in ([True, True, True], [False, True, False]):
        torch.library.opcheck(ops.convolution_backward, (dy, x, w, [dy.shape[1]], *rest, mask))


@pytest.mark.parametrize("case", ["2d", "3d"])
def test_opcheck_of_single_gradients_and_channels_last(case: str) -> None:
    dy, x, w, rest = gradient_arguments(case)
    tail = (*rest[:3], rest[5])
    memory = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
    for first, second in ((x, w), (x.detach().to(memory_format=memory).requires_grad_(), w)):
        torch.library.opcheck(ops.convolution, (first, second, None, *rest))
        torch.library.opcheck(ops.convolution_backward, (dy, first, second, None, *rest, [True] * 3))
        torch.library.opcheck(ops.weight_grad, (dy, first, w.shape[2:], *tail))
    torch.library.opcheck(ops.input_grad, (dy, w, x.shape[2:], *tail))
    torch.library.opcheck(ops.input_grad, (dy.detach(), w.detach(), x.shape[2:], *tail, torch.float32))
    torch.library.opcheck(ops.bias_grad, (dy,))


@pytest.mark.parametrize("case", ["causal", "2d", "beyond"])
def test_gradcheck_forward_batched_and_second_order(case: str) -> None:
    x, w, b, *rest = operands(case)

    def layer(x, w, b):
        return ops.convolution(x, w, b, *rest)

    assert torch.autograd.gradcheck(layer, (x, w, b), check_forward_ad=True, check_batched_grad=True,
                                    check_batched_forward_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, (x, w, b), check_fwd_over_rev=True, check_rev_over_rev=True,
                                        fast_mode=True)


@pytest.mark.parametrize("name", ["input_grad", "weight_grad", "bias_grad"])
def test_gradcheck_of_single_gradients(name: str) -> None:
    dy, x, w, rest = gradient_arguments("2d")
    tail = (*rest[:3], rest[5])
    function, tensors = {
        "input_grad": (lambda dy, w: ops.input_grad(dy, w, x.shape[2:], *tail), (dy, w)),
        "weight_grad": (lambda dy, x: ops.weight_grad(dy, x, w.shape[2:], *tail), (dy, x)),
        "bias_grad": (ops.bias_grad, (dy,))}[name]
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def losses(case: str):
    """A function of input and weight with second and third derivatives, by our operator and by torch."""
    x, w, b, *rest = operands(case, requires_grad=False)
    return (lambda x, w: (ops.convolution(x, w, b, *rest) ** 3).sum(),
            lambda x, w: (reference(x, w, b, *rest) ** 3).sum(), x, w)


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
@pytest.mark.parametrize("inner", [jacfwd, jacrev])
@pytest.mark.parametrize("case", ["causal", "beyond"])
def test_second_derivatives_of_torch_func(case: str, inner, outer) -> None:
    ours, theirs, x, w = losses(case)
    for argnum in (0, 1):
        torch.testing.assert_close(outer(inner(ours, argnum), argnum)(x, w), outer(inner(theirs, argnum), argnum)(x, w))


def test_third_derivatives_and_hessian_vector_products() -> None:
    ours, theirs, x, w = losses("causal")
    direction = torch.ones_like(w)

    def third(loss):
        one = lambda w: jvp(lambda v: loss(x, v), (w,), (direction,))[1]  # noqa: E731
        two = lambda w: jvp(one, (w,), (direction,))[1]  # noqa: E731
        return jvp(two, (w,), (direction,))[1]

    torch.testing.assert_close(third(ours), third(theirs))
    products = [jvp(grad(lambda v, loss=loss: loss(x, v)), (w,), (direction,))[1] for loss in (ours, theirs)]
    torch.testing.assert_close(*products)
    torch.testing.assert_close(hessian(ours, 1)(x, w), hessian(theirs, 1)(x, w))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 1), (0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_vmap_over_input_weight_and_both(case: str, in_dims) -> None:
    ours, theirs, x, w = losses(case)
    many = [t if dim is None else torch.stack([t, 2 * t, -t], dim) for t, dim in zip((x, w), in_dims)]
    for argnums in (0, 1):
        found, right = (vmap(grad(loss, argnums), in_dims)(*many) for loss in (ours, theirs))
        torch.testing.assert_close(found, right)


def test_per_sample_gradients_of_a_model() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(module.Conv2d(2, 4, 3, padding=1, groups=2), torch.nn.ReLU(),
                                  module.ConvTranspose2d(4, 2, 2, stride=2)).double()
              for module in (convgrad.torch, torch.nn)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    found = []
    for model in layers:
        parameters = dict(model.named_parameters())
        loss = lambda p, x, model=model: functional_call(model, p, (x[None],)).square().sum()  # noqa: E731
        found.append(vmap(grad(loss), (None, 0))({k: v.detach() for k, v in parameters.items()}, x))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name])


@pytest.mark.parametrize("case", ["2d", "beyond"])
def test_compiled_in_one_graph_with_both_passes(case: str) -> None:
    ours, _, x, w = losses(case)
    for function in (lambda x, w: ours(x, w),
                     lambda x, w: grad(ours)(x, w).sum(),
                     lambda x, w: jvp(lambda x: ours(x, w), (x,), (x,))[1]):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        eager = torch.autograd.grad(function(*leaves), leaves)
        for a, e in zip(torch.autograd.grad(compiled(*leaves), leaves), eager):
            torch.testing.assert_close(a, e)


def test_compiled_jvp_and_nested_jacfwd_lose_nothing() -> None:
    """Where operators by `torch.library.register_autograd` answer zero in silence."""
    ours, theirs, x, w = losses("causal")
    compiled = torch.compile(lambda x: jvp(lambda x: ours(x, w), (x,), (x,))[1], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), jvp(lambda x: theirs(x, w), (x,), (x,))[1])
    twice = torch.compile(lambda w: jacfwd(jacfwd(ours, 1), 1)(x, w), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(twice(w), hessian(theirs, 1)(x, w))


def test_dynamic_shapes_need_one_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    _, w, b = operands("2d", requires_grad=False)[:3]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: convgrad.torch.conv(x, w, b, padding=[(1, 0), (0, 2)], groups=2),
                             backend=counter, dynamic=True, fullgraph=True)
    for height in (7, 9, 12):
        x = torch.randn(2, 4, height, height + 1, dtype=torch.float64, requires_grad=True)
        compiled(x).sum().backward()
        expected = reference(x, w, b, [1, 1], [1, 0, 0, 2], [1, 1], False, [0, 0], 2)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(x.grad, torch.autograd.grad(expected.sum(), x)[0])
    assert counter.frame_count == 1


def test_export_holds_the_operator_and_any_batch() -> None:
    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = convgrad.torch.CausalConv1d(3, 4, 3)

        def forward(self, x):
            return self.layer(x)

    model, x = Causal(), torch.randn(2, 3, 7)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert any(node.target is ops.convolution.default for node in program.graph.nodes)
    wide = torch.randn(5, 3, 7)
    torch.testing.assert_close(program.module()(wide), model(wide))


def test_make_fx_records_operators_and_no_memory() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    ours, _, x, w = losses("2d")
    for traced in (make_fx(grad(ours, (0, 1)))(x, w),
                   make_fx(lambda x, w: torch.autograd.grad(ours(x, w), (x, w)))(
                       x.clone().requires_grad_(), w.clone().requires_grad_())):
        names = {str(node.target) for node in traced.graph.nodes}
        assert "convgrad.convolution_backward.default" in names and not any("empty" in name for name in names)
        more = (2 * x, w - 1)
        for a, e in zip(traced(*[t.clone().requires_grad_() for t in more]), grad(ours, (0, 1))(*more)):
            torch.testing.assert_close(a, e)


def test_meta_and_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    x, w, b, *rest = operands("2d", requires_grad=False)
    shape = reference(x, w, b, *rest).shape
    assert ops.convolution(x.to("meta"), w.to("meta"), b.to("meta"), *rest).shape == shape
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, w, b)]
        assert ops.convolution(*fakes, *rest).shape == shape


def test_flops_are_counted_as_torch_counts_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w = (torch.randn(shape, requires_grad=True) for shape in ((2, 4, 6, 5), (4, 3, 3, 2)))
    for transposed, channels in ((False, 4), (True, 3)):
        counts = []
        for convolution in (ops.convolution, torch.convolution):
            with FlopCounterMode(display=False) as counter:
                y = convolution(x[:, :w.shape[0] if transposed else w.shape[1]], w, None, [2, 1], [1, 1], [1, 1],
                                transposed, [0, 0], 1)
                y.sum().backward()
            counts.append(counter.get_total_flops())
        assert y.shape[1] == channels and counts[0] == counts[1] > 0
