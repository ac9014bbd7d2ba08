"""From a validated call on CUDA tensors to the compiled operator that answers it.

Operators are compiled once per (config, device kind) and kept.  Nothing here reads the device.
"""

from __future__ import annotations

import functools

import torch

from . import device_indices
from .arch import detect
from .config import OpConfig
from .op import CompiledOp, compile
from .validate import Call


@functools.cache
def _arch_name(device_index: int) -> str:
    return detect(device_index).name


@functools.cache
def compiled(config: OpConfig) -> CompiledOp:
    """The operator of a config with the default database and store, compiled at first use."""
    return compile(config)


@functools.cache
def _config(heads: int, value_heads: int, dim_k: int, dim_v: int, dtype, state_dtype, v_first: bool, device: int):
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    return OpConfig(heads, value_heads, dim_k, dim_v, names[dtype], names[state_dtype], v_first, _arch_name(device))


def config_of(call: Call) -> OpConfig:
    """The `OpConfig` that a call needs; every kernel it can launch follows from it."""
    return _config(
        call.num_heads, call.num_value_heads, call.head_dim_k, call.head_dim_v, call.dtype, call.state_dtype,
        call.state_v_first, call.device.index or 0,
    )  # fmt: skip


def forward_cuda(call: Call, q, k, v, g, beta, initial_state, out) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a validated call; tensors are ``[B, T, ...]`` and contiguous, g and beta fp32."""
    if call.device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(call.device):
            return forward_cuda(call, q, k, v, g, beta, initial_state, out)
    op = compiled(config_of(call))
    bounds = device_indices.bounds(call, call.cu_seqlens)
    if initial_state is not None and not initial_state.is_contiguous():
        initial_state = initial_state.contiguous()
    o, final = op(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), g.flatten(0, 1), beta.flatten(0, 1), bounds, call.scale,
        initial_state, call.output_final_state, None if out is None else out.flatten(0, 1), call.cu_host,
    )  # fmt: skip
    covered = call.cu_host[-1] if call.cu_host is not None else 0
    if covered < o.shape[0]:
        _clear_padding(o, bounds, call.cu_host)
    return (o.view(v.shape) if out is None else out), final


def _clear_padding(o: torch.Tensor, bounds: torch.Tensor, cu_host: tuple[int, ...] | None) -> None:
    """Rows past the last sequence are 0; where the host does not know their number, a mask on the device decides."""
    if cu_host is not None:
        o[cu_host[-1] :].zero_()
    else:
        o.masked_fill_((torch.arange(o.shape[0], device=o.device) >= bounds[-1])[:, None, None], 0)
