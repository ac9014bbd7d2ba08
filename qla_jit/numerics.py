"""How results are judged and what they are judged on: the error metric, tolerances, and seeded inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .errors import InputError

GATES = ("none", "mild", "violent", "bench")
_MILD_ON = "mild:"  # and a percentage

#: Largest relative error against float64 of o and of the final state that a kernel of this dtype may show.  Kernels and
#: their peers measure 3e-3 to 4.5e-3 in bf16 on random keys; correlated keys need `tolerance` instead.
GPU_TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``‖got − want‖ / ‖want‖`` in float64; inf if either holds a NaN or an infinity.

    Against an all-zero (or empty) reference: 0 if ``got`` is all zero too, else inf.  Raises InputError if the shapes
    differ.
    """
    return relative_errors([(got, want)])[0]


def relative_errors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """`relative_error` of each (got, want), all of whose ``got`` are on one device, which is waited for once."""
    norms = []
    for got, want in pairs:
        if got.shape != want.shape:
            raise InputError(
                f"`got.shape == want.shape` must hold, but got {tuple(got.shape)} and {tuple(want.shape)}; "
                "compare tensors of one layout."
            )
        got, want = got.detach().double(), want.detach().to(got.device).double()
        norms += want.norm(), (got - want).norm()
    found = torch.stack(norms).tolist() if norms else []
    return [_relative(size, gap) for size, gap in zip(found[::2], found[1::2])]


def _relative(size: float, gap: float) -> float:
    if not (math.isfinite(size) and math.isfinite(gap)):
        return math.inf
    if size == 0.0:
        return 0.0 if gap == 0.0 else math.inf
    return gap / size


def tolerance(peer: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    """Twice the error of a same-dtype PyTorch computation, plus one rounding to ``dtype``.

    peer: the same result from `chunk_form` with ``operand_dtype=dtype``, rounded where the kernels round.  Adapts to
    inputs on which every 16-bit computation loses digits.
    """
    return 2.0 * relative_error(peer, want) + torch.finfo(dtype).eps / 2


@dataclass(frozen=True, eq=False)
class Inputs:
    """One seeded problem, tokens of all sequences flattened into batch 1.

    q, k: ``[1, T, H, K]``, L2-normalised, and v ``[1, T, HV, V]``, in the dtype asked for.  g (log space), beta:
    ``[1, T, HV]`` fp32.  initial_state: ``[N, HV, K, V]`` fp32.  cu_seqlens: ``[N + 1]`` int32; cu_host: the same ints.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_host: tuple[int, ...]
    scale: float

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        """(q, k, v, g, beta), the leading arguments of every implementation."""
        return self.q, self.k, self.v, self.g, self.beta


def make_inputs(
    lengths: Sequence[int],
    num_heads: int = 1,
    num_value_heads: int = 1,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    gates: str = "mild",
    key_correlation: float = 0.0,
    beta: float | None = None,
    draw_on: torch.device | str = "cpu",
) -> Inputs:
    """Inputs drawn from ``seed`` on the CPU, so that every device sees the same numbers, or on ``draw_on`` (faster).

    lengths: tokens of each sequence (0 allowed).  gates: "none" (g = 0), "mild" (logsigmoid(N(0, 1)) / 16), "violent"
    (half the tokens down to −50, the others 0), "mild:P" (mild on P % of the value heads, rounded up, 0 on the rest; P
    of 0 to 100), "bench" (as "mild:75").
    key_correlation: 0 for independent keys, 1 for one key repeated.  beta: a constant instead of sigmoid(N(0, 1)).
    Raises InputError on an unknown ``gates``.
    """
    gen = torch.Generator(draw_on).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device=draw_on)

    total, num_sequences = sum(lengths), len(lengths)
    q = F.normalize(normal(1, total, num_heads, head_dim_k), dim=-1)
    common = F.normalize(normal(1, 1, num_heads, head_dim_k), dim=-1)
    own = F.normalize(normal(1, total, num_heads, head_dim_k), dim=-1)
    k = F.normalize(math.sqrt(key_correlation) * common + math.sqrt(1.0 - key_correlation) * own, dim=-1)
    v = normal(1, total, num_value_heads, head_dim_v)
    update = normal(1, total, num_value_heads).sigmoid()
    if beta is not None:
        update = torch.full_like(update, beta)
    g = _gates(gates, (1, total, num_value_heads), gen)
    initial_state = 0.1 * normal(num_sequences, num_value_heads, head_dim_k, head_dim_v)
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    return Inputs(
        q=q.to(device, dtype),
        k=k.to(device, dtype),
        v=v.to(device, dtype),
        g=g.to(device),
        beta=update.to(device),
        initial_state=initial_state.to(device),
        cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=device),
        cu_host=tuple(cu),
        scale=head_dim_k**-0.5,
    )


def _gates(kind: str, shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    percent = "75" if kind == "bench" else kind.removeprefix(_MILD_ON) if kind.startswith(_MILD_ON) else None
    if kind not in GATES and not (percent and percent.isascii() and percent.isdigit() and int(percent) <= 100):
        raise InputError(
            f'`gates in {GATES}`, or "mild:P" with P of 0 to 100, must hold, but got gates={kind!r}; name one of them.'
        )
    if kind == "none":
        return torch.zeros(shape)
    if kind == "violent":
        size, coin = (torch.rand(shape, generator=gen, device=gen.device) for _ in range(2))
        return torch.where(coin < 0.5, -50.0 * size, 0.0)
    g = F.logsigmoid(torch.randn(shape, generator=gen, device=gen.device)) / 16
    if percent is not None:
        heads = torch.randperm(shape[-1], generator=gen, device=gen.device)
        g[..., heads[-(-int(percent) * shape[-1] // 100) :]] = 0.0
    return g
