"""The single checks that `validate` is made of; each states its invariant, the values, and the remedy.

InputError: the argument is malformed.  UnsupportedError: it is well formed, but nothing here implements it.
"""

from __future__ import annotations

import math

import torch

from .config import HEAD_DIMS
from .errors import InputError, QlaError, UnsupportedError

CHUNK_SIZE_HINTS = (16, 32, 64)
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32, torch.float64)
#: Per device type: dtypes of q, k and v.
DTYPES = {"cuda": HALF, "cpu": FLOATS}
ALIGNMENT_BYTES = 16  # of a TMA tile's base address


def check_shapes(q, k, v, g, beta) -> None:
    for name, x, form in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        require(x.dim() == 4, f"{name}.shape == {form}", f"{name} {tuple(x.shape)}", "keep tokens before heads.")
    require(q.shape == k.shape, "q.shape == k.shape", f"{tuple(q.shape)} and {tuple(k.shape)}", "q and k share heads.")
    require(
        v.shape[:2] == q.shape[:2],
        "v.shape[:2] == q.shape[:2]",
        f"v {tuple(v.shape)} and q {tuple(q.shape)}",
        "pass the same batch and tokens.",
    )
    heads, value_heads = q.shape[2], v.shape[2]
    require(
        heads >= 1 and value_heads >= 1 and value_heads % heads == 0,
        "num_value_heads % num_heads == 0, both >= 1",
        f"num_heads={heads}, num_value_heads={value_heads}",
        "repeat q and k heads until the ratio is whole.",
    )
    require(
        q.shape[3] >= 1 and v.shape[3] >= 1,
        "head dims >= 1",
        f"head_dim_k={q.shape[3]}, head_dim_v={v.shape[3]}",
        "pass non-empty heads.",
    )
    for name, x in (("g", g), ("beta", beta)):
        require(
            x.shape == v.shape[:3],
            f"{name}.shape == [B, T, HV]",
            f"{name} {tuple(x.shape)} beside v {tuple(v.shape)}",
            "pass one number per token and value head.",
        )
    support(
        q.shape[0] * q.shape[1] < 2**31,
        "B * T < 2 ** 31",
        f"{q.shape[0]} * {q.shape[1]} tokens",
        "split the batch into several calls.",
    )


def check_devices_and_dtypes(q, k, v, g, beta, initial_state, cu_seqlens, **others) -> None:
    """others: optional tensors of which only the device is looked at."""
    kind = q.device.type
    named = dict(k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, **others)
    for name, x in named.items():
        require(
            x is None or x.device == q.device,
            f"{name}.device == q.device",
            f"{x.device if x is not None else None} and {q.device}",
            "move it there, or pass host lengths as cu_seqlens_cpu." if name == "cu_seqlens" else "move it there.",
        )
    support(kind in DTYPES, f"device in {tuple(DTYPES)}", f"{q.device}", "move the tensors to one of them.")
    support(
        q.dtype in DTYPES[kind],
        f"q.dtype in {DTYPES[kind]} on {kind}",
        f"{q.dtype}",
        "cast q, k and v to bfloat16, or move them to the CPU.",
    )
    require(
        k.dtype == q.dtype and v.dtype == q.dtype,
        "q, k and v have one dtype",
        f"{q.dtype}, {k.dtype}, {v.dtype}",
        "cast them to one.",
    )
    for name, x in (("g", g), ("beta", beta)):
        require(x.dtype in FLOATS, f"{name}.dtype in {FLOATS}", f"{x.dtype}", "float32 loses nothing.")
    if kind == "cuda":
        for name, x in dict(q=q, k=k, v=v, initial_state=initial_state, cu_seqlens=cu_seqlens).items():
            require(
                x is None or x.is_contiguous(),
                f"{name}.is_contiguous()",
                f"strides {x.stride() if x is not None else None}",
                f"pass {name}.contiguous().",
            )
        for name, dim in (("head_dim_k", q.shape[3]), ("head_dim_v", v.shape[3])):
            support(
                dim in HEAD_DIMS[name],
                f"{name} in {HEAD_DIMS[name]}",
                f"{name}={dim}",
                "pad with zeros to the next one (and pass scale if it is head_dim_k).",
            )


def check_lengths(batch: int, tokens: int, cu: tuple[int, ...] | None) -> None:
    require(
        batch == 1,
        "batch == 1 with cu_seqlens",
        f"batch={batch}",
        "flatten sequences into one row: x.flatten(0, 1)[None].",
    )
    if cu is None:
        return
    require(cu[0] == 0, "cu_seqlens[0] == 0", f"{cu[0]}", "start at the first token.")
    for n, (start, end) in enumerate(zip(cu, cu[1:])):
        require(
            start <= end,
            "cu_seqlens never decreases",
            f"cu_seqlens[{n}]={start}, cu_seqlens[{n + 1}]={end}",
            "pass cumulative lengths, not lengths.",
        )
    require(
        cu[-1] <= tokens,
        "cu_seqlens[-1] <= T",
        f"cu_seqlens[-1]={cu[-1]}, T={tokens}",
        "pass the tokens of every sequence.",
    )


def check_flags(scale, chunk_size, auto_cp, window, window_share) -> None:
    require(
        scale is None or (isinstance(scale, (int, float)) and math.isfinite(scale)),
        "scale is a finite number",
        f"scale={scale!r}",
        "leave it None for K ** -0.5.",
    )
    require(
        chunk_size in CHUNK_SIZE_HINTS,
        f"chunk_size in {CHUNK_SIZE_HINTS}",
        f"chunk_size={chunk_size!r}",
        "leave it out: it is a hint, results do not depend on it.",
    )
    require(isinstance(auto_cp, bool), "auto_cp is a bool", f"auto_cp={auto_cp!r}", "pass True or False.")
    require(
        window == "exact" or (isinstance(window, float) and 0.0 < window < 1.0),
        'window == "exact" or 0 < window < 1',
        f"window={window!r}",
        'pass "exact", or the tolerance to which earlier tokens may be forgotten.',
    )
    require(
        window_share is None or (isinstance(window_share, (int, float)) and 0.0 <= window_share <= 1.0),
        "0 <= window_share <= 1",
        f"window_share={window_share!r}",
        "pass the share of value heads whose gates decay, or None where nothing is known about them.",
    )


def check_out(out: torch.Tensor, v: torch.Tensor) -> None:
    require(
        out.shape == v.shape and out.dtype == v.dtype and out.is_contiguous(),
        "out is contiguous and like v",
        f"shape {tuple(out.shape)} of {out.dtype}, strides {out.stride()}",
        "allocate it with torch.empty(v.shape, dtype=v.dtype, device=v.device).",
    )


def check_gate_parameters(a_log, dt_bias, v: torch.Tensor) -> None:
    """A_log and dt_bias (optional) of the gate activation: ``[HV]`` floats on v's device.  Raises InputError."""
    require(
        a_log is not None,
        "A_log is not None with use_gate_in_kernel",
        "A_log=None",
        "pass the decay parameter of shape [HV], or compute g yourself.",
    )
    require_tensors(A_log=a_log, dt_bias=dt_bias)
    for name, x in (("A_log", a_log), ("dt_bias", dt_bias)):
        if x is not None:
            require(
                x.shape == v.shape[2:3] and x.dtype in FLOATS and x.device == v.device,
                f"{name} is [HV] = [{v.shape[2]}] floats on {v.device}",
                f"shape {tuple(x.shape)} of {x.dtype} on {x.device}",
                "pass one number per value head.",
            )


def require_tensors(**named) -> None:
    for name, x in named.items():
        optional = name in ("initial_state", "cu_seqlens", "out", "dt_bias", "state_indices", "final_state_out")
        require(
            isinstance(x, torch.Tensor) or (optional and x is None),
            f"{name} is a torch.Tensor",
            f"{type(x).__name__}",
            "convert it with torch.as_tensor.",
        )


def refuse_alignment(**named) -> None:
    """Name the tensor, of those that are not None, whose address is not aligned."""
    for name, x in named.items():
        if x is not None and x.data_ptr() % ALIGNMENT_BYTES:
            refuse(
                InputError,
                f"{name}.data_ptr() % {ALIGNMENT_BYTES} == 0",
                f"storage offset {x.storage_offset()}",
                f"pass {name}.clone(): bulk copies of the card need aligned rows.",
            )


def require(condition: bool, invariant: str, got: str, remedy: str) -> None:
    if not condition:
        refuse(InputError, invariant, got, remedy)


def support(condition: bool, invariant: str, got: str, remedy: str) -> None:
    if not condition:
        refuse(UnsupportedError, invariant, got, remedy)


def refuse(kind: type[QlaError], invariant: str, got: str, remedy: str) -> None:
    raise kind(f"`{invariant}` must hold, but got {got}; {remedy}")
