"""`convgrad fuzz`: the same cases for the same seed, planted faults found and made small, deaths survived."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import faulty_backend
import numpy as np
import pytest

from convgrad import Problem, machine, plan
from convgrad.cli import main
from convgrad.fuzz import coverage
from convgrad.fuzz.case import Case
from convgrad.fuzz.coverage import Coverage
from convgrad.fuzz.generator import LIMITS, Generator
from convgrad.fuzz.judge import families_of, judged
from convgrad.fuzz.runner import Search
from convgrad.fuzz.shrink import shrink
from convgrad.fuzz.workers import Workers
from convgrad.guarded import View
from convgrad.plan import BACKENDS, clear_plan_cache


@pytest.fixture
def faulty() -> Iterator[str]:
    faulty_backend.register()
    yield faulty_backend.NAME
    del BACKENDS[faulty_backend.NAME]
    clear_plan_cache()


@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
def test_a_seed_draws_the_same_cases_and_their_strings_read_back(backend: str) -> None:
    one, other = Generator(backend, 7), Generator(backend, 7)
    drawn = [one.case(index) for index in range(150)]
    assert drawn[::-1] == [other.case(index) for index in reversed(range(150))]
    assert drawn != [Generator(backend, 8).case(index) for index in range(150)]
    for _, case in drawn:
        assert str(Case.parse(str(case))) == str(case)
        assert max(map(len, (case.problem.results, case.problem.operands))) <= 3


def test_the_generator_reaches_every_kind_of_case() -> None:
    cases = [Generator("native", 0).case(index)[1] for index in range(1500)]
    problems = [case.problem for case in cases]
    convs = [problem.conv for problem in problems]
    assert {conv.axes for conv in convs} == {1, 2, 3}
    assert {problem.dtype for problem in problems} == {problem.out_dtype for problem in problems} and len(
        {problem.dtype for problem in problems}) == 7
    assert len({problem.compute for problem in problems}) == 10
    assert {problem.wrt for problem in problems} == {
        "output", "input", "weight", "bias", "input+weight", "input+bias", "weight+bias", "input+weight+bias"}
    assert {case.call[0] for case in cases} == {"plan", "function", "backward", "transposed"}
    assert {word for case in cases for word in case.call[1:]} == {"out", "workspace", "permuted"}
    assert {kind for case in cases for kind in case.data} == {
        "whole", "dense", "special", "normal", "positive", "constant", "ramp"}
    views = [view for case in cases for view in case.views]
    for field in ("offset", "gaps", "sliced", "flipped", "broadcast"):
        assert any(getattr(view, field) for view in views)
    assert any(conv.depthwise for conv in convs) and any(0 in conv.output_shape for conv in convs)
    assert any(low != high for conv in convs for low, high in conv.padding)
    assert any(case.limit == 0 for case in cases) and any(len(case.threads) > 1 for case in cases)
    for conv in convs:
        assert max(map(_size, (conv.input_shape, conv.weight_shape, conv.output_shape))) <= LIMITS["native"].elements


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def test_the_reference_has_no_fault() -> None:
    for index in range(60):
        _, case = Generator("reference", 3).case(index)
        outcome = judged(case, "reference")
        assert outcome.verdict == "right", f"{case}: {outcome.detail}"


def test_a_case_is_judged_in_every_way(faulty: str) -> None:
    """The planted faults show as what they are, however the problem is called."""
    wrong = "weight_grad f32 n1 c3 k2 i5 w2 s2"
    for call in ("plan", "function", "function+out", "backward+out+workspace", "transposed+permuted"):
        assert judged(Case.parse(f"{wrong} ; call={call}"), faulty).verdict == "wrong"
        assert judged(Case.parse(f"{wrong.replace('c3', 'c2')} ; call={call}"), faulty).verdict == "right"
    assert judged(Case.parse("bias_grad f32 n3 c1 k2 i5 w1"), faulty).verdict == "damage"
    assert judged(Case.parse("conv f32 n1 c1 k1 i9 w2 d4"), faulty).verdict == "error"
    assert judged(Case.parse("conv f32 n1 c1 k1 i9 w2 d3"), faulty).families == ("faulty",)


@pytest.mark.parametrize(("drawn", "smallest"), [
    ("weight_grad+bias_grad bf16>f32 n4 c24 k12 i9x11 w3x2 s2x1 p1:0x2 g4 NHWC OHWI scaled ; data=dense,ramp seed=9 "
     "views=offset,broadcast02,plain,gaps0 call=backward+out threads=1,3", "weight_grad f32 n1 c3 k1 i1 w1 s2"),
    ("conv f16 n3 c5 k6 i20x30x7 w3x5x2 d4x1x2 p1x0x0 hf32 NDHWC ; limit=5 repeats=2", "conv f32 n1 c1 k1 i1 w1 d4"),
])
def test_what_fails_shrinks_to_the_smallest_problem(faulty: str, drawn: str, smallest: str) -> None:
    case = Case.parse(drawn)
    verdict = judged(case, faulty).verdict
    assert verdict not in ("right", "refused")

    def first_failing(cases: object) -> int | None:
        return next((place for place, one in enumerate(cases)  # type: ignore[var-annotated, arg-type]
                     if judged(one, faulty).verdict == verdict), None)

    assert str(shrink(case, first_failing, at_once=3)) == smallest


def test_what_matters_is_kept() -> None:
    """A failure that needs a view, a limit and a layout keeps them."""

    def first_failing(cases: object) -> int | None:
        return next((place for place, case in enumerate(cases)  # type: ignore[var-annotated, arg-type]
                     if any(view.broadcast for view in case.views) and case.limit == 5
                     and case.problem.layout == "NHWC" and case.problem.conv.groups > 2), None)

    case = Case.parse("input_grad bf16 n4 c24 k12 i9x11 w3x2 s2x1 g12 NHWC OHWI ; seed=9 "
                      "views=offset,gaps1+broadcast02,plain limit=5")
    assert str(shrink(case, first_failing)) == \
        "input_grad f32 n1 c3 k3 i1x1 w1x1 g3 NHWC ; views=plain,broadcast2,plain limit=5"


def test_processes_that_die_or_hang_are_replaced(faulty: str) -> None:
    cases = [Case.parse(text) for text in (
        "conv f32 n1 c1 k1 i5 w1", "conv f32 n1 c1 k1 i5 w4", "conv f32 n1 c1 k1 i6 w1", "conv f32 n1 c1 k1 i9 w3 s3",
        "conv f32 n1 c1 k1 i7 w1", "conv f32 n1 c1 k1 i8 w1")]
    workers = Workers(faulty, 2, serve=faulty_backend.serve_faulty, patience=5.0)
    try:
        answers = {str(case): outcome for answer in workers.judge(enumerate(cases)) if answer
                   for _, case, outcome in [answer]}
    finally:
        workers.close()
    assert [answers[str(case)].verdict for case in cases] == ["right", "crash", "right", "hang", "right", "right"]
    assert "SIGSEGV" in answers[str(cases[1])].detail


def test_a_search_counts_and_shows_each_kind_of_failure_once(faulty: str) -> None:
    class Drawn(Generator):
        def case(self, index: int) -> tuple[str, Case]:
            return "drawn", Case(Problem.parse(f"weight_grad f32 n1 c{1 + index % 4} k2 i9 w2 s{1 + index % 2}"))

    search = Search(Drawn(faulty, 0), Workers(faulty, 0), count=40)
    search.run()
    failures = search.smallest_failures()
    assert sum(search.verdicts.values()) == search.sorts["drawn"] == search.families["faulty"] == 40
    assert search.failed == search.verdicts["wrong"] == 10
    assert [str(failed.case) for failed in failures] == ["weight_grad f32 n1 c3 k1 i1 w1 s2"]


def test_the_command(capsys: pytest.CaptureFixture[str], faulty: str) -> None:
    assert main(["fuzz", "--backend", "reference", "--count", "30", "--seed", "4", "--processes", "0"]) == 0
    said = capsys.readouterr().out
    assert "reference: 30 problems" in said and "float" in said and "seed 4" in said
    assert main(["fuzz", "--backend", "reference", "--case", "conv f32 n1 c1 k1 i5 w1 ; views=offset,gaps1,plain"]) == 0
    assert "right" in capsys.readouterr().out
    assert main(["fuzz", "--backend", faulty, "--count", "400", "--seed", "0", "--processes", "0", "--plan-only"]) == 1
    said = capsys.readouterr().out
    assert "repeat it: convgrad fuzz --backend faulty --plan-only --case 'input_grad f32 n1 c1 k1 i1 w1 d4'" in said


def test_planning_needs_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(machine, "cuda_missing", lambda: "there is no GPU")
    words = ["fuzz", "--backend", "triton", "--count", "5", "--seed", "2", "--processes", "0"]
    assert main([*words, "--plan-only"]) == 0
    assert "triton: 5 problems" in capsys.readouterr().out
    assert main(words) == 3
    assert "triton is not available here: there is no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["--seconds", "0"], ["--seconds", "nan"], ["--seed", "-1"], ["--count", "many"], ["--backend", "none"],
    ["--case", "conv f32"], ["--case", "conv f32 n1 c1 k1 i5 w1 ; call=phone"],
    ["--case", "conv f32 n1 c1 k1 i5 w1 ; views=plain"], ["--case", "conv f32 n1 c1 k1 i5 w1 ; data=none"],
    ["--case", "conv f32 n1 c1 k1 i5 w1 ; views=plain,round,plain"], ["--case", "conv f32 n1 c1 k1 i5 w1 ; size=3"]])
def test_bad_input_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["fuzz", *words])
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_views_read_back() -> None:
    for text in ("plain", "offset", "gaps01", "offset+gaps4+sliced0+flipped23+broadcast1"):
        assert str(View.parse(text)) == text


def test_kernel_families() -> None:
    assert families_of("gather_bf16_32x16x64 + weight_e4m3_16x16_split1 + bias_f32_4096x1") == (
        "gather", "weight", "bias")
    assert families_of("few_weight_out_f32_16lanes_avx512 + zeros") == ("few_weight_out", "zeros")


def test_coverage_takes_a_few_tiles_of_every_family() -> None:
    seen = Coverage(most=2)
    assert seen.add("gather_f32_32x16 + bias_f32_4096x1") and not seen.add("gather_f32_32x16")
    assert seen.add("gather_f32_64x16") and not seen.add("gather_f32_128x16")  # it has two
    assert seen.add("gather_f32_256x16 + weight_f32_16x16")  # for the sake of the other
    assert {family: len(names) for family, names in seen.taken.items()} == {"gather": 2, "bias": 1, "weight": 1}


def test_a_verified_backend_is_counted_by_family(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, here on the faulty backend in this process: what is wrong is shown, the rest is counted."""
    texts = ["conv f32 n1 c1 k1 i5 w1", "weight_grad f32 n1 c3 k2 i5 w2 s2", "input_grad f32 n1 c1 k1 i5 w2"]
    monkeypatch.setattr(coverage, "offered", lambda backend, drawn: iter(map(Problem.parse, texts)))
    monkeypatch.setattr(coverage, "cores", lambda: 0)
    monkeypatch.setattr(coverage, "TILES_OF_A_FAMILY", 3)
    said: list[str] = []
    assert coverage.verify_on_gpu(faulty, 60.0, said.append)  # one kernel name: one problem
    assert "1 problems chosen, which take 1 kernel families" in said[0] and "faulty 1" in said[-2]
    texts[:1] = []
    assert not coverage.verify_on_gpu(faulty, 60.0, said.append)
    assert "0 problems right, 1 not" in said[-1] and "families without a right one: faulty" in said[-1]
    assert any("repeat it: convgrad fuzz --backend faulty --case 'weight_grad f32 n1 c3 k2 i5 w2 s2" in text
               for text in said)


def test_listed_problems_are_planned_and_take_many_kernels() -> None:
    """As on a GPU, which planning does not touch; the interpreter of other tests has fewer kernels."""
    pytest.importorskip("triton")
    script = ("from convgrad import plan\n"
              "from convgrad.fuzz.coverage import Coverage, listed_problems\n"
              "seen = Coverage(9)\n"
              "for problem in listed_problems(): seen.add(plan(problem, backend='triton').kernel)\n"
              "print(*seen.taken)")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert len(answer.stdout.split()) >= 25, answer.stdout + answer.stderr


def test_a_bias_gradient_of_constants_is_judged_by_short_sums() -> None:
    # The reference once made one chain of 6272 roundings, further from the sum than the kernel may be.
    outcome = judged(Case.parse("weight_grad+bias_grad f64 n8 c16 k24 i8x14x7 w1x1x1 NDHWC ; data=constant"), "native")
    assert outcome.verdict == "right", outcome.detail


def test_an_inf_reaches_no_lane_without_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    # Groups of 17 channels: what was left of the first sixteen stood beside the last one.
    monkeypatch.setenv("CONVGRAD_FAMILY", "few")
    clear_plan_cache()
    case = Case.parse("input_grad hif8>bf16 n2 c12 k51 i5x7 w5x7 s4x1 g3 NHWC ; data=special seed=1")
    outcome = judged(case, "native")
    clear_plan_cache()
    assert outcome.verdict == "right", outcome.detail


def test_the_address_of_a_result_does_not_change_its_bits() -> None:
    # How many cache lines a result touches once decided where the kernel cut its sums into blocks.
    chosen = plan("input_grad f32 n2 c32 k96 i14x7 w5x5 NHWC", backend="native", num_threads=1)
    random = np.random.default_rng(0)
    dy = random.standard_normal((2, 10, 3, 96)).astype(np.float32).transpose(0, 3, 1, 2)
    w = random.standard_normal((96, 32, 5, 5)).astype(np.float32)
    room, bits = np.zeros(2 * 14 * 7 * 32 + 64, np.float32), set()
    aligned = -room.ctypes.data % 64 // 4
    for offset in (0, 1, 4, 8):
        dx = room[aligned + offset:][:2 * 14 * 7 * 32].reshape(2, 14, 7, 32)
        chosen.run((dy, w), (dx.transpose(0, 3, 1, 2),), np.empty(chosen.workspace_bytes, np.uint8))
        bits.add(dx.tobytes())
    assert len(bits) == 1
