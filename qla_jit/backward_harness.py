"""Cases of the backward's kernels for `harness`: inputs that other kernels make come from float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import launch
from .backward_reference import backward_grad_reference, backward_state_reference, recompute_state_reference
from .config import Problem
from .reference import gate_scan_reference, kkt_inverse_reference


def gradient_of_outputs(inputs, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random dO ``[1, T, HV, V]`` in the inputs' dtype, and a gradient of the final states ``[N, HV, K, V]`` fp32."""
    gen = torch.Generator(inputs.v.device).manual_seed(seed)
    do = torch.randn(inputs.v.shape, generator=gen, device=inputs.v.device).to(inputs.v.dtype)
    return do, torch.randn(inputs.initial_state.shape, generator=gen, device=inputs.v.device)


def gate_inputs(problem: Problem, inputs, owned: torch.Tensor) -> dict[str, torch.Tensor]:
    """``log_gates`` as `kkt_inverse` leaves them, NaN in slots that no chunk owns; ``bounds``."""
    shape = launch.inverse_shape(problem, inputs.k.shape[1], len(inputs.cu_host) - 1)[:3]
    log_gates = torch.full(shape, float("nan"), dtype=torch.float32, device=inputs.k.device)
    log_gates[owned] = gate_scan_reference(inputs.g, inputs.cu_host, problem.chunk_size)[owned].float()
    return {"log_gates": log_gates, "bounds": inputs.cu_seqlens}


def chunk_inputs(problem: Problem, inputs, owned: torch.Tensor) -> dict[str, torch.Tensor]:
    """`gate_inputs`, and ``a`` as `kkt_inverse` leaves it; NaN wherever its content is unspecified."""
    k, c = inputs.k, problem.chunk_size
    shape = launch.inverse_shape(problem, k.shape[1], len(inputs.cu_host) - 1)
    a = torch.full(shape, float("nan"), dtype=k.dtype, device=k.device)
    a[owned] = kkt_inverse_reference(k, inputs.beta, inputs.cu_host, c)[owned].to(k.dtype)
    a[..., : c // 2, c // 2 :] = float("nan")
    return {"a": a, **gate_inputs(problem, inputs, owned)}


def _in_layout(problem: Problem, states: torch.Tensor) -> torch.Tensor:
    """``[N, HV, K, V]`` in the problem's layout and state_dtype."""
    turned = states.mT if problem.state_v_first else states
    return turned.to(launch.torch_dtype(problem.state_dtype)).contiguous()


def recompute_state_tensors(problem: Problem, inputs, owned: torch.Tensor) -> tuple[dict, Callable]:
    """(arguments of `recompute_state`, its float64 reference)."""
    initial = _in_layout(problem, inputs.initial_state)
    of_chunks = chunk_inputs(problem, inputs, owned)
    slots, heads = of_chunks["a"].shape[:2]
    v = inputs.v[0]
    states = torch.empty(slots, heads, problem.head_dim_v, problem.head_dim_k, dtype=v.dtype, device=v.device)

    def reference():
        wanted = recompute_state_reference(
            inputs.k, inputs.v, inputs.g, inputs.beta, initial, inputs.cu_host, bool(problem.state_v_first)
        )
        return {"states": wanted[0], "effects": wanted[1][0]}

    tensors = {
        "k": inputs.k[0], "v": v, **of_chunks, "initial": initial, "states": states, "effects": torch.empty_like(v),
        "has_initial": 1,
    }  # fmt: skip
    return tensors, reference


def backward_state_tensors(problem: Problem, inputs, owned: torch.Tensor) -> tuple[dict, Callable]:
    """(arguments of `backward_state`, its float64 reference)."""
    do, dfinal = gradient_of_outputs(inputs)
    dfinal = _in_layout(problem, dfinal)
    of_chunks = chunk_inputs(problem, inputs, owned)
    slots, heads = of_chunks["a"].shape[:2]
    dstates = torch.empty(slots, heads, problem.head_dim_v, problem.head_dim_k, dtype=do.dtype, device=do.device)

    def reference():
        wanted = backward_state_reference(
            inputs.q, inputs.k, inputs.g, inputs.beta, do, inputs.scale, dfinal, inputs.cu_host,
            bool(problem.state_v_first),
        )  # fmt: skip
        return {"dstates": wanted[0], "dv": wanted[1][0], "dinitial": wanted[2]}

    tensors = {
        "q": inputs.q[0], "k": inputs.k[0], "do": do[0], **of_chunks, "dfinal": dfinal,
        "dinitial": torch.empty_like(dfinal), "dstates": dstates, "dv": torch.empty_like(do[0]),
        "scale": inputs.scale, "has_dfinal": 1, "has_dinitial": 1,
    }  # fmt: skip
    return tensors, reference


def backward_grad_tensors(problem: Problem, inputs, owned: torch.Tensor) -> tuple[dict, Callable]:
    """(arguments of `backward_grad`, its float64 reference on the very states, effects and gradients it is given)."""
    do, dfinal = gradient_of_outputs(inputs)
    of_chunks = gate_inputs(problem, inputs, owned)
    q, k, g, beta, cu = inputs.q, inputs.k, inputs.g, inputs.beta, inputs.cu_host
    states, effects = recompute_state_reference(k, inputs.v, g, beta, inputs.initial_state, cu)
    dstates, dv, _ = backward_state_reference(q, k, g, beta, do, inputs.scale, dfinal, cu)
    effects, dv = effects.to(do.dtype), dv.to(do.dtype)

    def rounded(x):
        slots = torch.full(x.shape, float("nan"), dtype=do.dtype, device=x.device)
        slots[owned] = x[owned].to(do.dtype)
        return slots

    states, dstates = rounded(states), rounded(dstates)

    def reference():
        wanted = backward_grad_reference(q, k, g, beta, states, effects, dstates, dv, do, inputs.scale, cu)
        return {name: x[0] for name, x in zip(launch.OUTPUTS["backward_grad"], wanted)}

    tensors = {
        "q": q[0], "k": k[0], "beta": beta[0], **of_chunks, "states": states, "effects": effects[0],
        "dstates": dstates, "dv": dv[0], "do": do[0], "dq": torch.empty_like(q[0]), "dk": torch.empty_like(k[0]),
        "dbeta": torch.empty_like(beta[0]), "dg": torch.empty_like(g[0]), "scale": inputs.scale,
    }  # fmt: skip
    return tensors, reference
