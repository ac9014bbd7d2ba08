"""What `torch.compile` sees of the operator: two custom operators of PyTorch's library, with shapes and a gradient.

A traced call becomes one node that nothing looks into; at run time the node is an eager call, with its checks, plan
and kernels.  This module is imported while a call is traced, never by an eager one.
"""

# No postponed annotations: `torch.library.custom_op` reads them.
from concurrent.futures import ThreadPoolExecutor

import torch

from . import api, device_indices
from .validate import validate
from .workspace import Workspace


@torch.library.custom_op("qla_jit::chunk_gated_delta_rule", mutates_args=())
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    scale: float | None,
    output_final_state: bool,
    state_v_first: bool,
    state_dtype: torch.dtype | None,
    auto_cp: bool,
    window: float,
    window_share: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`api.chunk_gated_delta_rule` of tensors as they are meant; window: 0 for "exact".

    Returns o and the final state, which is empty where none is asked for.
    """
    # Intermediates of its own: PyTorch may run this in a memory pool of its graphs, where nothing may be left behind.
    with torch.no_grad():
        o, final = api.chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, auto_cp=auto_cp, window=window or "exact",
            window_share=window_share, state_dtype=state_dtype, workspace=Workspace(),
        )  # fmt: skip
    if final is None:
        final = v.new_empty(0, dtype=_state_dtype(q, state_dtype))
    elif final is initial_state:
        final = final.clone()  # an operator of the library returns no input
    return o, final


def _state_dtype(q: torch.Tensor, state_dtype: torch.dtype | None) -> torch.dtype:
    """Of the final state, as `validate` has it."""
    return state_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)


@forward.register_fake
def _(
    q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, output_final_state, state_v_first, state_dtype,
    auto_cp, window, window_share,
):  # fmt: skip
    dtype = _state_dtype(q, state_dtype)
    if not output_final_state:
        return torch.empty_like(v), v.new_empty(0, dtype=dtype)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dims = (v.shape[3], k.shape[3]) if state_v_first else (k.shape[3], v.shape[3])
    return torch.empty_like(v), v.new_empty(sequences, v.shape[2], *dims, dtype=dtype)


@torch.library.custom_op("qla_jit::chunk_gated_delta_rule_backward", mutates_args=())
def backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    scale: float | None,
    state_v_first: bool,
    state_dtype: torch.dtype | None,
    auto_cp: bool,
    window: float,
    window_share: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, g, beta and the initial state, empty where there is none; of `forward`'s arguments."""
    given = [x for x in (q, k, v, g, beta, initial_state) if x is not None]
    call = validate(
        q, k, v, g, beta, scale, initial_state, dfinal is not None, state_v_first, cu_seqlens, cu_seqlens_cpu,
        state_dtype, auto_cp=auto_cp, window=window or "exact", window_share=window_share,
    )  # fmt: skip
    if call.runs_kernels:
        from .dispatch import backward_cuda

        bounds = device_indices.bounds(call, cu_seqlens)
        found = list(
            backward_cuda(call, q, k, v, g, beta, bounds, initial_state, do, dfinal, initial_state is not None)
        )
        found = found[: len(given)]
    else:
        options = dict(
            scale=scale, output_final_state=dfinal is not None, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu, state_dtype=state_dtype, backward="chunk_form",
        )  # fmt: skip
        # Within an operator of the library PyTorch records no graph in this thread.
        with ThreadPoolExecutor(1) as other_thread:
            found = list(other_thread.submit(_by_autograd, given, options, do, dfinal).result())
    if initial_state is None:
        found.append(v.new_empty(0))
    return tuple(found)


def _by_autograd(given, options: dict, do: torch.Tensor, dfinal: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Gradients of the chunk form; given: q, k, v, g, beta and the initial state if there is one."""
    leaves = [x.detach().requires_grad_() for x in given]
    o, final = api.chunk_gated_delta_rule(*leaves[:5], initial_state=leaves[5] if leaves[5:] else None, **options)
    outputs, gradients = ((o,), (do,)) if dfinal is None else ((o, final), (do, dfinal))
    return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True)


@backward.register_fake
def _(do, dfinal, q, k, v, g, beta, initial_state, *options):
    like = [torch.empty_like(x) for x in (q, k, v, g, beta)]
    return *like, v.new_empty(0) if initial_state is None else torch.empty_like(initial_state)


def _keep(ctx, inputs, output) -> None:
    q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, output_final_state, *rest = inputs
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu)
    ctx.options = scale, *rest  # without output_final_state, which `ctx.has_final` tells
    ctx.has_final = output_final_state


def _differentiate(ctx, do, dfinal):
    saved = ctx.saved_tensors
    dfinal = dfinal.contiguous() if ctx.has_final else None
    *found, dinitial = torch.ops.qla_jit.chunk_gated_delta_rule_backward(do.contiguous(), dfinal, *saved, *ctx.options)
    return *found, None if saved[5] is None else dinitial, *[None] * 9


forward.register_autograd(_differentiate, setup_context=_keep)
