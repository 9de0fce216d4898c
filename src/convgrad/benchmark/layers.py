"""The layers of a benchmark: text files of problem strings, one layer per line.

A line is `name | class | model | problem`. The problem string asks for the gradient of the *layer's* input in f32 and
channels-first, so it is `input_grad …` for a convolution. A transposed convolution is written as the convolution it is
the gradient of, with input and output exchanged; its two gradients are then

    gradient of its input   =  `conv …`         of (its grad_output, its weight)
    gradient of its weight  =  `weight_grad …`  with grad_output = its input and input = its grad_output

so a line that begins with `conv` is a transposed layer; its `k` are then the layer's input channels, its `c` the output
channels. A conv_tbc layer carries its layout, `TBC` with weights `LIO`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..problem import SPATIAL_LETTERS, Problem

CLASSES = ("dense", "depthwise", "grouped", "few channels", "conv_tbc")
GRADIENTS = ("input_grad", "weight_grad")  # of the layer; what is asked of us is `Layer.question`
ALL_GRADIENTS = "all_grads"  # of input, weight and bias, from one call (measured on GPUs)
LAYOUTS = ("channels_first", "channels_last")
TIME_FIRST = "time_first"
FEW_CHANNELS = 16  # "few channels": a dense layer with at most this many input or output channels


@dataclass(frozen=True)
class Layer:
    """One layer of a published model: its geometry, and how it is asked for."""

    name: str
    kind: str  # one of CLASSES
    model: str
    problem: Problem

    @property
    def transposed(self) -> bool:
        return self.problem.wrt == "output"

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts in which the layer is measured; one for a layer that fixes its own."""
        return (TIME_FIRST,) if self.kind == "conv_tbc" else LAYOUTS

    def question(self, gradient: str, dtype: str, layout: str, device: str = "cpu") -> Problem:
        """Return the problem that computes one gradient of this layer.

        No single problem is all gradients of a transposed layer; its question is then that of its input.
        """
        wrt = "weight" if gradient == "weight_grad" else self.problem.wrt
        if gradient == ALL_GRADIENTS and not self.transposed:
            wrt = "input+weight+bias"
        spatial = SPATIAL_LETTERS[self.problem.conv.axes]
        orders = {"channels_first": ("NC" + spatial, "OI" + spatial),
                  "channels_last": ("N" + spatial + "C", "O" + spatial + "I"),
                  TIME_FIRST: (self.problem.layout, self.problem.weight_layout)}
        activations, weights = orders[layout]
        return Problem(self.problem.conv, wrt, dtype, layout=activations, weight_layout=weights, device=device)

    def flops(self, gradient: str) -> int:
        """Operations of a gradient."""
        conv = self.problem.conv
        if gradient == ALL_GRADIENTS:
            return conv.flops(self.problem.wrt) + conv.flops("weight") + conv.flops("bias")
        return conv.flops("weight" if gradient == "weight_grad" else self.problem.wrt)


def class_of(problem: Problem) -> str:
    """Return the class of a layer from its geometry alone."""
    conv = problem.conv
    if problem.layout in ("TBC", "LNC"):
        return "conv_tbc"
    if conv.groups > 1:
        return "depthwise" if conv.depthwise else "grouped"
    return "few channels" if min(conv.in_channels, conv.out_channels) <= FEW_CHANNELS else "dense"


def parse_layers(text: str, source: str) -> list[Layer]:
    """Read the lines of a problem file; `source` names it in errors."""
    layers: list[Layer] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 4:
            raise ValueError(f"{source}:{number}: expected 'name | class | model | problem', got {len(fields)} fields")
        name, kind, model, question = fields
        if kind not in CLASSES:
            raise ValueError(f"{source}:{number}: class {kind!r} is none of {', '.join(CLASSES)}")
        try:
            problem = Problem.parse(question)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}:{number}: {error}") from None
        if problem.wrt not in ("input", "output"):
            raise ValueError(f"{source}:{number}: a layer begins with input_grad or conv, got {question!r}")
        if any(layer.name == name for layer in layers):
            raise ValueError(f"{source}:{number}: the name {name!r} is used twice")
        layers.append(Layer(name, kind, model, problem))
    return layers


def known_sets() -> list[str]:
    """Names of the sets that come with the package."""
    folder = resources.files(__package__) / "problems"
    return sorted(entry.name[:-4] for entry in folder.iterdir() if entry.name.endswith(".txt"))


def load_layers(name: str) -> list[Layer]:
    """Return the layers of a named set (`cpu`, `core`, `gpu`, `demo`) or of a text file of your own."""
    if os.sep in name or name.endswith(".txt"):
        return parse_layers(Path(name).read_text(), name)
    if name not in known_sets():
        raise ValueError(f"set {name!r} is none of {', '.join(known_sets())} and not the path of a .txt file")
    entry = resources.files(__package__) / "problems" / f"{name}.txt"
    return parse_layers(entry.read_text(), f"{name}.txt")


def layer_of(text: str) -> Layer:
    """Return a layer for one problem string, whichever of its gradients the string asks for."""
    problem = Problem.parse(text)
    conv, wrt = problem.conv, "output" if problem.wrt == "output" else "input"
    asked = Problem(conv, wrt, problem.dtype, layout=problem.layout, weight_layout=problem.weight_layout)
    return Layer("your layer", class_of(asked), "given on the command line", asked)


def select(layers: Iterable[Layer], pattern: str, classes: Collection[str] = CLASSES) -> list[Layer]:
    """Return the layers of `classes` whose name, class or model contains one of the words of `pattern` (commas)."""
    words = [word.strip().lower() for word in pattern.split(",") if word.strip()]
    return [layer for layer in layers if layer.kind in classes and
            (not words or any(word in f"{layer.name} {layer.kind} {layer.model}".lower() for word in words))]


def spread(layers: Sequence[Layer], measured: Collection[str] = ()) -> list[Layer]:
    """Return the layers in an order whose every beginning has about the same share of each class.

    Those whose names are `measured` come after the others.
    """
    sizes, seen = Counter(layer.kind for layer in layers), Counter[str]()
    places = []
    for layer in layers:
        seen[layer.kind] += 1
        places.append((seen[layer.kind] - 0.5) / sizes[layer.kind])
    ordered = [layers[number] for number in sorted(range(len(layers)), key=places.__getitem__)]
    return sorted(ordered, key=lambda layer: layer.name in measured)
