"""What a call asks of its inputs before the operator proper: normalised q and k, β by a sigmoid, g from its logits.

`Activation.apply` does it in PyTorch, differentiable, on any device; `ActivationKernel` does it on a card in one launch
of `input_activation`.  Both compute in fp32 and round q and k once, to their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .config import Problem
from .launch import torch_dtype

L2NORM_EPS = 1e-6  # under the square root, as FLA has it
ALIGNMENT_BYTES = 16  # of the widest load


@dataclass(frozen=True, eq=False)
class Activation:
    """Nothing asked for means that g and beta are only made fp32.

    normalize: q and k are divided by ``sqrt(Σ x² + 1e-6)``.  beta_scale: beta becomes ``beta_scale · sigmoid(beta)``,
    1 or 2; None leaves it.  a_log, dt_bias: ``[HV]``; g becomes ``−exp(a_log) · softplus(g + dt_bias)``; a_log None
    leaves it, dt_bias None adds nothing.
    """

    normalize: bool = False
    beta_scale: int | None = None
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether a parameter of the gates does."""
        return any(x is not None and x.requires_grad for x in (self.a_log, self.dt_bias))

    def apply(self, q, k, g, beta) -> tuple[torch.Tensor, ...]:
        """(q, k, g, beta) in PyTorch: ``[..., H, K]`` and ``[..., HV]`` of any float dtype."""
        if self.normalize:
            q, k = _L2Norm.apply(q), _L2Norm.apply(k)
        if self.beta_scale is not None:
            beta = self.beta_scale * _wide(beta).sigmoid()
        return q, k, self.decays(g), beta

    def decays(self, g: torch.Tensor) -> torch.Tensor:
        """g as `apply` has it."""
        if self.a_log is None:
            return g
        g = _wide(g) if self.dt_bias is None else _wide(g) + self.dt_bias
        return -_wide(self.a_log).exp() * F.softplus(g)


CAST = Activation()


class Modes(NamedTuple):
    """What the kernel is told to do to q and k, to g, and to beta (`launch`); 0: nothing."""

    qk: int
    g: int
    beta: int

    @classmethod
    def of(cls, activation: Activation, g_dtype: torch.dtype, beta_dtype: torch.dtype) -> Modes:
        """What has to be done to inputs of these dtypes."""
        g = 2 if activation.a_log is not None else int(g_dtype != torch.float32)
        beta = int(beta_dtype != torch.float32) if activation.beta_scale is None else 1 + activation.beta_scale
        return cls(int(activation.normalize), g, beta)

    @property
    def doubles_beta(self) -> bool:
        """Whether beta becomes twice a sigmoid, up to 2."""
        return self.beta == 3


#: Everything that the kernel can write.
ALL_MODES = Modes(1, 2, 3)


def outputs(problem: Problem, modes: Modes, tokens: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each tensor that the kernel writes, in the order of q, k, g, beta."""
    row = (tokens, problem.num_heads, problem.head_dim_k), torch_dtype(problem.dtype)
    gate = (tokens, problem.num_value_heads), torch.float32
    return (row, row) * bool(modes.qk) + (gate,) * bool(modes.g) + (gate,) * bool(modes.beta)


class ActivationKernel:
    """`input_activation` of one operator: its entry, and stand-ins for parameters of the gates that a call lacks."""

    def __init__(self, problem: Problem, entry: Callable[..., None]):
        self._problem = problem
        self._entry = entry
        self._dtype = torch_dtype(problem.dtype)
        self._absent: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def outputs(self, modes: Modes, tokens: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """As the function of this name."""
        return outputs(self._problem, modes, tokens)

    def __call__(
        self, activation: Activation, modes: Modes, written: Sequence, q, k, g, beta, device: torch.device
    ) -> tuple:
        """(q, k, g, beta) as the other kernels take them: those in ``written`` (like `outputs`), others as given.

        q, k: ``[T, H, K]``.  g, beta: ``[T, HV]`` in the dtypes of the problem; T >= 1.  All contiguous, aligned, and
        tensors or `handles`.
        """
        rest = iter(written)
        q_out, k_out = (next(rest), next(rest)) if modes.qk else (q, k)
        g_out = next(rest) if modes.g else g
        beta_out = next(rest) if modes.beta else beta
        a_log, a_log_half, a_log_mode = self._parameter(activation.a_log, device)
        dt_bias, dt_bias_half, dt_bias_mode = self._parameter(activation.dt_bias, device)
        self._entry(
            q, k, g, beta, a_log, dt_bias, a_log_half, dt_bias_half, q_out, k_out, g_out, beta_out,
            *modes, a_log_mode, dt_bias_mode,
        )  # fmt: skip
        return q_out, k_out, g_out, beta_out

    def _parameter(self, x: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(fp32 tensor, tensor in q's dtype, which of them to read)."""
        if device not in self._absent:
            heads = self._problem.num_value_heads
            self._absent[device] = (
                torch.empty(heads, dtype=torch.float32, device=device),
                torch.empty(heads, dtype=self._dtype, device=device),
            )
        wide, half = self._absent[device]
        if x is None:
            return wide, half, 0
        if x.dtype == self._dtype:
            return wide, aligned(x.contiguous()), 2
        return aligned(x.float().contiguous()), half, 1


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its memory does not start as TMA and 16-byte accesses need it."""
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _L2Norm(torch.autograd.Function):
    """``x / sqrt(Σ x² + 1e-6)`` in fp32, rounded to x's dtype.  Keeps x alone; PyTorch's own graph keeps it in fp32."""

    @staticmethod
    def forward(x):
        return _normalized(x)[0].to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        (y, scale), dy = _normalized(x), _wide(dy)
        return (scale * (dy - y * (y * dy).sum(-1, keepdim=True))).to(x.dtype)


def _normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS)
    return wide * scale, scale
