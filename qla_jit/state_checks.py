"""The single checks of states: initial and final ones, pools, checkpoints; errors as in `argument_checks`."""

from __future__ import annotations

import torch

from .argument_checks import FLOATS, HALF, require, support

#: Per device type: dtypes of an initial state, and dtypes a final state may be asked in.
INITIAL_STATE_DTYPES = {"cuda": (torch.float32, *HALF), "cpu": FLOATS}
STATE_DTYPES = {"cuda": (torch.float32, torch.bfloat16), "cpu": FLOATS}
CHECKPOINT_STEP = 64  # the largest chunk, a multiple of every other


def check_state_dtype(state_dtype, kind: str) -> None:
    support(
        state_dtype in STATE_DTYPES[kind],
        f"state_dtype in {STATE_DTYPES[kind]} on {kind}",
        f"state_dtype={state_dtype}",
        "leave it None for float32 states.",
    )


def check_initial_state(state, shape: tuple[int, ...], v_first: bool, state_dtype) -> None:
    kind = state.device.type
    require(
        tuple(state.shape) == shape,
        f"initial_state.shape == [N, HV, {'V, K' if v_first else 'K, V'}] == {list(shape)}",
        f"{tuple(state.shape)}",
        "pass one state per sequence and value head, in the layout that state_v_first names.",
    )
    support(
        state.dtype in INITIAL_STATE_DTYPES[kind],
        f"initial_state.dtype in {INITIAL_STATE_DTYPES[kind]} on {kind}",
        f"{state.dtype}",
        "keep states in float32.",
    )
    support(
        kind == "cpu" or state_dtype == torch.float32 or state.dtype == state_dtype,
        "initial_state.dtype == state_dtype unless state_dtype is float32",
        f"{state.dtype} and {state_dtype}",
        f"pass initial_state.to({state_dtype}): kernels keep states in one dtype, and will not round yours unasked.",
    )


def check_pool(pool, indices, sequences: int, dims: tuple[int, ...], state_dtype, final_state_out) -> None:
    """initial_state as a pool ``[P, *dims]`` whose rows ``indices`` name."""
    require(
        pool is not None,
        "initial_state is not None with state_indices",
        "initial_state=None",
        "pass the pool of states as initial_state.",
    )
    require(
        indices.dtype in (torch.int32, torch.int64) and indices.shape == (sequences,) and indices.is_contiguous(),
        "state_indices is a contiguous int32 or int64 tensor of shape [N]",
        f"shape {tuple(indices.shape)} of {indices.dtype}, N={sequences}",
        "pass one row of the pool per sequence, or a negative number for none.",
    )
    require(
        pool.dim() == 4 and pool.shape[0] >= 1 and tuple(pool.shape[1:]) == dims,
        f"initial_state.shape == [P, {', '.join(map(str, dims))}], P >= 1, with state_indices",
        f"{tuple(pool.shape)}",
        "pass a pool of states in the layout that state_v_first names.",
    )
    support(
        pool.dtype == state_dtype,
        "initial_state.dtype == state_dtype with state_indices",
        f"{pool.dtype} and {state_dtype}",
        "leave state_dtype None: states go back to the pool in the dtype of the pool.",
    )
    require(
        pool.is_contiguous(),
        "initial_state.is_contiguous() with state_indices",
        f"strides {pool.stride()}",
        "pass a contiguous pool: it is written in place.",
    )
    require(
        final_state_out is None,
        "final_state_out is None with state_indices",
        f"shape {tuple(final_state_out.shape) if final_state_out is not None else None}",
        "leave it out: final states go back to the pool.",
    )


def check_pool_rows(indices: torch.Tensor, pool: torch.Tensor) -> None:
    """Content of ``state_indices``, looked at where that is free: on the CPU."""
    largest = max(indices.tolist(), default=-1)
    require(
        largest < pool.shape[0],
        "state_indices < P",
        f"row {largest} of a pool of {pool.shape[0]} states",
        "pass rows of the pool, or a negative number for none.",
    )


def check_final_state_out(x: torch.Tensor, shape: tuple[int, ...], state_dtype, output_final_state) -> None:
    require(
        bool(output_final_state),
        "output_final_state with final_state_out",
        f"output_final_state={output_final_state!r}",
        "set it, or leave final_state_out out.",
    )
    require(
        tuple(x.shape) == shape and x.dtype == state_dtype and x.is_contiguous(),
        f"final_state_out is contiguous, {list(shape)} of {state_dtype}",
        f"shape {tuple(x.shape)} of {x.dtype}, strides {x.stride()}",
        "allocate it with torch.empty, or pass a final state of an earlier call.",
    )


def check_checkpoint_every(every, cu: tuple[int, ...] | None) -> None:
    require(
        isinstance(every, int) and every >= 1 and every % CHECKPOINT_STEP == 0,
        f"checkpoint_every % {CHECKPOINT_STEP} == 0, >= {CHECKPOINT_STEP}",
        f"checkpoint_every={every!r}",
        "pass a multiple of the chunk size, in tokens.",
    )
    require(
        cu is not None,
        "cu_seqlens_cpu is not None with checkpoint_every during a CUDA graph capture",
        "None",
        "pass the host lengths: the number of checkpoints depends on them.",
    )
