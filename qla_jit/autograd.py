"""The operator on CUDA tensors as a node of PyTorch's graph: gradients by the kernels of `backward`.

Saved for the backward: q, k, v, g, beta (fp32), the initial state and the cumulative lengths, all of them inputs.  Per
token and value head, with R value heads per key head and 16-bit tensors, that is ``2 V + 4 K / R + 8`` bytes, and no
copy where the caller keeps its tensors anyway.
"""

from __future__ import annotations

import torch

from . import device_indices, dispatch
from .errors import GradientError, UnsupportedError
from .validate import Call


def chunk_gated_delta_rule_cuda(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final state or None) of a validated call, differentiable once in all six inputs.

    Tensors as in `dispatch.forward_cuda`, g and beta fp32, initial_state in the call's state_dtype.
    """
    return _ChunkGatedDeltaRule.apply(call, cu_seqlens, q, k, v, g, beta, initial_state)


def _require_backward(call: Call) -> None:
    """Refuse before the forward what the backward could not answer, and plan it."""
    try:
        dispatch.planned_backward(call)
    except UnsupportedError as error:
        raise GradientError(
            f"a backward kernel must exist where an input requires a gradient, but {error} "
            'Pass backward="chunk_form" (slow, PyTorch), or call under torch.no_grad().'
        ) from error


class _ChunkGatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, cu_seqlens, q, k, v, g, beta, initial_state):
        ctx.set_materialize_grads(False)
        _require_backward(call)
        ctx.call = call
        ctx.save_for_backward(q, k, v, g, beta, initial_state, device_indices.bounds(call, cu_seqlens))
        o, final = dispatch.forward_cuda(
            call, q, k, v, g, beta, cu_seqlens, initial_state, None, None, None, None, None
        )
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal):
        q, k, v, g, beta, initial_state, bounds = ctx.saved_tensors
        needs_dinitial = ctx.needs_input_grad[7]
        found = dispatch.backward_cuda(ctx.call, q, k, v, g, beta, bounds, initial_state, do, dfinal, needs_dinitial)
        return None, None, *found
