"""The command `convgrad view`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from ..problem import Problem
from .view import view_page

BAD_INPUT = 2


def add_commands(subparsers: Any) -> None:
    """Add the command to the `convgrad` program."""
    parser = subparsers.add_parser("view", help="draw the gradients of a convolution as an interactive page")
    parser.add_argument("problem", help='such as "input_grad f32 n1 c4 k4 i12x12 w3x3 s2x2 p1x1"')
    parser.add_argument("--output", "-o", type=Path, help="write the page here; without it a browser opens it")
    parser.add_argument("--cores", type=int, default=1, help="AI cores of the Ascend C tiling (default: %(default)s)")
    parser.add_argument("--product", default="Ascend910B", help="product of the Ascend C tiling (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        if args.cores < 1:
            raise ValueError(f"--cores must be at least 1, got {args.cores}")
        text = view_page(Problem.parse(args.problem), cores=args.cores, product=args.product)
        path = args.output or Path(tempfile.mkdtemp(prefix="convgrad-")) / "view.html"
        path.write_text(text, encoding="utf-8")
    except (ValueError, TypeError, OSError) as error:
        print(f"convgrad view: {error}", file=sys.stderr)
        return BAD_INPUT
    print(path)
    if args.output is None:
        webbrowser.open(path.resolve().as_uri())
    return 0
