"""`convgrad cann`: flags for C and C++ programs, running one, the product table, the verdict on a call."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .convolution_backward import ARRAY_FORMATS, aclnnConvolutionBackwardGetWorkspaceSize
from .descriptors import aclTensor, type_name
from .native_library import NoCompiler, build_program, compile_flags, link_flags
from .products import FACTS, Product, as_product
from .status import aclGetRecentErrMsg

DONE, BAD_INPUT, REFUSED = 0, 2, 3
EXIT_CODES = ("exit codes: 0 done (run: that of the program), 2 bad input or no compiler, 3 the call is refused on "
              "every product that was asked")
EXAMPLES = """examples:
  convgrad cann products
  convgrad cann check --grad-output 2,8,5,5 --input 2,4,9,9 --weight 8,4,3,3 --stride 2,2 --padding 1,1
  g++ program.cpp $(convgrad cann --cflags --libs) -o program
  convgrad cann run --product 950 program.cpp
"""


def add_commands(subparsers: Any) -> None:
    """Add the subcommand `cann` to the command line."""
    parser = subparsers.add_parser(
        "cann", help="CANN's backward convolutions: C and C++ programs without an NPU, calls checked per product",
        description="Compile and run programs that call aclnnConvolutionBackward and aclnnConvTbcBackward on this "
                    "CPU, say what each Ascend product accepts, and why a call would be refused.",
        epilog=f"{EXAMPLES}\n{EXIT_CODES}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cflags", action="store_true", help="print what a compiler needs")
    parser.add_argument("--libs", action="store_true", help="print what a linker needs; builds the library if need be")
    parser.set_defaults(run=print_flags)
    actions = parser.add_subparsers(metavar="ACTION")
    program = actions.add_parser("run", help="compile a C or C++ program and run it")
    program.add_argument("source", type=Path)
    program.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    program.add_argument("--product", help="whose rules hold (default: A2)")
    program.set_defaults(run=run_program)
    actions.add_parser("products", help="print the product table").set_defaults(run=print_products)
    check = actions.add_parser("check", help="say whether aclnnConvolutionBackward takes a call, per product")
    for name in ("grad-output", "input", "weight", "stride", "padding", "dilation", "output-padding"):
        check.add_argument(f"--{name}", type=numbers, required=name in ("grad-output", "input", "weight"),
                           metavar="N,N,...")
    check.add_argument("--transposed", action="store_true")
    check.add_argument("--groups", type=int, default=1)
    check.add_argument("--mask", type=numbers, default=[1, 1, 1], help="outputMask (default: 1,1,1)")
    check.add_argument("--cube-math-type", type=int, default=0)
    check.add_argument("--dtype", default="FLOAT", help="of all tensors (default: %(default)s)")
    check.add_argument("--product", help="one product (default: all)")
    check.set_defaults(run=check_call)


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers") from None


def complain(error: Exception) -> int:
    print(f"convgrad cann: {error}", file=sys.stderr)
    return BAD_INPUT


def print_flags(args: argparse.Namespace) -> int:
    if not (args.cflags or args.libs):
        return complain(ValueError("name an action (run, products, check), or --cflags and --libs; see --help"))
    try:
        print(" ".join([*(compile_flags() if args.cflags else []), *(link_flags() if args.libs else [])]))
    except (NoCompiler, OSError) as error:
        return complain(error)
    return DONE


def run_program(args: argparse.Namespace) -> int:
    """Compile a program into a temporary folder, run it, and return its exit code."""
    try:
        if not args.source.is_file():
            raise ValueError(f"there is no file {args.source}")
        environment = dict(os.environ)
        if args.product:
            environment["CONVGRAD_CANN_PRODUCT"] = as_product(args.product).name
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "program"
            build_program(args.source, program)
            return subprocess.run([str(program), *args.arguments], env=environment).returncode
    except (NoCompiler, OSError, ValueError) as error:
        return complain(error)


def print_products(args: argparse.Namespace) -> int:
    for product, facts in FACTS.items():
        formats = ", ".join(map(type_name, facts.dtypes))
        axes = ", ".join(f"{axes}-D" for axes in facts.spatial_axes)
        print(f"{product.name:16} {facts.title}\n{'':16} {axes}; {formats}; {', '.join(facts.operators)}")
    return DONE


def check_call(args: argparse.Namespace) -> int:
    """Print the status of a call on descriptors, with the sentence of each refusal."""
    axes = len(args.weight) - 2

    def tensor(shape: list[int]) -> aclTensor:
        return aclTensor(shape=shape, dtype=args.dtype, format=ARRAY_FORMATS.get(len(shape), "ND"))

    try:
        products = [as_product(args.product)] if args.product else list(Product)
        dy, x, w = tensor(args.grad_output), tensor(args.input), tensor(args.weight)
        bias = tensor([args.grad_output[1] if len(args.grad_output) > 1 else 0])
    except (ValueError, TypeError) as error:
        return complain(error)
    accepted = False
    for product in products:
        status, size, _ = aclnnConvolutionBackwardGetWorkspaceSize(
            dy, x, w, None, args.stride or [1] * axes, args.padding or [0] * axes, args.dilation or [1] * axes,
            args.transposed, args.output_padding or [0] * axes, args.groups, args.mask, args.cube_math_type, x, w, bias,
            product=product)
        accepted = accepted or status == 0
        print(f"{product.name:16} {int(status):6} {aclGetRecentErrMsg() or f'accepted, workspace {size:,} bytes'}")
    return DONE if accepted else REFUSED
