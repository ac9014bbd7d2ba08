"""The scan over the segments of a sequence, on Hopper: S_in(r + 1) = M_r S_in(r) + S*_r, in place.

With M = γ I + D (`segments_sm90`), transposed as in `segment_state`:

    S_inᵀ(r + 1) ← γ_r S_inᵀ(r) + S_inᵀ(r) D_rᵀ + S*_rᵀ

`segment_state` left S*_r where the start of segment r + 1 belongs, and says in `starts` which segments start from a
state that only this scan knows (−1).  Where the start of r is known otherwise, S*_r is the start of r + 1 already.
A CTA takes one (sequence, value head) and 64 columns of d_v, and walks r from the first start it corrects to the last.
The sequences are those of `cut_sequences`: with fewer than three segments there is nothing to correct.

| role  | warps | per segment, in order                                                | waits for | signals |
| ----- | ----- | -------------------------------------------------------------------- | --------- | ------- |
| load  | 1     | both tiles of D and S* by TMA                                        | free      | full    |
| state | 4     | S D by rounded D and by what that lost; S* added; S to `o`           | full      | free    |

Stages: `stages`, each one segment's [d_k, d_k] tiles of D and its [64, d_k] fp32 S*, which the load warp brings before
the state group needs them: what a segment takes is the product of a state and D, not the way to memory and back.
S is rounded for the products as it is in the forward itself.  May start before `segment_state` has ended; its own
dependents may start at once (programmatic dependent launch).
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .fragments_sm90 import FRAGMENTS_CUDA
from .segments_sm90 import FIRST, SEGMENT_FIELDS, SEGMENTS_CUDA, deviation_tile, panels, state_tokens

NAME = "segment_correct_sm90"

PARAMETERS = (Parameter("stages", (1, 2), 2, "segments in flight"),)

SCAN_CUDA = r"""
namespace qla {

// out[0], out[1] <- the first segment of first + 1 ... last - 1 after which the scan corrects a start, and one past the
// last: those with a code < 0 whose neighbour has one, too; last and first if there is none.  By every warp alike.
__device__ __forceinline__ void corrected_segments(int* out, const int* codes, int pitch, int first, int last,
                                                   int neighbour) {
  out[0] = last;
  out[1] = first;
  for (int base = first + 1; base < last; base += 32) {
    const int segment = base + (threadIdx.x & 31);
    const bool corrects =
        segment < last && codes[segment * pitch] < 0 && codes[(segment + neighbour) * pitch] < 0;
    const unsigned found = __ballot_sync(0xffffffffu, corrects);
    if (found == 0u) continue;
    out[0] = min(out[0], base + __ffs(found) - 1);
    out[1] = base + 32 - __clz(found);
  }
}

}  // namespace qla
"""


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    return (Role("scan", 5, 248, "warps 0 to 3: 64 columns of S; warp 4: TMA loads of D and S*"),)


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    return (
        SharedBuffer("d", schedule["stages"] * 2 * problem.head_dim_k**2, 2),
        SharedBuffer("added", schedule["stages"] * 64 * problem.head_dim_k, 4),
    )


def barriers(problem: Problem, schedule: Schedule) -> int:
    """mbarriers of a CTA: full and free of the ring."""
    return 2 * schedule["stages"]


def work(problem: Problem, schedule: Schedule) -> Work:
    """Of one segment of one value head."""
    dk, dv = problem.head_dim_k, problem.head_dim_v
    return Work(
        flops=2 * 2 * dv * dk * dk,
        bytes_read=4 * dv * dk + dv // 64 * 2 * 2 * dk * dk,
        bytes_written=4 * dv * dk,
    )


def unsupported(problem: Problem) -> str | None:
    return None if problem.chunk_size == 64 else f"chunk_size={problem.chunk_size} (segments are cut in chunks of 64)"


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang  # no postponed annotations in this module: T.prim_func evaluates them
    import tilelang.language as T

    C, DK, DV, HV = problem.chunk_size, problem.head_dim_k, problem.head_dim_v, problem.num_value_heads
    PANELS, TILES, STAGES, ROWS = panels(problem), DK // 64, schedule["stages"], state_tokens(problem)
    dtype = problem.dtype
    pitch = HV * DV  # of a token in o
    rows = T.GemmWarpPolicy.FullRow
    backwards = problem.kernel == "segment_gradient_correct"

    num_tokens = T.dynamic("num_tokens")
    num_segments = T.dynamic("num_segments")
    num_bounds = T.dynamic("num_bounds")
    num_cut = T.dynamic("num_cut")

    toward = -1 if backwards else 1  # the neighbour whose start (backwards: end) the transfer over a segment gives

    def at(i, begin, end):
        """The i-th segment of the walk over begin … end − 1."""
        return end - 1 - i if backwards else begin + i

    @T.macro
    def run(block, first_segments, cut_sequences, codes, decays, bounds, segments, deviations, o):
        d_s = T.alloc_shared((STAGES, 2, DK, DK), dtype)
        added_s = T.alloc_shared((STAGES, ROWS, 64), dtype)  # fp32 values, as they lie in o
        T.annotate_layout({d_s: tilelang.layout.make_full_bank_swizzled_layout(d_s)})
        T.annotate_layout({added_s: tilelang.layout.make_linear_layout(added_s)})
        full = T.alloc_barrier(arrive_count=[32] * STAGES)
        free = T.alloc_barrier(arrive_count=[128] * STAGES)
        corrected = T.alloc_local((2,), "int32")  # first segment after which the scan corrects, and one past the last

        T.pdl_trigger()
        panel = block % PANELS
        head = block % (HV * PANELS) // PANELS
        seq = cut_sequences[block // (HV * PANELS)]
        token0 = bounds[seq]
        first = first_segments[seq]
        last = first_segments[seq + 1] - 1
        T.pdl_sync()
        T.call_extern(
            "handle",
            "qla::corrected_segments",
            corrected.data,
            T.access_ptr(codes[0, head], "r"),
            HV,
            first,
            last,
            toward,
        )
        begin = corrected[0]
        end = corrected[1]
        if T.get_thread_binding() < 128:
            state = T.alloc_fragment((64, DK), "float32")
            state_op = T.alloc_fragment((64, DK), dtype)
            product = T.alloc_fragment((64, DK), "float32")
            added = T.alloc_local((DK // 2,), "float32")
            takes = T.alloc_var("int32")
            decay = T.alloc_var("float32")
            next_token = T.alloc_var("int32")
            if begin < end:
                T.call_extern(
                    "handle", f"qla::load_panel<{DK}>", state.data,
                    T.access_ptr(o[token0 + segments[at(0, begin, end), FIRST] * C, head, panel * 64], "r"), pitch,
                )  # fmt: skip
            else:
                T.clear(state)
            takes = T.cast(begin < end, "int32")  # the first and the last of the walk are corrected
            decay = 0.0
            next_token = 0
            if begin < end:
                decay = decays[at(0, begin, end), head]
                next_token = token0 + segments[at(0, begin, end) + toward, FIRST] * C
            T.call_extern("handle", f"qla::pin<{DK // 2}>", state.data)
            T.copy(state, state_op)
            for i in T.serial(end - begin):
                stage = i % STAGES
                after = at(T.min(i + 1, end - begin - 1), begin, end)
                # As they are in memory: what is made of them waits for them, so that comes behind the products.
                code_after = T.alloc_var("int32")
                neighbour_after = T.alloc_var("int32")
                decay_after = T.alloc_var("float32")
                chunk_after = T.alloc_var("int32")
                code_after = codes[after, head]
                neighbour_after = codes[after + toward, head]
                decay_after = decays[after, head]
                chunk_after = segments[after + toward, FIRST]
                T.barrier_wait(full[stage], (i // STAGES) % 2)
                T.wgmma_gemm(
                    state_op, d_s[stage, 0, :, :], product, transpose_B=backwards, clear_accum=True, policy=rows
                )
                T.wgmma_gemm(
                    state_op, d_s[stage, 1, :, :], product, transpose_B=backwards, clear_accum=False, policy=rows
                )
                T.call_extern(
                    "handle", f"qla::load_panel<{DK}>", added.data, T.access_ptr(added_s[stage, 0, 0], "r"), 64
                )
                T.wait_wgmma(0)
                T.barrier_arrive(free[stage])
                T.call_extern(
                    "handle", f"qla::advance<{DK}>", state.data, product.data, added.data, T.exp2(decay), takes
                )
                if takes != 0:
                    T.call_extern(
                        "handle", f"qla::save_panel<{DK}>", state.data,
                        T.access_ptr(o[next_token, head, panel * 64], "w"), pitch,
                    )  # fmt: skip
                T.copy(state, state_op)
                takes = T.cast((code_after & neighbour_after) < 0, "int32")  # both < 0
                decay = decay_after
                next_token = token0 + chunk_after * C
        else:
            T.call_extern("handle", "qla::fence_proxy_global")  # D and S* came by ordinary stores, of another kernel
            for i in T.serial(end - begin):
                segment = at(i, begin, end)
                stage = i % STAGES
                token = token0 + segments[segment, FIRST] * C
                next_token = token0 + segments[segment + toward, FIRST] * C
                T.barrier_wait(free[stage], (i // STAGES + 1) % 2)
                for half in T.unroll(2):
                    for tile in T.unroll(TILES):
                        row, of_panel = deviation_tile(problem, half * TILES + tile)
                        T.tma_copy(
                            deviations[token + row : token + row + DK, head, of_panel * 64 : of_panel * 64 + 64],
                            d_s[stage, half, :, tile * 64 : tile * 64 + 64], barrier=full[stage],
                        )  # fmt: skip
                T.tma_copy(
                    o[next_token : next_token + ROWS, head, panel * 64 : panel * 64 + 64], added_s[stage, :, :],
                    barrier=full[stage],
                )  # fmt: skip
                T.barrier_arrive(full[stage])

    prelude = FRAGMENTS_CUDA + SEGMENTS_CUDA + SCAN_CUDA
    if backwards:

        @T.prim_func
        def segment_gradient_correct(
            first_segments: T.Tensor((num_bounds,), "int32"),
            cut_sequences: T.Tensor((num_cut,), "int32"),
            ends: T.Tensor((num_segments, HV), "int32"),
            decays: T.Tensor((num_segments, HV), "float32"),
            bounds: T.Tensor((num_bounds,), "int32"),
            segments: T.Tensor((num_segments, SEGMENT_FIELDS), "int32"),
            effects: T.Tensor((num_tokens, HV, DV), dtype),
            dv: T.Tensor((num_tokens, HV, DV), dtype),
        ):
            with T.Kernel(num_cut * HV * PANELS, threads=160, prelude=prelude) as block:
                run(block, first_segments, cut_sequences, ends, decays, bounds, segments, effects, dv)

        return segment_gradient_correct

    @T.prim_func
    def segment_correct(
        first_segments: T.Tensor((num_bounds,), "int32"),
        cut_sequences: T.Tensor((num_cut,), "int32"),
        starts: T.Tensor((num_segments, HV), "int32"),
        decays: T.Tensor((num_segments, HV), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        segments: T.Tensor((num_segments, SEGMENT_FIELDS), "int32"),
        o: T.Tensor((num_tokens, HV, DV), dtype),
    ):
        with T.Kernel(num_cut * HV * PANELS, threads=160, prelude=prelude) as block:
            run(block, first_segments, cut_sequences, starts, decays, bounds, segments, o, o)

    return segment_correct


TEMPLATE = Template(
    kernel="segment_correct",
    name=NAME,
    archs=("sm90",),
    preferred=("sm90",),
    parameters=PARAMETERS,
    rules=(),
    roles=roles,
    buffers=buffers,
    barriers=barriers,
    work=work,
    prim_func=prim_func,
    sources=("segment_correct_sm90.py", "segments_sm90.py", "fragments_sm90.py"),
    unsupported=unsupported,
    pass_configs={"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_ENABLE_FAST_MATH": True},
)
