"""Whole-number checks of GPU kernels: problems that were wrong, random ones of their kinds, tiles nobody has run.

Usage: PYTHONPATH=src python scratch/gpufix_check.py [seconds] [random problems]
"""
import collections, math, multiprocessing, os, random, re, subprocess, sys, time, traceback

ONCE = {
    "bf16 n7 c85 k15 i16x28 w3x5 s2x2 p2:0x0:1 d1x2 g5": "xwy",
    "f16 n2 c24 k24 i8x9x9 w1x3x3 d1x3x3 g24": "xwy", "bf16 n8 c64 k64 i4x9x8 w1x3x3 d2x1x1 g64": "xwy",
    "bf16 n3 c64 k64 i9x9x14 w1x1x2 g64": "xwy", "f32 n8 c54 k54 i8x9x4 w1x1x3 s1x1x2 d1x3x1 g54": "xy",
    "bf16 n7 c96 k96 i5x14x8 w1x3x3 p1x1x6 d1x1x3 g96": "xwy",
    "f16 n16 c128 k128 i7x7x28 w1x3x3 p0:0x1:2x0:1 d2x2x1 g128": "xwy",
    "f16 n7 c8 k8 i8x5 w2x3 s3x3 p1x1 g8": "xwy", "bf16 n8 c16 k16 i8x7 w7x3 p1x0 d1x3 g16": "xwy",
    "f16 n3 c8 k8 i14x33 w1x3 p0x1 d3x2 g8": "xwy", "f16 n2 c8 k8 i5x5 w3x3 s2x2 p1x0 g8": "xwy",
    "f16 n17 c8 k8 i14x28 w1x3 d3x2 g8": "xwy", "bf16 n8 c8 k8 i56x80 w1x3 s1x3 p1:1x0:2 d3x1 g8": "wy",
    "bf16 n1 c64 k2 i9x14x9 w1x3x3 s2x1x2 p1x0x0 d3x1x1": "xwy",
    "f16 n16 c384 k64 i14x16x4 w1x3x2 s3x2x2 d1x3x1 g16": "xwy",
    "f16 n16 c64 k128 i7x16x14 w3x1x3 s3x3x3 p2x0x6 d1x3x3 g64": "wy",
    "f64 n2 c8 k33 i5x6 w3x3 p1x1": "", "bf16 n2 c3 k32 i8x8 w4x4 s4x4": "xwy",
}


def random_problem(r):
    """A problem of one of the kinds that were wrong: depthwise 2-D and 3-D, odd groups, few channels."""
    kind = r.choice(["dw3", "dw3", "dw2", "odd", "odd", "few", "grouped", "dense"])
    axes = 3 if kind == "dw3" else r.choice([1, 2, 2, 2, 3])
    n = r.choice([1, 2, 3, 5, 7, 8, 16, 17])
    w = [r.choice([1, 1, 2, 3, 3, 5]) for _ in range(axes)]
    if kind == "dw3":
        w[0] = r.choice([1, 1, 1, 3])
    s = [r.choice([1, 1, 1, 2, 3]) for _ in range(axes)]
    d = [r.choice([1, 1, 1, 2, 3]) for _ in range(axes)]
    p = [(r.choice([0, 0, 1, 2]), r.choice([0, 1, 2])) if r.random() < .5 else (q := r.choice([0, 1, 2]), q) for _ in range(axes)]
    most = {1: 300, 2: 40, 3: 12}[axes]
    i = [max(1, d[a] * (w[a] - 1) + 1 - sum(p[a])) + r.randrange(most) for a in range(axes)]
    if kind.startswith("dw"):
        c = k = g = r.choice([8, 16, 24, 32, 40, 54, 64, 96, 128])
    elif kind == "odd":
        g = r.choice([1, 2, 5]); c = g * r.choice([3, 5, 9, 17, 20, 33]); k = g * r.choice([1, 3, 5, 12, 17, 40])
    elif kind == "few":
        g = 1; c, k = r.choice([(64, 2), (3, 64), (4, 32), (64, 8), (8, 64), (128, 4)])
    elif kind == "grouped":
        g = r.choice([2, 4, 16]); c = g * r.choice([2, 4, 8, 16, 32]); k = g * r.choice([2, 4, 8, 16, 32])
    else:
        g = 1; c = r.choice([16, 32, 64, 128]); k = r.choice([16, 32, 64, 128])
    words = [r.choice(["bf16", "f16", "bf16", "f16", "f32", "f64"]), f"n{n}", f"c{c}", f"k{k}", "i" + "x".join(map(str, i)), "w" + "x".join(map(str, w)),
             "s" + "x".join(map(str, s)), "p" + "x".join(f"{a}:{b}" for a, b in p), "d" + "x".join(map(str, d))] + ([f"g{g}"] if g > 1 else [])
    return " ".join(words), r.choice(["xwy", "xwy", "xwy", "xy", "wy", "x", ""])


def numbers(shape, dtype, last, seed):
    import torch
    t = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)
    order = (0, *range(2, len(shape)), 1)
    return t.permute(order).contiguous().permute(0, -1, *range(1, len(shape) - 1)) if last else t


def exact(conv, grad, x, weight):
    import torch
    pads = [pad for axis in reversed(range(conv.axes)) for pad in conv.padding[axis]]
    padded = torch.nn.functional.pad(x.double(), pads)
    found = torch.ops.aten.convolution_backward(
        grad.double(), padded, weight.double(), [conv.out_channels], conv.stride, [0] * conv.axes, conv.dilation, False,
        [0] * conv.axes, conv.groups, [True] * 3)
    inner = [slice(low, low + extent) for (low, _), extent in zip(conv.padding, conv.in_size)]
    return found[0][(slice(None), slice(None), *inner)], found[1], found[2]


def operands(problem, cl):
    import torch
    conv, dtype = problem.conv, getattr(torch, problem.dtype)
    return (numbers(conv.output_shape, dtype, "y" in cl, 1), numbers(conv.input_shape, dtype, "x" in cl, 2),
            numbers(conv.weight_shape, dtype, "w" in cl, 3))


def backward(text, cl):
    import torch
    from convgrad import Problem, conv_backward
    from convgrad.plan import _cache
    problem = Problem.parse(f"input_grad+weight_grad+bias_grad {text} cuda")
    conv = problem.conv
    grad, x, weight = operands(problem, cl)
    wanted = exact(conv, grad, x, weight)
    bad = []
    for turn in range(3):
        results = conv_backward(grad, x, weight, stride=conv.stride, padding=conv.padding, dilation=conv.dilation, groups=conv.groups)
        for name, result, want in zip(("dx", "dw", "db"), results, wanted):
            wrong = int((~(result == want.to(result.dtype))).sum())
            if wrong:
                bad.append(f"{name} {wrong} of {result.numel()} (call {turn})")
            result.fill_(float("nan"))
    kernel = next(reversed(list(_cache.values()))).kernel if _cache else "?"
    return ("WRONG " + ", ".join(bad) if bad else "ok"), kernel


def scanned(compiled):
    """Register operands of products: how many products wait later, and how many operands are overwritten before."""
    g = compiled.asm.get("ttgir", "")
    late = [n for n in re.findall(r"warp_group_dot_wait.*pendings = (\d+)", g) if n != "0"]
    regs = len(re.findall(r"warp_group_dot %\S+, .*: tensor", g))
    return f"regs {regs} late {len(late)}"


def pointer(text, cl, settle):
    import torch
    from convgrad import Problem
    from convgrad.backends.triton import launch, plans
    from convgrad.backends.triton.geometry import geometry
    if not settle and hasattr(plans, "must_settle"):
        plans.must_settle = lambda *a: False
    seen = []
    if not hasattr(launch.Step, "plain_compiled"):
        launch.Step.plain_compiled = launch.Step.compiled
    def compiled(step, *a):
        k = launch.Step.plain_compiled(step, *a)
        seen.append(scanned(k))
        return k
    launch.Step.compiled = compiled
    problem = Problem.parse(f"{text} cuda")
    grad, x, weight = operands(problem.with_(dtype="float32"), cl)
    dtype, out = getattr(torch, problem.dtype), getattr(torch, problem.out_dtype)
    wanted = exact(problem.conv, grad, x, weight)
    if problem.wrt == "weight":
        ops, want = (grad, x), wanted[1]
    else:
        ops, want = (grad, weight), wanted[0]
    geo = geometry(problem.conv)
    way = (plans.weight_choices if problem.wrt == "weight" else plans.gather_choices)(problem, geo, None, None)[-1]
    result = torch.full_like(want, float("nan"), dtype=out)
    way.run(tuple(o.to(dtype) for o in ops), result, None)
    wrong = int((~(result == want.to(out))).sum())
    launch.Step.compiled = launch.Step.plain_compiled
    return (f"WRONG {wrong} of {result.numel()}" if wrong else "ok"), f"{way.name} {' '.join(sorted(set(s for s in seen if 'regs 0' not in s)))}"


def by_choice(text, choice):
    """A problem by a given tile."""
    import torch
    from convgrad import Problem
    from convgrad.backends.triton import cell_plans, plans
    cell_plans.SHARED_BYTES = {1: 227 * 1024, 2: 113 * 1024}
    problem = Problem.parse(f"{text} cuda")
    grad, x, weight = operands(problem, "xwy")
    wanted = exact(problem.conv, grad, x, weight)
    plan = plans.make_plan(problem, None, choice)
    ops, want = ((grad, x), wanted[1]) if problem.wrt == "weight" else ((grad, weight), wanted[0])
    result = torch.full_like(weight if problem.wrt == "weight" else x, float("nan"))
    bad = set()
    for _ in range(20):
        result.fill_(float("nan"))
        plan.run(ops, (result,), None)
        wrong = int((~(result == want.to(result.dtype))).sum())
        if wrong:
            bad.add(wrong)
    note = " ".join(str(v) for v in choice.values() if not isinstance(v, float))
    return (f"WRONG {sorted(bad)} of {result.numel()}" if bad else "ok"), f"{plan.kernel} {note}"


def untried_lines(count, seed=5):
    """Line tiles that the table does not name."""
    from convgrad import Problem
    from convgrad.backends.triton import line_plans
    from convgrad.backends.triton.candidates import choice_of
    from convgrad.backends.triton.geometry import geometry
    table = dict(line_plans.FITTED_TILES) if hasattr(line_plans, "FITTED_TILES") else {}
    every = {(bk, cb, pixels): ((1, 2, 3, 4, 5, 6, 7), (2, 3, 4, 5, 6, 7)) for bk in (64, 128, 256) for cb in (16, 32, 64, 128, 256) for pixels in (64, 128)}
    r = random.Random(seed)
    found = {}
    for text in ("weight_grad bf16 n8 c256 k256 i14x15 w3x3 p1x1 NHWC OHWI", "weight_grad f16 n6 c72 k136 i20x17 w5x7 s1x2 p2x3 NHWC OHWI",
                 "weight_grad bf16 n3 c32 k64 i7x9x11 w3x3x4 p1x0x2 d1x2x1 NDHWC ODHWI", "weight_grad f16 n5 c16 k64 i31x30 w7x6 p3x1 NHWC OHWI"):
        problem = Problem.parse(f"{text} cuda")
        line_plans.FITTED_TILES = every
        for tile in line_plans.all_lines(geometry(problem.conv), None):
            old = table.get((tile.BK, tile.CB, math.prod(tile.box)), ((), ()))
            sums = tile.BK * tile.CB * tile.NT // (tile.warps * 32)
            if tile.NT not in old[1 if tile.chain else 0] and sums <= 192:
                found.setdefault((tile.BK, tile.CB, math.prod(tile.box), tile.NT, tile.chain, tile.programs > 0), []).append((text, choice_of("lines", tile)))
    chosen = [r.choice(options) for options in found.values()]
    r.shuffle(chosen)
    return chosen[:count]


def large_cells(count):
    from convgrad import Problem
    from convgrad.backends.triton import cell_plans
    from convgrad.backends.triton.candidates import choice_of
    from convgrad.backends.triton.geometry import geometry
    kept = dict(cell_plans.SHARED_BYTES)
    found = []
    for text in ("input_grad bf16 n16 c64 k16 i56x56 w3x3 p1x1 NHWC OHWI", "input_grad f16 n16 c3 k64 i64x64 w7x7 s2x2 p3x3 NHWC OHWI",
                 "input_grad bf16 n4 c256 k256 i28x28 w3x3 p1x1 g32 NHWC OHWI", "input_grad bf16 n8 c16 k128 i28x28 w5x5 p2x2 NHWC OHWI"):
        geo = geometry(Problem.parse(text).conv)
        cell_plans.SHARED_BYTES = {1: 227 * 1024, 2: 113 * 1024}
        more = set(cell_plans.all_cells(geo, None))
        cell_plans.SHARED_BYTES = kept
        more -= set(cell_plans.all_cells(geo, None))
        found += [(text, choice_of("cells", tile)) for tile in random.Random(2).sample(sorted(more, key=str), min(len(more), count // 4))]
    return found


def run(task):
    kind, arguments = task
    start = time.time()
    try:
        verdict, note = {"backward": backward, "pointer": pointer, "choice": by_choice}[kind](*arguments)
    except Exception as error:
        verdict, note = f"{type(error).__name__}: {str(error)[:300]}", traceback.format_exc()[-400:]
    return kind, arguments, verdict, note, time.time() - start


def main():
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 300
    r = random.Random(int(os.environ.get("SEED", "1")))
    tasks = [("backward", item) for item in ONCE.items()]
    lists = [[("choice", item) for item in untried_lines(64)], [("choice", item) for item in large_cells(24)]]
    for settle in (False,):
        lists.append([("pointer", (f"{wrt} {fmt} {geo}", cl, settle)) for fmt, cl in (("e4m3>f32", "xwy"), ("bf16", "xwy"), ("f16", ""), ("f32", "xwy"))
                      for wrt in ("input_grad", "weight_grad")
                      for geo in ("n8 c64 k64 i28x28 w3x3 p1x1", "n16 c17 k15 i28x28 w3x5 s2x2 p2:0x0:1 d1x2", "n2 c3 k32 i8x8 w4x4 s4x4", "n32 c24 k128 i30x30 w3x3 p1x1")])
    lists.append([("backward", random_problem(r)) for _ in range(count)])
    tasks += [task for group in lists[:3] for task in group] + lists[3]
    end, done, bad, table = time.time() + limit, 0, [], collections.Counter()
    with multiprocessing.get_context("spawn").Pool(int(os.environ.get("PROCESSES", "15"))) as pool:
        results = pool.imap_unordered(run, tasks)
        while done < len(tasks) and time.time() < end:
            try:
                kind, arguments, verdict, note, seconds = results.next(timeout=max(0.1, end - time.time()))
            except multiprocessing.TimeoutError:
                break
            done += 1
            table[kind, verdict.split()[0]] += 1
            if verdict != "ok":
                bad.append((kind, arguments, verdict, note))
                print("BAD", kind, arguments[:2] if kind != "choice" else arguments[0], verdict, "|", note[-600:].replace("\n", " "), flush=True)
            elif kind == "pointer" and "regs" in note:
                print("   ", arguments[0], note, flush=True)
            elif arguments[0] in ONCE:
                print("right now:", arguments[0], "|", note, flush=True)
        pool.terminate()
    print(f"\n{done} of {len(tasks)} done in {limit - (end - time.time()):.0f} s, {len(bad)} bad")
    for key, number in sorted(table.items()):
        print(f"  {key[0]:9} {key[1]:24} {number}")


if __name__ == "__main__":
    main()
