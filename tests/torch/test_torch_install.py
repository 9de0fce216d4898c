"""`convgrad.torch.install()`: our gradients behind aten::convolution_backward."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import convgrad
import convgrad.torch

torch = pytest.importorskip("torch")
native = pytest.importorskip("convgrad._native")
F = torch.nn.functional

BACKWARD = torch.ops.aten.convolution_backward.default
WAYS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED_WAYS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    convgrad.torch.report(reset=True)
    before = torch._C._dispatch_dump("aten::convolution_backward")
    yield
    assert torch._C._dispatch_dump("aten::convolution_backward") == before


def whole(shape: tuple[int, ...], dtype: Any = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: sums are exact in any order, so two right kernels agree to the bit."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def served() -> dict[str, str]:
    return {line.geometry: line.served_by for line in convgrad.torch.report()}


def arguments(rank: int, transposed: bool = False, groups: int = 1, dtype: Any = torch.float32,
              **options: int) -> tuple[Any, ...]:
    """A call of the operator that is right for a small layer."""
    stride, padding, dilation = (options.get(name, usual) for name, usual in (("stride", 1), ("padding", 1),
                                                                             ("dilation", 1)))
    extra = options.get("output_padding", 0)
    x = whole((2, 4, *(5, 6, 4)[:rank]), dtype, 1)
    w = whole(((4, 6 // groups) if transposed else (6, 4 // groups)) + (3, 2, 3)[:rank], dtype, 2)
    if transposed:
        y = TRANSPOSED_WAYS[rank](x, w, None, stride, padding, extra, groups, dilation)
    else:
        y = WAYS[rank](x, w, None, stride, padding, dilation, groups)
    return (whole(tuple(y.shape), dtype, 3), x, w, [6], [stride] * rank, [padding] * rank, [dilation] * rank,
            transposed, [extra] * rank, groups, [True, True, True])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_are_torchs(rank: int, transposed: bool, dtype: Any) -> None:
    for options in ({}, {"groups": 2}, {"stride": 2, "output_padding": int(transposed)}, {"dilation": 2, "padding": 2}):
        call = arguments(rank, transposed, dtype=dtype, **options)
        for mask in ([True, True, True], [True, False, False], [False, True, False], [False, False, True],
                     [False, True, True], [True, True, False]):
            theirs = BACKWARD(*call[:-1], mask)
            with convgrad.torch.installed():
                ours = BACKWARD(*call[:-1], mask)
            for one, other, wanted in zip(ours, theirs, mask):
                assert (one is None) == (not wanted)
                if wanted:
                    assert torch.equal(one, other), (options, mask)
                    assert one.stride() == other.stride() and one.dtype == other.dtype
    assert set(served().values()) == {"native"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_strides_are_torchs(rank: int, transposed: bool) -> None:
    """Inductor asserts the strides that torch predicts: channels last where input or weight is, whatever dy is."""
    def laid_out(tensor: torch.Tensor, way: int) -> torch.Tensor:
        if way == 0 or rank == 1:
            return tensor if way == 0 else tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return tensor.contiguous(memory_format=torch.channels_last if rank == 2 else torch.channels_last_3d)

    dy, x, w, *rest = arguments(rank, transposed)
    for ways in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (1, 1, 1)):
        operands = [laid_out(tensor, way) for tensor, way in zip((dy, x, w), ways)]
        theirs = BACKWARD(*operands, *rest)
        with convgrad.torch.installed():
            ours = BACKWARD(*operands, *rest)
        for one, other in zip(ours, theirs):
            assert torch.equal(one, other)
            assert one.stride() == other.stride(), ways


def test_strides_zero_and_views() -> None:
    """The gradient of a sum has stride 0 everywhere; slices have gaps."""
    layer = torch.nn.Conv2d(3, 4, 3, padding=1)
    x = whole((2, 6, 9, 12))[:, ::2, 1:8, ::2].requires_grad_()
    layer.weight.data.copy_(whole((4, 3, 3, 3)))
    expected = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    with convgrad.torch.installed():
        got = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(got, expected))
    assert set(served().values()) == {"native"}


def test_torch_serves_what_we_do_not_know() -> None:
    dy, x, w, *rest = arguments(2)
    mixed = (dy, x, w.double(), *rest)
    empty = (dy[:0], x[:0], w, *rest)
    with pytest.raises(RuntimeError) as before:
        BACKWARD(*mixed)
    expected = BACKWARD(*empty)
    with convgrad.torch.installed():
        with pytest.raises(RuntimeError) as under:
            BACKWARD(*mixed)
        got = BACKWARD(*empty)
        layer = torch.nn.Conv2d(2, 2, 2, dtype=torch.complex64)
        layer(torch.ones(1, 2, 3, 3, dtype=torch.complex64)).abs().sum().backward()
    assert str(before.value) == str(under.value)
    assert all(torch.equal(one, other) for one, other in zip(got, expected))
    whys = {line.why for line in convgrad.torch.report() if line.served_by == "torch"}
    assert "an empty tensor" in whys


def test_output_padding_at_the_stride() -> None:
    """PyTorch allows it below the dilation."""
    wide = arguments(2, True, stride=1, dilation=2, output_padding=1)
    expected = BACKWARD(*wide)
    with convgrad.torch.installed():
        got = BACKWARD(*wide)
    assert all(torch.equal(one, other) for one, other in zip(got, expected))
    assert any("output_padding" in line.why for line in convgrad.torch.report())


def test_torch_serves_what_it_computes_faster() -> None:
    """The input gradient goes to torch by the rule, the weight's stays ours; each is exact here, whoever serves it."""
    convgrad.set_num_threads(2)
    try:
        dy, x, w = whole((4, 24, 8, 8, 8), seed=1), whole((4, 24, 8, 8, 8), seed=2), whole((24, 24, 3, 3, 3), seed=3)
        rest = ([24], [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
        for mask in ([True, True, True], [True, False, False], [False, True, True]):
            expected = BACKWARD(dy, x, w, *rest, mask)
            with convgrad.torch.installed():
                got = BACKWARD(dy, x, w, *rest, mask)
            for one, other in zip(got, expected):
                assert (one is None and other is None) or torch.equal(one, other)
        rows = {line.geometry.split()[0]: line for line in convgrad.torch.report()}
        if "avx512" in native.isa():
            assert rows["input"].served_by == "torch" and rows["input"].why.startswith("faster in torch: f32 input")
            assert [line.calls for line in rows.values()] == [2, 2]
    finally:
        convgrad.set_num_threads(0)

def test_wrong_arguments_get_torchs_error() -> None:
    dy, x, w, *rest = arguments(2)
    with pytest.raises(RuntimeError) as before:
        BACKWARD(dy[:, :, 1:], x, w, *rest)
    with convgrad.torch.installed(), pytest.raises(RuntimeError) as under:
        BACKWARD(dy[:, :, 1:], x, w, *rest)
    assert str(before.value) == str(under.value)


def test_without_the_c_interface_of_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.10: the same gradients through a table in Python and the public functions."""
    from convgrad.frontends.torch import registration, serving

    for module in (registration, serving):
        monkeypatch.setattr(module, "has_c_exchange", lambda: False)
    table = registration.new_table(registration.registration.desk.prepare)
    assert isinstance(table, registration.PythonTable)
    monkeypatch.setattr(registration.registration, "kernel", table)
    for call in (arguments(2), arguments(3, True, stride=2, output_padding=1)):
        expected = BACKWARD(*call)
        with convgrad.torch.installed():
            got = BACKWARD(*call)
        for one, other in zip(got, expected):
            assert torch.equal(one, other) and one.stride() == other.stride()
    assert set(served().values()) == {"native"}


def test_installs_nest() -> None:
    call = arguments(2)
    convgrad.torch.install()
    with convgrad.torch.installed():
        BACKWARD(*call)
    BACKWARD(*call)
    convgrad.torch.uninstall()
    BACKWARD(*call)
    assert [line.calls for line in convgrad.torch.report()] == [2]
    with pytest.raises(RuntimeError, match=r"uninstall\(\) without an install\(\)"):
        convgrad.torch.uninstall()


def test_overrides_end_last_in_first_out() -> None:
    call = arguments(2)
    convgrad.torch.install()
    later = torch.library.Library("aten", "IMPL")
    beneath = torch.library.get_kernel("aten::convolution_backward", "CPU")
    later.impl("convolution_backward", lambda keys, *rest: beneath.call_boxed(keys, *rest), "CPU", with_keyset=True)
    with pytest.raises(RuntimeError, match="last in, first out"):
        convgrad.torch.uninstall()
    BACKWARD(*call)
    later._destroy()
    convgrad.torch.uninstall()
    assert [line.calls for line in convgrad.torch.report()] == [1]


def test_subclasses_of_tensor() -> None:
    class Marked(torch.Tensor):
        pass

    dy, x, w, *rest = arguments(2)
    expected = BACKWARD(dy, x, w, *rest)
    with convgrad.torch.installed():
        got = BACKWARD(dy.as_subclass(Marked), x.as_subclass(Marked), torch.nn.Parameter(w), *rest)
    assert all(torch.equal(one, other) for one, other in zip(got, expected))
    assert served() and set(served().values()) == {"native"}


def test_negative_views() -> None:
    z = torch.complex(whole((1, 2, 4, 4)), whole((1, 2, 4, 4), seed=5))
    w = whole((3, 2, 3, 3)).requires_grad_()
    negative = torch.conj(z).imag
    assert negative.is_neg()
    (expected,) = torch.autograd.grad(F.conv2d(negative, w).sum(), w)
    with convgrad.torch.installed():
        (got,) = torch.autograd.grad(F.conv2d(negative, w).sum(), w)
    assert torch.equal(got, expected)


def test_storages_stay_resizable() -> None:
    dy, x, w, *rest = arguments(2)
    with convgrad.torch.installed():
        results = BACKWARD(dy, x, w, *rest)
    for tensor in (dy, x, w, *results):
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conv_tbc(dtype: Any) -> None:
    """16-bit gradients are ours, wide ones torch's; second derivatives go by torch's composition."""
    x, w, b = (whole(shape, dtype, seed).requires_grad_() for seed, shape in enumerate([(7, 2, 4), (3, 4, 6), (6,)]))

    def gradients() -> list[torch.Tensor]:
        first = torch.autograd.grad(torch.conv_tbc(x, w, b, 1).sum(), (x, w, b))
        again = torch.autograd.grad(torch.conv_tbc(x, w, b, 1).square().sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(again[0].sum() + again[1].sum(), (x, w))]

    expected = gradients()
    with convgrad.torch.installed():
        got = gradients()
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.5)
        assert one.stride() == other.stride()
    assert all(torch.equal(one, other) for one, other in zip(got[:3], expected[:3]))
    who = {line.served_by for line in convgrad.torch.report()}
    assert who == ({"native", "torch"} if dtype == torch.bfloat16 else {"torch"})


def test_same_bits_for_any_number_of_threads() -> None:
    draw = torch.Generator().manual_seed(0)
    layer = torch.nn.Conv2d(24, 40, 3, padding=1)
    x = torch.randn(4, 24, 17, 19, generator=draw).requires_grad_()
    before = torch.get_num_threads()
    found = []
    try:
        with convgrad.torch.installed():
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                dy = torch.randn(4, 40, 17, 19, generator=torch.Generator().manual_seed(1))
                found.append(torch.autograd.grad(layer(x), [x, *layer.parameters()], dy))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other))


def test_a_thousand_steps_do_not_grow() -> None:
    script = """
        import resource, torch, convgrad.torch
        torch.set_num_threads(1)
        layer = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(8, 4, 3))
        def steps(count):
            for _ in range(count):
                layer(torch.ones(2, 4, 12, 12)).square().sum().backward()
                layer.zero_grad()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with convgrad.torch.installed():
            before = steps(200)
            after = steps(1000)
        assert after - before < 4096, (before, after)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
