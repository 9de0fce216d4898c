"""`convgrad bench torch`: training steps of whole models with and without `convgrad.torch.install()`, in turn."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import torch as convgrad_torch
from .models import MODELS
from .provenance import commit, describe_machine, versions

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LAYOUTS = {"channels_first": False, "channels_last": True}
LEAST_ROUNDS = 3


@dataclass
class Setting:
    """One row: a model and how it is trained. Formats other than f32 are autocast ones."""

    model: str
    batch: int
    size: int
    dtype: str
    layout: str
    device: str

    def __str__(self) -> str:
        return f"{self.model} batch {self.batch}, {self.size} pixels, {self.dtype}, {self.layout} on {self.device}"


@dataclass
class Times:
    """Seconds of one step on the host's clock; on a GPU until the device is done."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        return self.forward + self.backward


class Trainer:
    """A model with data and a loss."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        torch.manual_seed(0)
        model = MODELS[setting.model]
        self.model = model.build().to(setting.device).train()
        self.data = torch.randn(model.input_shape(setting.batch, setting.size), device=setting.device)
        if LAYOUTS[setting.layout] and self.data.dim() > 3:
            last = torch.channels_last if self.data.dim() == 4 else torch.channels_last_3d
            self.model = self.model.to(memory_format=last)
            self.data = self.data.contiguous(memory_format=last)

    def step(self) -> Times:
        for parameter in self.model.parameters():
            parameter.grad = None
        start = self.now()
        dtype = DTYPES[self.setting.dtype]
        with torch.autocast(self.setting.device, dtype) if dtype != torch.float32 else contextlib.nullcontext():
            loss = self.model(self.data).float().square().mean()
        between = self.now()
        loss.backward()
        return Times(between - start, self.now() - between)

    def now(self) -> float:
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def pairs_of(trainer: Trainer, seconds: float) -> Iterator[tuple[Times, Times]]:
    """(torch, ours) in turn, for so many seconds of each; the first of each is not counted."""
    spent, rounds = 0.0, -1
    while spent < 2 * seconds or rounds < LEAST_ROUNDS:
        theirs = trainer.step()
        with convgrad_torch.installed():
            ours = trainer.step()
        rounds += 1
        if rounds:
            spent += theirs.step + ours.step
            yield theirs, ours


def measure(setting: Setting, seconds: float) -> dict[str, Any]:
    """A row of results: medians of both sides, and the medians of the ratios of neighbouring steps."""
    pairs = list(pairs_of(Trainer(setting), seconds))
    row: dict[str, Any] = {**asdict(setting), "rounds": len(pairs)}
    for part in ("step", "forward", "backward"):
        theirs = [getattr(one, part) for one, _ in pairs]
        ours = [getattr(other, part) for _, other in pairs]
        row[part] = {"torch": statistics.median(theirs), "convgrad": statistics.median(ours),
                     "ratio": statistics.median(one / other for one, other in zip(theirs, ours))}
    return row


def settings(args: argparse.Namespace) -> list[Setting]:
    """All combinations that the arguments ask for; raises ValueError with the word that is not known."""
    device = args.device or "cpu"
    layouts = [args.layout] if args.layout else ["channels_first"]
    for option, text, known in (("--models", args.models, MODELS), ("--dtype", args.dtype or "f32,bf16", DTYPES)):
        for word in text.split(",") if text else ():
            if word not in known:
                raise ValueError(f"{option} {word!r} is none of {', '.join(known)}")
    if not all(size.isdecimal() and int(size) >= 32 for size in args.size.split(",")):
        raise ValueError(f"--size must be numbers of at least 32, got {args.size!r}")
    if args.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {args.batch}")
    return [Setting(model, args.batch, int(size), dtype, layout, device)
            for layout in layouts for dtype in (args.dtype or "f32,bf16").split(",") for size in args.size.split(",")
            for model in (args.models.split(",") if args.models else MODELS)]


def run_training(args: argparse.Namespace) -> int:
    console = Console(stderr=True)
    try:
        chosen = settings(args)
    except ValueError as error:
        console.print(f"convgrad bench: {error}", style="red", markup=False)
        return 2
    torch.set_num_threads(args.threads)
    rows = []
    table = Table("model", "pixels", "format", "layout", "torch ms", "ours ms", "step", "backward", box=None)
    for setting in chosen:
        console.print(f"{setting} ...", highlight=False)
        row = measure(setting, args.seconds or 3.0)
        rows.append(row)
        table.add_row(setting.model, str(setting.size), setting.dtype, setting.layout,
                      f"{1e3 * row['step']['torch']:.0f}", f"{1e3 * row['step']['convgrad']:.0f}",
                      f"{row['step']['ratio']:.2f}", f"{row['backward']['ratio']:.2f}")
        if args.json:
            found = {"kind": "training", "machine": describe_machine(), "versions": versions(), "commit": commit(),
                     "threads": args.threads, "rows": rows}
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ratios = [row["backward"]["ratio"] for row in rows]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    Console().print(table)
    print(f"backward, torch's time over ours: lowest {min(ratios):.2f}, mean {mean:.2f} of {len(rows)} rows")
    return 0
