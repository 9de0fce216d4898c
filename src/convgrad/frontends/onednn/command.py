"""`convgrad onednn graph.json`: run and judge the convolutions of a graph that oneDNN Graph has dumped."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ...problem import Unsupported
from .compiled import Settings
from .errors import GraphError
from .graph import Array, Graph, GraphOp, OpRun, read_graph, run_op
from .overrides import changed, combinations
from .padding import RULES

DONE, WRONG, BAD_INPUT, REFUSED = 0, 1, 2, 3  # as of the other commands: refused is what no backend can run
EXIT_CODES = ("exit codes: 0 all ran, 1 a wrong result was found, 2 bad input or an operator that is not valid, "
              "3 an operator is not implemented")
JUDGED_FLOPS = 2e10  # up to here the reference needs seconds


def add_commands(subparsers: Any) -> None:
    """Add the subcommand `onednn` to the command line."""
    parser = subparsers.add_parser(
        "onednn", epilog=EXIT_CODES, help="run the convolutions of a graph dumped by oneDNN Graph",
        description="Find the convolution operators in a graph that oneDNN Graph has serialised as JSON, run each with "
                    "given or random inputs, judge it on whole numbers, and print shapes and timing.")
    parser.add_argument("graph", type=Path, nargs="?", help="the JSON file")
    parser.add_argument("--input", action="append", default=[], metavar="ID=FILE.npy",
                        help="use this array for the tensor with this id (repeatable); others are random")
    parser.add_argument("--op", action="append", default=[], metavar="ID|NAME|KIND",
                        help="run only these operators (repeatable)")
    parser.add_argument("--auto-pad-rule", choices=RULES, default="library",
                        help="which same_upper/same_lower rule ConvolutionBackwardData follows (default: library, as "
                             "the program that dumped the graph)")
    parser.add_argument("--repeat", type=int, default=5, help="timed executions of each operator (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0)")
    parser.add_argument("--backend", default=None, help="ask this backend only")
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--no-check", action="store_true", help="do not judge the results")
    parser.add_argument("--save", type=Path, default=None, metavar="DIR", help="write each result to DIR/ID.npy")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    driver = parser.add_argument_group("options of benchdnn's graph driver; comma-separated values run in turn")
    driver.add_argument("--case", type=Path, help="the JSON file")
    driver.add_argument("--in-shapes", default="", metavar="ID:SHAPE*TAG+...", help="shapes and orders of graph inputs")
    driver.add_argument("--op-attrs", default="", metavar="ID:NAME:VALUE*...+...", help="attributes of operators")
    driver.add_argument("--op-kind", default="", metavar="ID:KIND+...", help="kinds of operators")
    driver.add_argument("--dt", default="", metavar="DT|ID:DT+...", help="data type of all tensors, or by id")
    driver.add_argument("--mb", default="0", metavar="N", help="batch of all activations (0: as in the graph)")
    driver.add_argument("--reset", action="store_true", help="accepted")
    driver.add_argument("--mode", help="accepted; C and P both run here")
    driver.add_argument("--expected-n-partitions", type=int, default=0, help="accepted: one operator, one partition")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return its exit code."""
    try:
        path = args.case or args.graph
        if path is None:
            raise ValueError("name a graph: convgrad onednn graph.json, or --case=graph.json")
        if args.seed < 0:
            raise ValueError(f"--seed {args.seed} is negative")
        graph = read_graph(path)
        given = given_tensors(args.input)
        variants = [changed(graph, overrides) for overrides in
                    combinations(args.in_shapes, args.op_attrs, args.op_kind, args.dt, args.mb)]
        check_names(args.op, given, variants)
        rows = [row for variant in variants for row in run_graph(variant, given, args)]
    except (OSError, ValueError) as error:  # ValueError also of the planner: a backend that does not exist
        print(f"convgrad onednn: {error}", file=sys.stderr)
        return BAD_INPUT
    if args.json:
        print(json.dumps({"version": graph.version, "fpmath_mode": graph.fpmath_mode, "operators": rows}, indent=1))
    else:
        print_report(graph, rows)
    statuses = {row["status"] for row in rows} - {"success"}
    if "wrong" in statuses:
        return WRONG
    return DONE if not statuses else REFUSED if statuses == {"unimplemented"} else BAD_INPUT


def check_names(ops: list[str], tensors: dict[int, Any], variants: list[Graph]) -> None:
    """Refuse an operator or a tensor that no graph has."""
    known = {word for graph in variants for op in graph.convolutions for word in (str(op.id), op.name, op.kind)}
    for word in ops:
        if word not in known:
            raise ValueError(f"--op {word} matches none of the convolutions: {', '.join(sorted(known)) or 'none'}")
    ids = {tensor.id for graph in variants for op in graph.convolutions for tensor in op.inputs}
    for number in tensors:
        if number not in ids:
            raise ValueError(f"--input {number}=...: no convolution reads a tensor {number}; they read "
                             f"{', '.join(map(str, sorted(ids)))}")


def run_graph(graph: Graph, given: dict[int, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    tensors = dict(given)
    wanted = [op for op in graph.convolutions if not args.op or {str(op.id), op.name, op.kind} & set(args.op)]
    rng = np.random.default_rng(args.seed)
    settings = Settings(args.backend, args.num_threads)
    rows = []
    for op in wanted:
        try:
            done = run_op(op, tensors, rng, repeat=max(1, args.repeat), auto_pad_rule=args.auto_pad_rule,
                          settings=settings)
            verdict = "not asked" if args.no_check else judged(op, given, args)
        except GraphError as error:
            rows.append({"id": op.id, "name": op.name, "kind": op.kind, "status": error.status, "message": str(error)})
            continue
        except Unsupported as error:
            rows.append({"id": op.id, "name": op.name, "kind": op.kind, "status": "unimplemented",
                         "message": str(error)})
            continue
        rows.append(report(op, done, verdict))
        if args.save is not None:
            args.save.mkdir(parents=True, exist_ok=True)
            np.save(args.save / f"{op.outputs[0].id}.npy", done.output)
    return rows


def judged(op: GraphOp, given: dict[int, Any], args: argparse.Namespace) -> str:
    """Run an operator on small whole numbers, here and on the reference, and compare every bit."""
    rng = np.random.default_rng(args.seed)

    def whole_numbers(shape: tuple[int, ...]) -> Array:
        return rng.integers(-2, 3, shape).astype(np.float64)

    shapes = {tensor.id: given[tensor.id] for tensor in op.inputs if tensor.id in given and tensor.dtype == "s32"}
    tensors = dict(shapes)
    found = run_op(op, tensors, rng, repeat=0, auto_pad_rule=args.auto_pad_rule, draw=whole_numbers,
                   settings=Settings(args.backend, args.num_threads))
    if found.compiled.problem.flops > JUDGED_FLOPS:
        return f"not judged: {found.compiled.problem.flops:,} FLOP keep the reference busy for minutes"
    same = {tensor.id: tensors[tensor.id] for tensor in op.inputs}
    exact = run_op(op, same, rng, repeat=0, auto_pad_rule=args.auto_pad_rule, settings=Settings("reference"))
    wrong = np.argwhere(found.output.astype(np.float64) != exact.output.astype(np.float64))
    if len(wrong) == 0:
        return "right: whole numbers bit by bit"
    place = tuple(map(int, wrong[0]))
    return (f"wrong: {len(wrong)} of {exact.output.size} elements, first at {place}: {found.output[place]} for "
            f"{exact.output[place]}")


def given_tensors(pairs: list[str]) -> dict[int, Any]:
    tensors = {}
    for pair in pairs:
        number, separator, path = pair.partition("=")
        if not separator or not number.strip().isdecimal():
            raise ValueError(f"--input {pair}: expected ID=FILE.npy with the id of a tensor of the graph")
        tensors[int(number)] = np.load(path, allow_pickle=False)
    return tensors


def report(op: GraphOp, done: OpRun, verdict: str) -> dict[str, Any]:
    """What is told about one executed operator."""
    compiled = done.compiled
    median = statistics.median(done.seconds)
    return {
        "id": op.id, "name": op.name, "kind": op.kind, "verdict": verdict,
        "status": "wrong" if verdict.startswith("wrong") else "success", "dtype": compiled.output.dtype,
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
        if "problem" not in row:
            print(f"  refused    {row['status']}: {row['message']}")
            continue
        print(f"  shapes     {', '.join(map(crossed, row['inputs']))} -> {crossed(row['output'])} ({row['dtype']})")
        print(f"  pads       begin {crossed(row['pads_begin'])}, end {crossed(row['pads_end'])}")
        print(f"  problem    {row['problem']}")
        print(f"  plan       {row['backend']} {row['kernel']}, scratchpad {row['scratchpad_size']:,} bytes")
        print(f"  verdict    {row['verdict']}")
        print(f"  time       {row['median_seconds'] * 1e3:.3f} ms median, {row['fastest_seconds'] * 1e3:.3f} fastest, "
              f"{row['gflops']:.1f} GFLOP/s")
        for note in row["notes"]:
            print(f"  note       {note}")


def crossed(values: list[int]) -> str:
    return "x".join(str(value) for value in values)
