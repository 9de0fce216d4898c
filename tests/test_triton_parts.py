"""float32 on 16-bit tensor cores: splitting into parts in the interpreter, sums of products of parts on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import check_bound, check_exact, check_nonfinite
from triton_here import DEVICE, integers_on_gpu, needs_gpu, needs_triton, torch

from convgrad import Problem
from convgrad.plan import clear_plan_cache, plan

GEOMETRIES = (
    "n3 c16 k24 i5x6 w3x3 p1x1 NHWC OHWI",
    "n5 c64 k32 i9x8 w3x3 s2x2 p1x1 NHWC OHWI",
    "n3 c32 k64 i9x8 w3x3 p1x1 NCHW OIHW",
    "n2 c16 k16 i4x5x6 w3x2x3 p1x0x1 NDHWC ODHWI",
    "n9 c24 k16 i17 w3 d4 p8:0 NLC OLI",
    "n2 c64 k64 i6x7 w3x3 p3x3 d3x2 g2 NHWC OHWI",
    "n2 c16 k16 i70x20 w3x3 s2x1 p1x1 NHWC OHWI",
    "n4 c32 k64 i9x8 w1x1 s2x3 NHWC OHWI",
)
# sums so long that three products keep the bound
STACKED = ("n8 c3 k16 i64x64 w3x3 p1x1 NHWC OHWI", "n19 c4 k64 i128x128 w7x7 s2x2 p3x3 NHWC OHWI",
           "n8 c3 k16 i64x64 w3x3 p1x1 NCHW OIHW")  # by four products, three, four


@needs_triton
@pytest.mark.parametrize("part_count", [2, 3])
def test_parts_hold_the_number(part_count: int) -> None:
    from convgrad.backends.triton.part_copies import split_step

    values = np.random.default_rng(1).standard_normal((3, 8, 5)).astype(np.float32)
    values.reshape(-1)[:7] = (np.inf, -np.inf, np.nan, 3.4e38, -1e-45, 1e-40, 0.0)
    stored = torch.empty(part_count * 4 * 5 * 8, dtype=torch.bfloat16, device=DEVICE)
    split_step(part_count, 4, (1, 1, 5))(torch.from_numpy(values).to(DEVICE), stored)
    parts = stored.float().cpu().numpy().astype(np.float64).reshape(part_count, 4, 5, 8).transpose(0, 1, 3, 2)
    assert (parts[:, 3] == 0).all(), "images beyond the last are zeros"
    first, rest = parts[0, :3], parts[1:, :3].sum(0)
    finite = np.isfinite(values)
    assert (np.isnan(first) == np.isnan(values)).all() and (first[np.isinf(values)] == values[np.isinf(values)]).all()
    assert (rest[~finite] == 0).all() and ((first == 0) == (values == 0)).all()
    error = np.abs(parts[:, :3].sum(0)[finite] - values[finite])
    assert (error <= np.abs(values[finite]) * 2.0**(-16 if part_count == 2 else -24) + 2.0**-133).all()
    # a block that begins before the first row and ends behind the last one has zeros there
    block = torch.empty(part_count * 3 * 9 * 8, dtype=torch.bfloat16, device=DEVICE)
    split_step(part_count, 3, (1, 1, 9), 2, -2)(torch.from_numpy(values).to(DEVICE), block)
    rows = block.float().cpu().numpy().astype(np.float64).reshape(part_count, 3, 9, 8).transpose(0, 1, 3, 2)
    assert np.array_equal(rows[..., 2:7], parts[:, :3], equal_nan=True) and not rows[..., [0, 1, 7, 8]].any()


def stack_products(values: list[np.ndarray], products: int) -> np.ndarray:
    """The sums of the products of two stacks of parts."""
    from convgrad.backends.triton.part_copies import split_step

    stacks = []
    for value, name in zip(values, ("first", "second")):
        stored = torch.empty(products * 3 * 5 * 8, dtype=torch.bfloat16, device=DEVICE)
        split_step(products, 3, (1, 1, 5), stack=name)(torch.from_numpy(value).to(DEVICE), stored)
        stacks.append(stored.float().cpu().numpy().astype(np.float64).reshape(products, 3, 5, 8).transpose(0, 1, 3, 2))
    sums: np.ndarray = (stacks[0] * stacks[1]).sum(0)
    return sums


@needs_triton
@pytest.mark.parametrize("products", [3, 4])
def test_stacked_parts_multiply_what_is_not_finite_once(products: int) -> None:
    """(middle x middle,) middle x high, high x middle, high x high; 0 x Inf must not come in."""
    rng = np.random.default_rng(3)
    values = [rng.standard_normal((3, 8, 5)).astype(np.float32) for _ in range(2)]
    values[0][0, 1, 2], values[1][1, 4, 3] = np.inf, np.nan
    values[1][0, 1, 2] = 2.0  # whose middle part is zero
    got = stack_products(values, products)
    expected = values[0].astype(np.float64) * values[1]
    assert np.array_equal(np.isnan(got), np.isnan(expected)) and got[0, 1, 2] == np.inf
    finite = np.isfinite(expected)
    assert (np.abs(got - expected)[finite] <= np.abs(expected[finite]) * 2.0**(-15 if products == 3 else -16)).all()


@needs_triton
@pytest.mark.parametrize("products", [3, 4])
def test_products_of_parts_leave_out_what_the_plan_expects(products: int) -> None:
    """Numbers with the largest lower parts, all of one sign: what is left out adds up."""
    from convgrad.backends.triton.part_copies import LEFT_OUT

    worst = 1 + 2.0**-8 - 2.0**-15 + 2.0**-17 - 2.0**-23
    values = [np.full((3, 8, 5), worst, np.float32)] * 2
    units = np.abs(stack_products(values, products) / worst**2 - 1).max() * 2.0**24
    assert 0.95 * LEFT_OUT[products] < units <= LEFT_OUT[products]


@needs_gpu
@pytest.mark.parametrize("max_workspace", [None, 3 * 2**20])
@pytest.mark.parametrize("text", STACKED)
def test_stacked_parts_keep_the_contract(text: str, max_workspace: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few channels and small groups, as more 16-bit images; at once and in pieces."""
    from convgrad.backends.triton import plans, stacked_plans

    monkeypatch.setattr(stacked_plans, "pointer_seconds", lambda query: 1.0)
    given = plans.make_plan
    monkeypatch.setattr(plans, "make_plan", lambda problem, limit, *choice: given(problem, max_workspace, *choice))
    clear_plan_cache()
    try:
        problem = f"weight_grad f32 {text}"
        assert plans.make_plan(Problem.parse(f"{problem} cuda"), None).kernel.startswith("stacked_")
        check_exact(problem, "triton")
        check_bound(problem, "triton", positive=True)
        check_nonfinite(problem, "triton")
    finally:
        clear_plan_cache()


@needs_gpu
@pytest.mark.parametrize("text", GEOMETRIES)
@pytest.mark.parametrize("products", [3, 4, 6])
def test_sums_of_products_of_parts(text: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import part_copies, part_plans
    from convgrad.backends.triton.plans import make_plan

    monkeypatch.setattr(part_plans, "pointer_seconds", lambda query: 1.0)  # so that small problems take this way
    problem = Problem.parse(f"weight_grad f32 {text} cuda")
    # fewer are allowed for long sums only; these numbers have 16 bits, so that nothing is left out
    monkeypatch.setattr(part_copies, "LEFT_OUT", {products: -1000})
    plan = make_plan(problem, None)
    assert plan.kernel.startswith(f"parts{products}_"), plan.kernel
    plans = [plan, *(make_plan(problem, plan.workspace_bytes // part) for part in (2, 5))]
    operands = integers_on_gpu(problem, 99)
    exact = make_plan(problem.with_(dtype="float64", out_dtype="float64", compute="f64"), None)
    shape = problem.conv.shape_of(problem.wrt)
    expected = torch.empty(shape, dtype=torch.float64, device="cuda")
    exact.run(tuple(operand.double() for operand in operands), (expected,), None)
    for chosen in plans:
        result = torch.full(shape, float("nan"), device="cuda")
        chosen.run(operands, (result,), None)
        assert torch.equal(result.double(), expected), chosen.kernel


@needs_gpu
@pytest.mark.parametrize("text", GEOMETRIES[:4])
def test_parts_keep_the_contract(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import part_plans

    monkeypatch.setattr(part_plans, "pointer_seconds", lambda query: 1.0)
    clear_plan_cache()
    try:
        check_bound(f"weight_grad f32 {text}", "triton")
        check_nonfinite(f"weight_grad f32 {text}", "triton")
    finally:
        clear_plan_cache()


@needs_gpu
@pytest.mark.parametrize("images, share", [(2, 1), (6, 3)])
def test_infinite_operands_of_split_sums(images: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real numbers, whose lower parts meet Inf as well; several runs, and several chunks in a third of the memory."""
    from convgrad.backends.triton import part_plans
    from convgrad.backends.triton.registry import query_of

    monkeypatch.setattr(part_plans, "pointer_seconds", lambda query: 1.0)
    problem = Problem.parse(f"weight_grad f32 n{images} c64 k64 i19x17 w3x3 p1x1 NHWC OHWI cuda")
    whole = next(iter(part_plans.tiles(query_of(problem))))
    query = query_of(problem, whole.workspace_bytes // share)
    prepared = part_plans.build(query, next(iter(part_plans.tiles(query))))
    rng = np.random.default_rng(4)
    operands = [rng.standard_normal(problem.shape_of_operand(name)).astype(np.float32) for name in problem.operands]
    operands[0][0, 5, 3, 4] = np.inf
    operands[1][images - 1, 9, 0, 0] = -np.inf
    expected = np.empty(problem.conv.weight_shape)
    plan(problem.with_(dtype="float64", compute="f64", out_dtype="float64", device="cpu"), backend="reference").run(
        tuple(operand.astype(np.float64) for operand in operands), (expected,), None)
    on_gpu = tuple(torch.from_numpy(operand).cuda().contiguous(memory_format=torch.channels_last)
                   for operand in operands)
    result = torch.empty(problem.conv.weight_shape, device="cuda", memory_format=torch.channels_last)
    prepared.run(on_gpu, (result,), None)
    got = result.cpu().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.array_equal(got[np.isinf(expected)], expected[np.isinf(expected)])
    assert np.isfinite(got[np.isfinite(expected)]).all()
