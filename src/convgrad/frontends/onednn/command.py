"""`convgrad onednn graph.json`: run the convolutions of a graph that oneDNN Graph has dumped."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .compiled import Settings
from .errors import GraphError
from .graph import Graph, GraphOp, OpRun, read_graph, run_op
from .padding import RULES

DONE, BAD_INPUT, REFUSED = 0, 2, 3  # as of the other commands: refused is what no backend can run
EXIT_CODES = "exit codes: 0 all ran, 2 bad input or an operator that is not valid, 3 an operator is not implemented"


def add_commands(subparsers: Any) -> None:
    """Add the subcommand `onednn` to the command line."""
    parser = subparsers.add_parser(
        "onednn", epilog=EXIT_CODES, help="run the convolutions of a graph dumped by oneDNN Graph",
        description="Find the convolution operators in a graph that oneDNN Graph has serialised as JSON, run each with "
                    "given or random inputs, and print shapes and timing.")
    parser.add_argument("graph", type=Path, help="the JSON file")
    parser.add_argument("--input", action="append", default=[], metavar="ID=FILE.npy",
                        help="use this array for the tensor with this id (repeatable); others are random")
    parser.add_argument("--op", action="append", default=[], metavar="ID|NAME|KIND",
                        help="run only these operators (repeatable)")
    parser.add_argument("--auto-pad-rule", choices=RULES, default=None,
                        help="which same_upper/same_lower rule ConvolutionBackwardData follows (default: document)")
    parser.add_argument("--repeat", type=int, default=5, help="timed executions of each operator (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0)")
    parser.add_argument("--backend", default=None, help="ask this backend only")
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--save", type=Path, default=None, metavar="DIR", help="write each result to DIR/ID.npy")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return its exit code."""
    try:
        graph = read_graph(args.graph)
        tensors = given_tensors(args.input)
    except (OSError, ValueError) as error:
        print(f"convgrad onednn: {error}", file=sys.stderr)
        return BAD_INPUT
    wanted = [op for op in graph.convolutions if not args.op or {str(op.id), op.name, op.kind} & set(args.op)]
    rng = np.random.default_rng(args.seed)
    settings = Settings(args.backend, args.num_threads)
    rows = []
    for op in wanted:
        try:
            done = run_op(op, tensors, rng, repeat=max(1, args.repeat), auto_pad_rule=args.auto_pad_rule,
                          settings=settings)
        except GraphError as error:
            rows.append({"id": op.id, "name": op.name, "kind": op.kind, "status": error.status, "message": str(error)})
            continue
        except ValueError as error:  # of the planner: a backend that does not exist
            print(f"convgrad onednn: {error}", file=sys.stderr)
            return BAD_INPUT
        rows.append(report(op, done))
        if args.save is not None:
            args.save.mkdir(parents=True, exist_ok=True)
            np.save(args.save / f"{op.outputs[0].id}.npy", done.output)
    if args.json:
        print(json.dumps({"version": graph.version, "fpmath_mode": graph.fpmath_mode, "operators": rows}, indent=1))
    else:
        print_report(graph, rows)
    statuses = {row["status"] for row in rows} - {"success"}
    return DONE if not statuses else REFUSED if statuses == {"unimplemented"} else BAD_INPUT


def given_tensors(pairs: list[str]) -> dict[int, Any]:
    tensors = {}
    for pair in pairs:
        number, separator, path = pair.partition("=")
        if not separator or not number.strip().isdecimal():
            raise ValueError(f"--input {pair}: expected ID=FILE.npy with the id of a tensor of the graph")
        tensors[int(number)] = np.load(path, allow_pickle=False)
    return tensors


def report(op: GraphOp, done: OpRun) -> dict[str, Any]:
    """What is told about one executed operator."""
    compiled = done.compiled
    median = statistics.median(done.seconds)
    return {
        "id": op.id, "name": op.name, "kind": op.kind, "status": "success", "dtype": compiled.output.dtype,
        "inputs": [list(tensor.shape) for tensor in compiled.inputs], "output": list(compiled.output.shape),
        "pads_begin": list(compiled.pads_begin), "pads_end": list(compiled.pads_end),
        "problem": str(compiled.problem), "backend": compiled.plan.backend, "kernel": compiled.plan.kernel,
        "scratchpad_size": compiled.scratchpad_size, "median_seconds": median, "fastest_seconds": min(done.seconds),
        "gflops": compiled.problem.flops / median / 1e9, "notes": list(done.notes),
    }


def print_report(graph: Graph, rows: list[dict[str, Any]]) -> None:
    others = len(graph.ops) - len(graph.convolutions)
    print(f"oneDNN Graph {graph.version or '(no version)'}, fpmath_mode {graph.fpmath_mode or 'strict'} "
          f"(computed as strict): {len(graph.convolutions)} convolution operators, {others} others not run")
    for row in rows:
        print(f"\n{row['id']} {row['kind']} {row['name']}")
        if row["status"] != "success":
            print(f"  refused    {row['status']}: {row['message']}")
            continue
        print(f"  shapes     {', '.join(map(crossed, row['inputs']))} -> {crossed(row['output'])} ({row['dtype']})")
        print(f"  pads       begin {crossed(row['pads_begin'])}, end {crossed(row['pads_end'])}")
        print(f"  problem    {row['problem']}")
        print(f"  plan       {row['backend']} {row['kernel']}, scratchpad {row['scratchpad_size']:,} bytes")
        print(f"  time       {row['median_seconds'] * 1e3:.3f} ms median, {row['fastest_seconds'] * 1e3:.3f} fastest, "
              f"{row['gflops']:.1f} GFLOP/s")
        for note in row["notes"]:
            print(f"  note       {note}")


def crossed(values: list[int]) -> str:
    return "x".join(str(value) for value in values)
