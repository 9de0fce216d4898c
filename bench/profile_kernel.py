"""Profile the kernels of one problem with Nsight Compute and print a short table.

    python bench/profile_kernel.py "weight_grad bf16 n256 c96 k96 i56x56 w7x7 p3x3 g96 NHWC OHWI"

Needs a GPU, `ncu` on the PATH and the right to read its counters. The problem's plan runs until its kernels are
compiled and its launches recorded; one further run, with a cold L2 cache, is profiled. Clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"  # the checkout's own package, installed or not
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats",
            "Occupancy", "LaunchStats")
# As Nsight Compute names them.
SHOWN = ("Duration", "SM Frequency", "DRAM Throughput", "Memory Throughput", "L1/TEX Cache Throughput",
         "L2 Cache Throughput", "L2 Hit Rate", "Compute (SM) Throughput", "SM Busy", "Issue Slots Busy",
         "Executed Ipc Active", "Active Warps Per Scheduler", "Eligible Warps Per Scheduler", "Achieved Occupancy",
         "Registers Per Thread", "Dynamic Shared Memory Per Block", "Grid Size", "Block Size", "Waves Per SM")
RULES = ("Compute Workload Analysis", "Warp State Statistics")  # sections whose conclusions are shown, too
LONGEST = 280  # characters of a conclusion


def run_problem(text: str) -> None:
    """Run a problem until it only launches, then once more between the profiler's marks."""
    sys.path.insert(0, str(SOURCE))
    import torch

    from convgrad import Problem
    from convgrad.backends.triton.ahead import plans_of
    from convgrad.backends.triton.tune import Bench

    problem = Problem.parse(text).with_(device="cuda")
    bench, plans = Bench(problem, 1), plans_of(problem, None)
    for _ in range(3):
        bench.run(plans)
    bench.flush.zero_()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    bench.run(plans)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    print("plan:", " + ".join(plan.kernel for plan in plans), file=sys.stderr)


def profiled(text: str) -> str:
    """The CSV that Nsight Compute prints of the problem's kernels."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", *sections, "--csv", "--page", "details",
               sys.executable, __file__, "--only-run", text]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def show(output: str) -> None:
    lines = output[output.index('"ID"'):]  # what the program and the profiler say stands before
    kernels: dict[str, tuple[str, dict[str, list[str]], list[str]]] = {}
    for row in csv.DictReader(io.StringIO(lines)):
        _, values, remarks = kernels.setdefault(row["ID"], (row["Kernel Name"], {}, []))
        if row["Metric Name"] in SHOWN:
            values.setdefault(row["Metric Name"], []).append(f"{row['Metric Value']} {row['Metric Unit']}")
        if row.get("Rule Description") and row["Section Name"] in RULES:
            remarks.append(row["Rule Description"][:LONGEST])
    for name, values, remarks in kernels.values():
        print(f"\n{name}")
        for metric in SHOWN:
            if metric in values:
                print(f"  {metric:<32} {', '.join(dict.fromkeys(values[metric]))}")
        for remark in remarks:
            print(f"  * {remark}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("--only-run", action="store_true", help="run, without the profiler (it calls the script so)")
    parser.add_argument("--csv", help="keep all that Nsight Compute said in this file")
    args = parser.parse_args()
    if args.only_run:
        run_problem(args.problem)
        return 0
    output = profiled(args.problem)
    if args.csv:
        Path(args.csv).write_text(output)
    show(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
