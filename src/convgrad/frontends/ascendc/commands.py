"""`convgrad ascendc "<problem string>"`: the tiling of a problem, its blocks, its traffic and a picture of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np

from ...numbers import storage_dtype
from ...plan import plan
from ...problem import Conv, Problem, Unsupported
from .compare import check_against_reference
from .conv_types import ConvFormat
from .cpp import to_cpp_filter_stub, to_cpp_host, to_cpp_stub
from .drawing import Drawing
from .duration import announcement
from .filter_operator import find_filter_tiling, run_filter, split_filter_pieces
from .filter_picture import draw_filter
from .filter_tiling import TConv3DBpFilterTiling
from .operator import describe, find_tiling, run_tiling
from .picture import draw
from .pieces import split_pieces
from .platform import PRODUCTS, PlatformInfo
from .tile_search import fit_cores
from .tiling_struct import TConv3DBackpropInputTiling
from .trace import to_json_lines, to_text
from .traffic import estimate
from .walk import Block

EXIT_CODES = ("exit codes: 0 done, 1 a block differs from the plain gradient, 2 bad input, 3 Ascend C has no tiling "
              "for the problem")
SHOWN_FIELDS = ("baseM", "baseK", "baseN", "stepKa", "stepKb", "al1Pbuffer", "bl1Pbuffer", "singleCoreM",
                "singleCoreCin", "iterateOrder", "initOutputFlag", "backpropPadUp", "backpropPadDown",
                "backpropPadLeft", "backpropPadRight", "backpropPadTail")


def add_commands(subparsers: Any) -> None:
    """Add the command to the `convgrad` program."""
    parser = subparsers.add_parser(
        "ascendc", help="show how Conv3DBackpropInput computes a problem: tiling, blocks, traffic, picture",
        epilog=EXIT_CODES,
        description="Find the tiling of an input or weight gradient as the host side of Ascend C does, print the "
                    "blocks that the kernel walks through and the bytes that move, draw them, run them on the CPU "
                    "against the plain gradient, or print the calls in C++.")
    parser.add_argument("problem", type=problem_argument,
                        help='problem string, for example "input_grad f16 n1 c17 k15 i20x60x60 w2x2x2 s2x2x2"')
    parser.add_argument("--cores", type=core_count, default=1, help="number of AI cores (default 1)")
    parser.add_argument("--product", default="Ascend910B", help=f"one of {', '.join(PRODUCTS)} (default Ascend910B)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields",
                        help="change a field of the tiling, for example --set baseM=256 (may be repeated)")
    parser.add_argument("--depth", type=int, default=0, help="depth of dX whose blocks and picture are shown")
    parser.add_argument("--blocks", type=int, default=16, help="how many lines of the block table to print")
    parser.add_argument("--svg", type=Path, help="write the picture here")
    parser.add_argument("--png", type=Path, help="write the picture here")
    parser.add_argument("--json", type=Path, help="write one JSON line per Iterate here")
    parser.add_argument("--cpp", action="store_true", help="print the kernel loop in C++")
    parser.add_argument("--cpp-host", action="store_true", help="print the setters of the host side in C++")
    parser.add_argument("--ncdhw", action="store_true", help="dX in NCDHW, through a workspace (for --cpp and --run)")
    parser.add_argument("--run", action="store_true", dest="execute",
                        help="compute every block on small integers and compare with the plain gradient")
    parser.set_defaults(run=run)


def problem_argument(text: str) -> Problem:
    try:
        return Problem.parse(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def core_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do what the command line asks for; return 0, 1 for a wrong result, 2 for bad input. Unsupported is raised."""
    problem = args.problem
    try:
        conv = three_axes(problem.conv)
        if problem.wrt not in ("input", "weight"):
            raise Unsupported(f"the Ascend C dialect computes input_grad and weight_grad, not {problem.wrt!r}")
        if problem.conv.groups != 1:
            name = "Conv3DBackpropInput" if problem.wrt == "input" else "Conv3DBackpropFilter"
            raise Unsupported(f"groups={problem.conv.groups}: {name} takes one group")
        if problem.dtype == "float32":
            print("note: float32 is not documented for this API, which lists half and bfloat16_t", file=sys.stderr)
        if problem.wrt == "weight":
            return show_filter(problem, conv, args)
        host = describe(conv.output_shape, conv.weight_shape, storage_dtype(problem.dtype), input_size=conv.in_size,
                        stride=conv.stride, padding=conv.padding, dilation=conv.dilation,
                        platform=PlatformInfo.of(args.product))
        tiling = changed(find_tiling(host, args.cores), args.fields, args.cores)
        show_input(tiling, args)
    except (ValueError, TypeError, OSError) as error:
        print(f"convgrad: {error}", file=sys.stderr)
        return 2
    return execute(tiling, problem, args) if args.execute else 0


def three_axes(conv: Conv) -> Conv:
    """Return the convolution with leading axes of size 1 until it has three."""
    missing = 3 - conv.axes
    return Conv(conv.batch, conv.in_channels, conv.out_channels, (1,) * missing + conv.in_size,
                (1,) * missing + conv.kernel_size, (1,) * missing + conv.stride, (1,) * missing + conv.dilation,
                ((0, 0),) * missing + conv.padding, conv.groups)


def changed(tiling: TConv3DBackpropInputTiling, fields: list[str], cores: int) -> TConv3DBackpropInputTiling:
    """Apply `--set FIELD=VALUE` and check the result."""
    changes, known = {}, {f.name for f in dataclass_fields(TConv3DBackpropInputTiling)}
    for text in fields:
        name, _, value = text.partition("=")
        if name not in known or not value.lstrip("-").isdecimal():
            raise ValueError(f"--set {text}: expected FIELD=NUMBER with a field of TConv3DBackpropInputTiling")
        changes[name] = int(value)
    if changes:
        tiling = tiling.with_(**changes)
        tiling.validate()
        if "singleCoreM" not in changes:
            tiling = fit_cores(tiling, cores).with_(**changes)
    return tiling


def show_input(tiling: TConv3DBackpropInputTiling, args: argparse.Namespace) -> None:
    use, size = tiling.memory_use(), tiling.memory_size()
    print("tiling    " + "  ".join(f"{name}={getattr(tiling, name)}" for name in SHOWN_FIELDS))
    print("memory    " + "  ".join(f"{name} {use[name]}/{size[name]}" for name in ("L0A", "L0B", "L0C"))
          + f"  L1 {use['L1A']}+{use['L1B']}/{size['L1']}")
    print("\n".join(estimate(tiling, args.cores).lines()))
    if not 0 <= args.depth < tiling.di:
        raise ValueError(f"--depth {args.depth}: dX has the depths 0..{tiling.di - 1}")
    pieces = [piece for piece in split_pieces(tiling, args.cores) if not piece.skipped]
    shown = [block for piece in pieces if (piece.n, piece.d) == (0, args.depth)
             for block in piece.walk(tiling).blocks(piece.core)]
    print(f"\nblocks of sample 0, depth {args.depth}\n" + to_text(shown, args.blocks))
    if args.json:
        args.json.write_text(to_json_lines(block for piece in pieces
                                           for block in piece.walk(tiling).blocks(piece.core)))
    write_picture(lambda: draw(tiling, args.cores, depth=args.depth), args)
    if args.cpp_host:
        print(to_cpp_host(tiling))
    if args.cpp:
        print(to_cpp_stub(tiling, args.cores, output_format(args)))


def output_format(args: argparse.Namespace) -> ConvFormat:
    return ConvFormat.NCDHW if args.ncdhw else ConvFormat.NDC1HWC0


def execute(tiling: TConv3DBackpropInputTiling, problem: Problem, args: argparse.Namespace) -> int:
    """Run every block on thin integers and compare."""
    cores: int = args.cores
    said = announcement(tiling, cores)
    if said:
        print(said, file=sys.stderr)
    t, rng, dtype = tiling, np.random.default_rng(0), storage_dtype(problem.dtype)
    dy = rng.integers(-1, 2, (t.batch, t.cout, t.dout, t.ho, t.wo)).astype(dtype)
    w = rng.integers(-1, 2, (t.cout, t.cin, t.dk, t.hk, t.wk)).astype(dtype)
    trace: list[Block] = []
    dx = run_tiling(t, dy, w, cores, output_format(args), fidelity="block", strict=True, trace=trace)
    difference = check_against_reference(dx, dy, w, t, trace)
    print("every block agrees with the plain gradient" if difference is None else str(difference))
    return 0 if difference is None else 1


def show_filter(problem: Problem, conv: Conv, args: argparse.Namespace) -> int:
    refused = [f"--{name}" for name, value in (("set", args.fields), ("json", args.json), ("ncdhw", args.ncdhw),
                                               ("cpp-host", args.cpp_host)) if value]
    if refused:
        raise ValueError(f"{', '.join(refused)}: for input_grad only, this is weight_grad")
    cores: int = args.cores
    tiling = find_filter_tiling(conv.output_shape, conv.input_shape, conv.kernel_size, storage_dtype(problem.dtype),
                                stride=conv.stride, padding=conv.padding, dilation=conv.dilation, cores=cores,
                                platform=PlatformInfo.of(args.product))
    t = tiling.dwTiling
    pieces = split_filter_pieces(tiling, cores)
    print("tiling    " + "  ".join(f"{name}={getattr(t, name)}" for name in (
        "baseM", "baseK", "baseN", "stepKa", "stepKb", "al1Pbuffer", "bl1Pbuffer", "singleCoreCout", "singleCoreCin",
        "singleCoreHo", "iterateOrder", "bl1Bound")))
    print("memory    " + "  ".join(f"{name} {value}" for name, value in t.memory_use().items()))
    print(f"pieces    {len(pieces)} on {cores} core(s), each added into dW")
    write_picture(lambda: draw_filter(tiling, cores, kernel_depth=args.depth), args)
    if args.cpp:
        print(to_cpp_filter_stub(tiling, cores))
    return execute_filter(tiling, conv, problem, cores) if args.execute else 0


def execute_filter(tiling: TConv3DBpFilterTiling, conv: Conv, problem: Problem, cores: int) -> int:
    """Run every block of the weight gradient on thin integers and compare with the plain gradient."""
    rng, dtype = np.random.default_rng(0), storage_dtype(problem.dtype)
    dy, x = (rng.integers(-1, 2, shape).astype(dtype) for shape in (conv.output_shape, conv.input_shape))
    dw = run_filter(dy, x, kernel_size=conv.kernel_size, cores=cores, tiling=tiling)
    plain = Problem(conv, "weight", "float32")
    exact = np.empty(conv.weight_shape, np.float32)
    plan(plain, backend="reference").run((dy.astype(np.float32), x.astype(np.float32)), (exact,), None)
    wrong = np.argwhere(dw != exact)
    if len(wrong):
        print(f"{len(wrong)} of {exact.size} elements differ, the first at {tuple(map(int, wrong[0]))}")
        return 1
    print("every block agrees with the plain gradient")
    return 0


def write_picture(make: Callable[[], Drawing], args: argparse.Namespace) -> None:
    if args.svg or args.png:
        picture = make()
        if args.svg:
            args.svg.write_text(picture.to_svg(), encoding="utf-8")
        if args.png:
            args.png.write_bytes(picture.to_png())
