"""The generated tables of docs/cann.md. `python tests/cann/cann_tables.py` writes them into the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from convgrad.frontends.cann import backward_checks, conv_tbc
from convgrad.frontends.cann.descriptors import type_name
from convgrad.frontends.cann.products import ALL_OPERATORS, FACTS, INT31
from convgrad.frontends.cann.status import MEANINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cann.md"
DEVIATIONS = ROOT / "tests" / "deviations" / "cann.toml"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows])


def yes(value):
    return "yes" if value else "no"


def names(dtypes):
    return ", ".join(map(type_name, dtypes)) or "none"


def bound(number):
    return f"2^31-{INT31 + 1 - number}" if number >= INT31 - 1 else str(number)


def limits(rows):
    texts = []
    for limit in rows:
        ranks = f" in {' and '.join(f'{rank}-D' for rank in limit.ranks)}" if limit.ranks else ""
        side = {True: ", transposed", False: ", normal", None: ""}[limit.transposed]
        texts.append(f"{limit.argument} {'/'.join(limit.axes)} [{limit.low}, {bound(limit.high)}]{ranks}{side}")
    return "; ".join(texts) or "none"


def products():
    facts = list(FACTS.values())
    rows = [
        ["chip", *(row.title for row in facts)],
        ["number formats", *(names(row.dtypes) for row in facts)],
        ["… transposed", *(names(row.transposed_dtypes) for row in facts)],
        ["… TBC", *(names(row.tbc_dtypes) for row in facts)],
        ["… graph operators", *(names(row.operator_dtypes) for row in facts)],
        ["convolutions", *(", ".join(f"{axes}-D" for axes in row.spatial_axes) for row in facts)],
        ["multiplies FLOAT", *(yes(row.multiplies_float) for row in facts)],
        ["HF32 mantissa bits", *(row.hf32_bits or "none" for row in facts)],
        ["gradients in the formats of their tensors", *(yes(row.same_output_dtypes) for row in facts)],
        ["empty tensors", *(yes(row.empty_tensors) for row in facts)],
        ["deterministic by default (vendor)", *(yes(row.deterministic) for row in facts)],
        *[[name, *(yes(name in row.operators) for row in facts)] for name in ALL_OPERATORS],
        ["ranges, aclnnConvolutionBackward", *(limits(row.limits) for row in facts)],
        ["ranges, input gradient and transpose", *(limits(row.input_limits) for row in facts)],
        ["ranges, filter gradient", *(limits(row.filter_limits) for row in facts)],
    ]
    return table(["", *(product.name for product in FACTS)], rows)


def statuses():
    return table(["code", "name", "when"], [[int(status), status.name, text] for status, text in MEANINGS.items()])


def first_line(function):
    return function.__doc__.strip().splitlines()[0].rstrip(".")


def checks():
    steps = [backward_checks.check_pointers, *backward_checks.FIRST, backward_checks.check_empty, *backward_checks.THEN]
    codes = {"check_pointers": "161001", "check_product_shapes": "161002 (561103 through 2-D)",
             "check_kernels": "561103"}
    extra = {"check_empty": " (then zeros, and nothing below)"}
    rows = [[number, first_line(step) + extra.get(step.__name__, ""), codes.get(step.__name__, "161002")]
            for number, step in enumerate(steps, 1)]
    return table(["", "aclnnConvolutionBackward", "status"], rows)


def tbc_checks():
    steps = [conv_tbc.check_pointers, *conv_tbc.CHECKS, conv_tbc.check_kernels]
    codes = {"check_pointers": "161001", "check_kernels": "161001"}
    rows = [[number, first_line(step), codes.get(step.__name__, "161002")] for number, step in enumerate(steps, 1)]
    return table(["", "aclnnConvTbcBackward", "status"], rows)


def deviations():
    entries = tomllib.loads(DEVIATIONS.read_text(encoding="utf-8"))
    rows = [[f"`{name}`", entry["operator"], entry["kind"], entry["documents"], entry["vendor"], entry["here"]]
            for name, entry in entries.items()]
    return table(["entry", "operator", "kind", "the documents say", "the vendor's code does", "here"], rows)


TABLES = {"products": products, "statuses": statuses, "checks": checks, "tbc-checks": tbc_checks,
          "deviations": deviations}


def rendered(text):
    """The page with every generated table brought up to date."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
        body = make()
        text, count = pattern.subn(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
        assert count == 1, f"docs/cann.md must have one place for the table {name}"
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
