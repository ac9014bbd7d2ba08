"""From a validated call on CUDA tensors to the compiled operator that answers it.

Operators are compiled once per (config, device kind) and kept.  Nothing here reads the device.  A repeated call pays
for the views, allocations and launches, and for little else: what its content decides is kept with the `Call`.
"""

from __future__ import annotations

import functools

import torch

from . import device_indices, launch
from .activation import Modes, aligned
from .arch import detect
from .backward import CompiledBackward, compile_backward
from .config import OpConfig
from .op import CompiledOp, compile
from .prepared import Checkpoints, PreparedCall
from .prepared_backward import Gradients, PreparedBackward
from .split import EXACT
from .validate import Call


@functools.cache
def _arch_name(device_index: int) -> str:
    return detect(device_index).name


@functools.cache
def compiled(config: OpConfig) -> CompiledOp:
    """The operator of a config with the default database and store, compiled at first use."""
    return compile(config)


@functools.cache
def compiled_backward(config: OpConfig) -> CompiledBackward:
    """The backward of a config with the default database and store, compiled at first use."""
    return compile_backward(config)


@functools.cache
def _config(heads: int, value_heads: int, dim_k: int, dim_v: int, dtype, state_dtype, v_first, device: int, gates):
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    gates = {} if gates is None else dict(activation=True, gate_dtype=names[gates[0]], beta_dtype=names[gates[1]])
    return OpConfig(
        heads, value_heads, dim_k, dim_v, names[dtype], names[state_dtype], v_first, _arch_name(device), **gates
    )


def config_of(call: Call, gates: tuple[torch.dtype, torch.dtype] | None = None) -> OpConfig:
    """The `OpConfig` that a call needs; every kernel it can launch follows from it.

    gates: the dtypes of g and beta where there is something to do to the inputs first.
    """
    return _config(
        call.num_heads, call.num_value_heads, call.head_dim_k, call.head_dim_v, call.dtype, call.state_dtype,
        call.state_v_first, call.device.index or 0, gates,
    )  # fmt: skip


def forward_cuda(
    call: Call, q, k, v, g, beta, cu_seqlens, initial_state, state_indices, out, final_state_out, workspace, activation
) -> tuple[torch.Tensor | None, ...]:
    """Run a validated call; tensors are ``[B, T, ...]`` and contiguous, g and beta fp32 or narrower.

    activation: an `Activation`, or None where the inputs are as they are meant.  Results as the operator's.
    """
    if _has_several_cards() and call.device.index != torch.cuda.current_device():
        with torch.cuda.device(call.device):
            return forward_cuda(
                call, q, k, v, g, beta, cu_seqlens, initial_state, state_indices, out, final_state_out, workspace,
                activation,
            )  # fmt: skip
    modes = gates = None
    if activation is not None:
        modes, gates = Modes.of(activation, g.dtype, beta.dtype), (g.dtype, beta.dtype)
    op, prepared = _prepared(call, modes, gates)
    is_split = prepared.num_scratch > 0
    if is_split and out is not None and _shares_memory(out, q, k, v, g, beta, initial_state, final_state_out):
        # A split writes to o before the last token of v is read.
        op, prepared = _prepared(call, modes, gates, may_split=False)
    bounds = device_indices.bounds(call, cu_seqlens)
    if state_indices is not None and state_indices.dtype != torch.int32:
        state_indices = state_indices.to(torch.int32)
    checkpoints = None if call.checkpoint_every is None else _new_checkpoints(call, op, bounds)
    out, final = prepared(
        q, k, v, g, beta, bounds, call.scale, initial_state, call.output_final_state, out, state_indices,
        final_state_out, checkpoints if call.num_checkpoints else None, workspace, activation,
    )  # fmt: skip
    _clear_padding(call, bounds, out)
    return (out, final) if checkpoints is None else (out, final, checkpoints.states)


def planned_backward(call: Call) -> PreparedBackward:
    """What the backward of a call launches for its lengths; kept with the call.  The forward asks for it, too: what a
    step does is settled before its first kernel.

    Raises UnsupportedError where no template answers a kernel of the backward.
    """
    key = "backward", call.window
    found = call.memo.get(key)
    if found is None:
        op = compiled_backward(config_of(call))
        walks = op.choose(call.cu_host, call.device, call.auto_cp, call.window, call.window_share)
        found = op.prepare(call.batch * call.num_tokens, call.num_sequences, call.device, walks)
        if not device_indices.is_capturing(call.device):  # a capture may have to do without a split
            call.memo[key] = found
    return found


def backward_cuda(call: Call, q, k, v, g, beta, bounds, initial_state, do, dfinal, needs_dinitial: bool) -> Gradients:
    """Gradients of a call's inputs in their shapes; do and dfinal: of o and of the final state, or None for zero.

    Tensors are ``[B, T, ...]`` and contiguous but for do and dfinal, g and beta fp32; bounds ``[N + 1]`` int32.
    """
    if _has_several_cards() and call.device.index != torch.cuda.current_device():
        with torch.cuda.device(call.device):
            return backward_cuda(call, q, k, v, g, beta, bounds, initial_state, do, dfinal, needs_dinitial)
    do = torch.zeros_like(v) if do is None else aligned(do.contiguous())
    dfinal = None if dfinal is None else aligned(dfinal.contiguous())
    found = planned_backward(call)(q, k, v, g, beta, bounds, call.scale, do, initial_state, dfinal, needs_dinitial)
    _clear_padding(call, bounds, *found[:5])
    return found


@functools.cache
def _has_several_cards() -> bool:
    return torch.cuda.device_count() > 1


def _prepared(
    call: Call, modes: Modes | None, gates: tuple[torch.dtype, torch.dtype] | None, may_split: bool = True
) -> tuple[CompiledOp, PreparedCall]:
    """The operator of a call, and what it launches for its lengths; modes, gates: of the activation and its inputs."""
    key = modes, gates, call.window, may_split  # a call with another window may share the memo
    found = call.memo.get(key)
    if found is None:
        op = compiled(config_of(call, gates))
        # With β up to 2 the gates alone do not bound what a window drops.
        window = EXACT if modes is not None and modes.doubles_beta else call.window
        forward = op.choose(call.cu_host, call.device, may_split and call.auto_cp, window, call.window_share)
        found = op, op.prepare(call.batch * call.num_tokens, call.num_sequences, call.device, forward, modes)
        if not device_indices.is_capturing(call.device):  # a capture may have to do without a split
            call.memo[key] = found
    return found


def _shares_memory(out: torch.Tensor, *others: torch.Tensor | None) -> bool:
    place = out.untyped_storage().data_ptr()
    return any(x is not None and x.untyped_storage().data_ptr() == place for x in others)


def _new_checkpoints(call: Call, op: CompiledOp, bounds: torch.Tensor) -> Checkpoints:
    shape = launch.state_shape(op.config.problem("fused_forward"), call.num_checkpoints)
    states = torch.empty(shape, dtype=call.state_dtype, device=call.device)
    return Checkpoints(call.checkpoint_every, states, device_indices.checkpoint_rows(call, bounds))


def _clear_padding(call: Call, bounds: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Rows past the last sequence become 0, of tensors ``[B, T, ...]``; where the host does not know their number, a
    mask on the device decides."""
    tokens = call.batch * call.num_tokens
    if call.cu_host is None:
        absent = torch.arange(tokens, device=call.device) >= bounds[-1]
        for x in tensors:
            x.view(tokens, -1).masked_fill_(absent[:, None], 0)
    elif call.cu_host[-1] < tokens:
        for x in tensors:
            x.view(tokens, -1)[call.cu_host[-1] :].zero_()
