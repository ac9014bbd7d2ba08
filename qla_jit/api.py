"""The public operator, with the signature and the meaning of FLA's `chunk_gated_delta_rule`.

CPU tensors run the fp32 chunk form; CUDA tensors run the kernels (`dispatch`, imported on first use).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import torch

from . import state_pool
from .activation import CAST, Activation
from .argument_checks import DTYPES, check_gate_parameters
from .chunk_form import chunk_form
from .errors import GradientError, InputError, UnsupportedError
from .gates import WindowShare
from .segments import DEFAULT_WINDOW, EXACT
from .state_checks import check_pool_rows
from .validate import Call, validate
from .workspace import Workspace

_BACKWARDS = ("kernel", "chunk_form")
_OPTIONS = ("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout", "head_first")


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | list[int] | tuple[int, ...] | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    *,
    auto_cp: bool = True,
    window: str | float = DEFAULT_WINDOW,
    window_share: float | WindowShare | None = None,
    state_dtype: torch.dtype | None = None,
    backward: str = "kernel",
    out: torch.Tensor | None = None,
    final_state_out: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    checkpoint_every: int | None = None,
    workspace: Workspace | None = None,
    **kwargs,
) -> tuple[torch.Tensor | None, ...]:
    """Gated DeltaNet: ``S ← exp(g) (I − β k kᵀ) S + β k vᵀ``, ``o = scale · Sᵀ q``, token by token (docs/MATH.md (1)).

    q, k: ``[B, T, H, K]``; k must be L2-normalised, or use_qk_l2norm_in_kernel set.  v: ``[B, T, HV, V]``, HV a
    multiple of H.  One dtype: bf16 or fp16 on CUDA (contiguous, K 64 or 128, V 64, 128 or 256), any on the CPU.
    g: ``[B, T, HV]``, any float dtype, log space, finite and ≤ 0.  beta: ``[B, T, HV]``, any float dtype, in (0, 1).
    scale: ``K ** -0.5`` if None.
    initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with state_v_first) in fp32, bf16 or fp16; zero if None.
    output_final_state: also return the states after the last tokens.  state_dtype: of those; fp32 if None, or bf16.
    use_qk_l2norm_in_kernel: divide q and k by ``sqrt(Σ x² + 1e-6)``.  use_beta_sigmoid_in_kernel: beta holds logits;
    with allow_neg_eigval it becomes ``2 · sigmoid(beta)``.
    cu_seqlens: ``[N + 1]`` int32 or int64 on q's device, cumulative lengths of sequences laid end to end in batch 1.
    Empty sequences are allowed.  Tokens past ``cu_seqlens[-1]`` are padding: their rows of o are 0.
    cu_seqlens_cpu: the same numbers on the host.  Without them, one device-to-host copy is made per call (none during a
    CUDA graph capture, where lengths are then not checked).  On CUDA their agreement is the caller's promise, also in
    every replay of a graph that was captured with them: a split is made for these lengths.
    chunk_indices: accepted for FLA's sake and not needed.  cp_context: must be None.
    auto_cp: whether long sequences may be split over the card, where the tuning database predicts that it pays and the
    host knows the lengths.  The result of a sequence then depends on the batch by rounding; False never splits.
    window: "exact", or a tolerance in (0, 1): a split may forget states that gates have since scaled by less than that.
    What o and the final state lose is at most the tolerance times the state forgotten, in norm, for keys of norm ≤ 1;
    by default a tolerance far below what 16-bit products round by.  Without a split, and with allow_neg_eigval, whose
    windows the gates alone do not bound, nothing is forgotten.
    window_share: of the value heads, in [0, 1], those whose gates decay so that windows hold, where that is known
    (`window_share_of` some gates); or a `WindowShare` of the layer, which learns it from the calls it is passed to.  It
    decides how a batch is split, and results by rounding alone.  None expects most heads to decay.
    backward: "kernel", or "chunk_form" to run PyTorch's slow chunk form on CUDA when a gradient is needed: of a second
    order, or where no kernel computes it (V = 256, checkpoints).
    out, final_state_out: o (``[B, T, HV, V]``, q's dtype) and the final state (state_dtype; may be initial_state) are
    written here.  Contiguous; not when gradients are needed, as state_indices and checkpoint_every.
    state_indices: ``[N]`` int32 or int64 on q's device.  initial_state is then a pool ``[P, HV, K, V]``, contiguous, of
    which sequence n starts from row ``state_indices[n]``; with output_final_state its final state goes back to that
    row, in place, and the pool is returned.  A negative row: start from zero, write nothing.  state_dtype is that of
    the pool.  That rows are below P (unchecked on CUDA) and differ from each other is the caller's promise.
    checkpoint_every: a multiple of 64, in tokens; also return the states after every so many tokens of each sequence.
    Needs lengths on the host, as above.
    workspace: a `Workspace` of this stream, for the intermediates on CUDA.  With it, out and final_state_out or a pool,
    a call allocates nothing, where g and beta are contiguous, A_log and dt_bias fp32 or of q's dtype, indices int32.
    Without it, intermediates of up to 32 MiB are kept for later calls, for each of a thread's last four streams; a call
    that must leave nothing behind in a memory pool passes a new one.
    Under `torch.autocast` q, k and v are cast to its dtype, float64 excepted, as operands of PyTorch's products are; g,
    beta, parameters of the gates and states are not.
    Other keywords, as in FLA: use_gate_in_kernel (g becomes ``−exp(A_log) · softplus(g + dt_bias)``) with A_log and
    dt_bias ``[HV]``; chunk_size 16, 32 or 64, a hint; transpose_state_layout, the deprecated name of state_v_first.

    Returns (o ``[B, T, HV, V]`` in q's dtype, final state or None); with checkpoint_every also the checkpoints,
    ``[Σ ⌊length / checkpoint_every⌋, HV, K, V]`` like the final state, those of one sequence together.

    Raises InputError for malformed arguments, UnsupportedError where nothing implements them, GradientError where a
    gradient is needed and no kernel computes it, TypeError for unknown keywords.
    """
    chunk_size, gate = 64, False
    if kwargs:
        state_v_first, chunk_size, gate = _read_options(kwargs, state_v_first)
    if cp_context is not None:
        raise UnsupportedError(
            f"`cp_context is None` must hold, but got {type(cp_context).__name__}; run each sequence on one card."
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise InputError(
            "`use_beta_sigmoid_in_kernel` must hold with allow_neg_eigval, but got use_beta_sigmoid_in_kernel=False; "
            'set it and pass logits, or pass 2 * sigmoid(logits) as beta without either flag and window="exact".'
        )
    if backward not in _BACKWARDS:
        raise InputError(f"`backward in {_BACKWARDS}` must hold, but got backward={backward!r}; name one of them.")
    if workspace is not None and not isinstance(workspace, Workspace):
        raise InputError(
            f"`workspace is a qla_jit.Workspace` must hold, but got {type(workspace).__name__}; make one per stream."
        )
    layer = window_share if isinstance(window_share, WindowShare) else None
    if layer is not None:
        window_share = layer.value if torch.compiler.is_compiling() else layer.known()
    activation = None
    if use_qk_l2norm_in_kernel or use_beta_sigmoid_in_kernel or gate:
        a_log, dt_bias = (kwargs.get("A_log"), kwargs.get("dt_bias")) if gate else (None, None)
        beta_scale = (2 if allow_neg_eigval else 1) if use_beta_sigmoid_in_kernel else None
        activation = Activation(bool(use_qk_l2norm_in_kernel), beta_scale, a_log, dt_bias)
    dtype = _autocast_dtype(q)
    if dtype is not None:
        q, k, v = (_autocast(x, dtype) for x in (q, k, v))
    if torch.compiler.is_compiling():
        _refuse_traced(
            out=out, final_state_out=final_state_out, state_indices=state_indices, checkpoint_every=checkpoint_every,
            workspace=workspace, backward=None if backward == "kernel" else backward,
        )  # fmt: skip
        return _trace(
            q, k, v, g, beta, activation, initial_state, cu_seqlens, cu_seqlens_cpu, scale, bool(output_final_state),
            bool(state_v_first), state_dtype, auto_cp, EXACT if allow_neg_eigval else window, window_share,
        )  # fmt: skip
    call = validate(
        q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu,
        state_dtype, chunk_size, auto_cp, window, window_share, out, state_indices, checkpoint_every, final_state_out,
    )  # fmt: skip

    if gate:
        check_gate_parameters(activation.a_log, activation.dt_bias, v)
    if layer is not None:
        with torch.no_grad():
            layer.look(g, EXACT if allow_neg_eigval else call.window, (activation or CAST).decays)
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or g.requires_grad or beta.requires_grad
        or (initial_state is not None and initial_state.requires_grad)
        or (activation is not None and activation.requires_grad)
    )  # fmt: skip
    if needs_grad:
        _refuse_with_gradients(out=out, final_state_out=final_state_out, state_indices=state_indices)
    if not call.runs_kernels or (needs_grad and backward == "chunk_form"):
        if activation is not None:
            q, k, g, beta = activation.apply(q, k, g, beta)
        return _run_chunk_form(call, q, k, v, g, beta, initial_state, state_indices, out, final_state_out)
    if needs_grad:
        _refuse_with_gradients(checkpoint_every=checkpoint_every)
        if activation is not None:
            q, k, g, beta = activation.apply(q, k, g, beta)
        if allow_neg_eigval:
            call = dataclasses.replace(call, window=EXACT)  # its gates alone do not bound what a window drops
        return _run_with_gradients(call, q, k, v, g, beta, cu_seqlens, initial_state)
    if g.dtype == torch.float64 or not g.is_contiguous():
        g = g.float().contiguous()
    if beta.dtype == torch.float64 or not beta.is_contiguous():
        beta = beta.float().contiguous()
    if activation is None and (g.dtype != torch.float32 or beta.dtype != torch.float32):
        activation = CAST
    if initial_state is not None and initial_state.dtype != call.state_dtype:
        initial_state = initial_state.to(call.state_dtype)  # only ever widens: `validate` refused the rest
    return _forward_cuda()(
        call, q, k, v, g, beta, cu_seqlens, initial_state, state_indices, out, final_state_out, workspace, activation
    )


def _autocast_dtype(q: torch.Tensor) -> torch.dtype | None:
    """The dtype that `torch.autocast` gives the operands of products on q's device; None where it is off."""
    kind = q.device.type if isinstance(q, torch.Tensor) else None
    return torch.get_autocast_dtype(kind) if kind in DTYPES and torch.is_autocast_enabled(kind) else None


def _autocast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_cast = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if is_cast else x


def _refuse_traced(**given) -> None:
    for name, x in given.items():
        if x is not None:
            raise UnsupportedError(
                f"`{name}` must not be given inside torch.compile, but it is; leave it out, or call outside the graph."
            )


def _trace(
    q, k, v, g, beta, activation, initial_state, cu_seqlens, cu_seqlens_cpu, scale, output_final_state, state_v_first,
    state_dtype, auto_cp, window, window_share,
):  # fmt: skip
    """The call as a node of a traced graph (`library`); what is done to the inputs first is traced in PyTorch."""
    from . import library

    if activation is not None:
        if activation.a_log is not None:
            check_gate_parameters(activation.a_log, activation.dt_bias, v)
        q, k, g, beta = activation.apply(q, k, g, beta)
    if cu_seqlens_cpu is not None and not isinstance(cu_seqlens_cpu, torch.Tensor):
        cu_seqlens_cpu = torch.tensor(cu_seqlens_cpu, dtype=torch.int32)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if initial_state is not None:
        initial_state = initial_state.to(state_dtype or wide).contiguous()
    q, k, v = (x.contiguous() for x in (q, k, v))
    g, beta = (x.to(wide).contiguous() for x in (g, beta))
    o, final = library.forward(
        q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, scale, output_final_state, state_v_first,
        state_dtype, auto_cp, 0.0 if window == EXACT else window, window_share,
    )  # fmt: skip
    return o, final if output_final_state else None


def _run_with_gradients(call: Call, q, k, v, g, beta, cu_seqlens, initial_state):
    from .autograd import chunk_gated_delta_rule_cuda

    if initial_state is not None:
        initial_state = initial_state.to(call.state_dtype)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g.float(), beta.float()))
    return chunk_gated_delta_rule_cuda(call, q, k, v, g, beta, cu_seqlens, initial_state)


@functools.cache
def _forward_cuda() -> Callable:
    from .dispatch import forward_cuda

    return forward_cuda


def _refuse_with_gradients(**written) -> None:
    for name, x in written.items():
        if x is not None:
            raise GradientError(
                f"`{name} is None` must hold when a gradient is needed; leave it out, or use torch.no_grad()."
            )


def _run_chunk_form(call: Call, q, k, v, g, beta, initial_state, state_indices, out, final_state_out):
    if call.cu_host is None:
        raise InputError(
            "`cu_seqlens_cpu is not None` must hold to run the chunk form during a CUDA graph capture, but got None; "
            "pass the host lengths."
        )
    pool = initial_state if call.has_pool else None
    if pool is not None:
        if not state_indices.is_cuda:
            check_pool_rows(state_indices, pool)
        initial_state = state_pool.gather(pool, state_indices)
    with torch.autocast(call.device.type, enabled=False):  # inputs are as autocast wants them, products are in fp32
        o, final_state, *checkpoints = chunk_form(
            q, k, v, g, beta, call.scale, initial_state, call.cu_host, call.state_v_first, call.state_dtype,
            call.chunk_size, checkpoint_every=call.checkpoint_every,
        )  # fmt: skip
    if out is not None:
        o = out.copy_(o)
    if not call.output_final_state:
        final_state = None
    elif pool is not None:
        if not call.is_empty:  # where it is, the states are in their rows already
            state_pool.scatter(pool, state_indices, final_state)
        final_state = pool
    elif final_state_out is not None:
        final_state = final_state_out.copy_(final_state)
    return o, final_state, *checkpoints


def _read_options(kwargs: dict, state_v_first: bool) -> tuple[bool, int, bool]:
    """(state_v_first, chunk_size, use_gate_in_kernel) from FLA's extra keywords."""
    unknown = sorted(set(kwargs) - set(_OPTIONS))
    if unknown:
        raise TypeError(f"keywords must be known, but got {unknown}; the extra ones are {_OPTIONS[:-1]}.")
    if "head_first" in kwargs:
        raise InputError(
            "`head_first` must be absent, for tensors are always [B, T, H, ...], but it was passed; "
            "transpose dims 1 and 2 instead."
        )
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise InputError(
                "only one of state_v_first and its old name transpose_state_layout may be passed, but got both; "
                "keep state_v_first."
            )
        warnings.warn("transpose_state_layout is deprecated; pass state_v_first.", DeprecationWarning, stacklevel=3)
        state_v_first = kwargs["transpose_state_layout"]
    return state_v_first, kwargs.get("chunk_size", 64), bool(kwargs.get("use_gate_in_kernel", False))
