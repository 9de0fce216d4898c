"""aten::convolution_backward on CUDA: every tensor's address in its place of a prepared call."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import COMPILER, FakeDriver  # noqa: E402

from convgrad import _native, plan  # noqa: E402
from convgrad.frontends.torch.aten_backward import DB, DW, DX, DY, BackwardCall, W, X, compute_on_cuda  # noqa: E402
from convgrad.frontends.torch.cuda_backward import new_results, places_of, while_as_exact  # noqa: E402
from convgrad.frontends.torch.tensors import TorchFunctions, empty_cpu, signature  # noqa: E402

needs_exchange = pytest.mark.skipif(COMPILER is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
                                    reason="no C++ compiler, or a torch before 2.10")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


def test_places_of_a_plans_tensors() -> None:
    def places(text: str, transposed: bool = False) -> list[int]:
        return places_of(plan(text, backend="reference"), transposed)

    sizes = "f32 n1 c2 k3 i5 w2"
    assert places(f"input_grad+weight_grad+bias_grad {sizes}") == [DY, X, W, DX, DW, DB]
    assert places(f"weight_grad {sizes}") == [DY, X, DW]
    assert places(f"bias_grad {sizes}") == [DY, DB]
    assert places(f"conv {sizes}", transposed=True) == [DY, W, DX], "dx is a convolution of dy"
    assert places(f"weight_grad {sizes}", transposed=True) == [X, DY, DW], "and dw exchanges them"
    assert places(f"bias_grad {sizes}", transposed=True) == [DY, DB]


class Torch:
    """Stands for torch's CUDA functions, on the CPU."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.freed: list[int] = []
        self.device = 0

    def functions(self) -> TorchFunctions:
        return TorchFunctions(empty_cpu, lambda size, stream: self.allocated.append(size) or 4096,
                              self.freed.append, lambda: self.device, lambda device: 7)


ARGUMENTS = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])


def tensors() -> tuple[Any, Any, Any]:
    return torch.zeros(2, 4, 5, 5), torch.zeros(2, 3, 5, 5), torch.zeros(4, 3, 3, 3)


def table(driver: FakeDriver, fake: Torch, allowed: Any = None) -> Any:
    """The registered kernel: one launch that takes all tensors and the workspace."""
    driver.kernel_parameters("all", 6)
    call = driver.call(5)
    call.add_launch(_native.GpuKernel("all", b"code", threads=128, shared_bytes=0), (1, 1, 1))
    for slot in range(6):
        call.add_pointer(slot, 0)
    call.workspace_bytes = 600
    results = new_results(BackwardCall(*tensors(), *ARGUMENTS))
    assert results[2] is None, "the mask leaves it out"
    served = _native.CudaBackward([(call, [DY, X, W, DX, DW])], results, fake.functions(),
                                  lambda keys, *arguments: "otherwise", allowed)
    return _native.TorchBackward(lambda *arguments: (served, _native.Tally()), torch.Tensor, torch.nn.Parameter)


@needs_exchange
def test_addresses_results_stream_and_workspace(driver: FakeDriver) -> None:
    fake = Torch()
    kernel = table(driver, fake)
    driver.lines()
    for _ in range(2):
        given = tensors()
        dx, dw, db = kernel(None, *given, *ARGUMENTS)
        (line,) = driver.launches()
        addresses = " ".join(str(tensor.data_ptr()) for tensor in (*given, dx, dw))
        assert line.endswith(f" stream 7 context 100 with {addresses} 4096")
        assert dx.shape == (2, 3, 5, 5) and dw.shape == (4, 3, 3, 3) and db is None
    assert fake.allocated == [600, 600] and fake.freed == [4096, 4096]


@needs_exchange
def test_other_devices_and_unaligned_tensors_are_served_otherwise(driver: FakeDriver) -> None:
    fake = Torch()
    kernel = table(driver, fake)
    dy, x, w = tensors()
    shifted = torch.zeros(dy.numel() + 1)[1:].view(dy.shape)
    assert kernel(None, shifted, x, w, *ARGUMENTS) == "otherwise"
    fake.device = 1
    assert kernel(None, dy, x, w, *ARGUMENTS) == "otherwise"
    assert not fake.allocated


@needs_exchange
def test_a_call_is_served_while_that_is_allowed(driver: FakeDriver) -> None:
    answers = [True, False, True]
    kernel = table(driver, Torch(), lambda: answers.pop(0))
    served = [kernel(None, *tensors(), *ARGUMENTS) for _ in range(3)]
    assert [one == "otherwise" for one in served] == [False, True, False]


def test_float32_is_as_exact_as_torch_wants_it_now() -> None:
    call = BackwardCall(*tensors(), *ARGUMENTS)
    for rounded in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=rounded):
            assert compute_on_cuda(call) == ("tf32" if rounded else "")
            as_now = while_as_exact(call)
            assert as_now() is True
        with torch.backends.cudnn.flags(allow_tf32=not rounded):
            assert as_now() is False
    half = call._replace(input=call.input.half())
    assert while_as_exact(half) is None and compute_on_cuda(half) == ""


@needs_exchange
def test_a_failed_launch_frees_the_workspace(driver: FakeDriver) -> None:
    fake = Torch()
    kernel = table(driver, fake)
    driver.fail("cuLaunchKernelEx", 700)
    with pytest.raises(RuntimeError, match="launch of kernel all of 'the problem': CUDA error 700"):
        kernel(None, *tensors(), *ARGUMENTS)
    assert fake.freed == [4096]


@needs_exchange
def test_a_repeated_call_makes_its_results(driver: FakeDriver) -> None:
    fake = Torch()
    driver.kernel_parameters("pair", 3)
    call = driver.call(3)
    call.add_launch(_native.GpuKernel("pair", b"code", threads=128, shared_bytes=0), (1, 1, 1))
    for slot in range(3):
        call.add_pointer(slot, 0)
    repeat = _native.CudaRepeat([(call, [0, 1, 2])], [((2, 3), (1, 2), torch.float64)], fake.functions(), torch.Tensor)
    x, w = torch.zeros(4), torch.nn.Parameter(torch.zeros(4))
    driver.lines()
    (result,) = repeat({"x": x, "w": w}.values())
    assert driver.launches()[0].endswith(f"with {x.data_ptr()} {w.data_ptr()} {result.data_ptr()}")
    assert (tuple(result.shape), result.stride(), result.dtype) == ((2, 3), (1, 2), torch.float64)
    assert repeat([torch._neg_view(x), w]) is None and repeat([torch.zeros(5)[1:], w]) is None
    fake.device = 3
    assert repeat([x, w]) is None and not driver.launches() and not fake.allocated, "no workspace is needed"


@needs_exchange
def test_signatures_differ_where_plans_may() -> None:
    x = torch.zeros(2, 4, 6)
    alike = [x, torch.zeros(2, 4, 6), torch.nn.Parameter(x)]
    others = [torch.zeros(2, 6, 4), torch.zeros(2, 6, 4).transpose(1, 2), x.double(), x.half(), x.bfloat16(), x.byte(),
              x.view(2, 4, 6, 1), x.to("meta"), x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)]
    assert len({signature({"x": one}) for one in alike}) == 1
    assert len({signature({"x": one}) for one in (x, *others)}) == 1 + len(others)
    assert signature({"x": x}) != signature({"x": x, "w": x})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_gradients_of_layers_are_exact(transposed: bool, last: bool, dtype: Any) -> None:
    from convgrad.torch import installed

    layer_type = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer = layer_type(64, 32, 3, stride=2, padding=1)
    generator = torch.Generator().manual_seed(1)

    def whole(shape: Any) -> Any:
        return torch.randint(-2, 3, tuple(shape), generator=generator).float()

    for parameter in layer.parameters():
        parameter.data = whole(parameter.shape)
    x = whole((4, 64, 9, 9)).requires_grad_()
    y = layer(x)
    dy = whole(y.shape)
    y.backward(dy)
    wanted = [grad.clone() for grad in (x.grad, layer.weight.grad, layer.bias.grad)]  # `to` moves a layer's own
    layer.to("cuda", dtype)
    memory_format = torch.channels_last if last else torch.contiguous_format
    layer.to(memory_format=memory_format)
    with installed():
        for _ in range(3):
            layer.zero_grad()
            on_gpu = x.detach().to("cuda", dtype).to(memory_format=memory_format).requires_grad_()
            layer(on_gpu).backward(dy.to("cuda", dtype).to(memory_format=memory_format))
            for got, exact in zip((on_gpu.grad, layer.weight.grad, layer.bias.grad), wanted):
                assert torch.equal(got.cpu(), exact.to(dtype))
