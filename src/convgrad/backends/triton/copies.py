"""Copies between tensors whose positions are neighbours in memory (channels first) and whose channels are."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def copy_tile(program, source, target, channels, outer, run, f_n, f_o, f_far, t_n, t_o, t_far, FROM_FIRST: tl.constexpr,
              TO_FIRST: tl.constexpr, FROM_ALIGN: tl.constexpr, TO_ALIGN: tl.constexpr, CHANNEL_ALIGN: tl.constexpr,
              RUN_ALIGN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """BC channels of BP positions; FIRST: positions are neighbours, channels `far` apart, else the other way round."""
    channels = channels * CHANNEL_ALIGN
    run = run * RUN_ALIGN
    channel_tiles = tl.cdiv(channels, BC)
    run_tiles = tl.cdiv(run, BP)
    c = (program % channel_tiles) * BC + tl.arange(0, BC)
    program = program // channel_tiles
    p = (program % run_tiles) * BP + tl.arange(0, BP)
    program = program // run_tiles
    o = (program % outer).to(tl.int64)
    n = (program // outer).to(tl.int64)
    source += n * (f_n * FROM_ALIGN) + o * (f_o * FROM_ALIGN)
    target += n * (t_n * TO_ALIGN) + o * (t_o * TO_ALIGN)
    # each side in the order of its memory: the tile is turned in between, through shared memory
    if FROM_FIRST:
        value = tl.load(source + c.to(tl.int64)[:, None] * (f_far * FROM_ALIGN) + p[None, :],
                        mask=(c < channels)[:, None] & (p < run)[None, :])
    else:
        value = tl.load(source + p.to(tl.int64)[:, None] * (f_far * FROM_ALIGN) + c[None, :],
                        mask=(p < run)[:, None] & (c < channels)[None, :])
    if FROM_FIRST != TO_FIRST:
        value = tl.trans(value)
    if TO_FIRST:
        tl.store(target + c.to(tl.int64)[:, None] * (t_far * TO_ALIGN) + p[None, :], value,
                 mask=(c < channels)[:, None] & (p < run)[None, :])
    else:
        tl.store(target + p.to(tl.int64)[:, None] * (t_far * TO_ALIGN) + c[None, :], value,
                 mask=(p < run)[:, None] & (c < channels)[None, :])


@triton.jit
def copy_kernel(a_source, a_target, b_source, b_target,
                a_programs, a_channels, a_outer, a_run, a_fn, a_fo, a_ffar, a_tn, a_to, a_tfar,
                b_programs, b_channels, b_outer, b_run, b_fn, b_fo, b_ffar, b_tn, b_to, b_tfar,
                A_FROM_FIRST: tl.constexpr, A_TO_FIRST: tl.constexpr, A_FROM_ALIGN: tl.constexpr,
                A_TO_ALIGN: tl.constexpr, A_CHANNEL_ALIGN: tl.constexpr, A_RUN_ALIGN: tl.constexpr,
                A_BC: tl.constexpr, A_BP: tl.constexpr,
                B_FROM_FIRST: tl.constexpr, B_TO_FIRST: tl.constexpr, B_FROM_ALIGN: tl.constexpr,
                B_TO_ALIGN: tl.constexpr, B_CHANNEL_ALIGN: tl.constexpr, B_RUN_ALIGN: tl.constexpr,
                B_BC: tl.constexpr, B_BP: tl.constexpr):
    """Two tensors in one launch: the last programs copy the second one."""
    program = tl.program_id(0)
    if program < a_programs:
        copy_tile(program, a_source, a_target, a_channels, a_outer, a_run, a_fn, a_fo, a_ffar, a_tn, a_to, a_tfar,
                  A_FROM_FIRST, A_TO_FIRST, A_FROM_ALIGN, A_TO_ALIGN, A_CHANNEL_ALIGN, A_RUN_ALIGN, A_BC, A_BP)
    else:
        copy_tile(program - a_programs, b_source, b_target, b_channels, b_outer, b_run, b_fn, b_fo, b_ffar, b_tn, b_to,
                  b_tfar, B_FROM_FIRST, B_TO_FIRST, B_FROM_ALIGN, B_TO_ALIGN, B_CHANNEL_ALIGN, B_RUN_ALIGN, B_BC,
                  B_BP)
