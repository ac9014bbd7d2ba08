"""What is asked: `OpConfig` for the operator, `Problem` for one kernel of it.

Both are frozen and hold plain strings and ints, so that equal questions are equal keys on every rank and on disk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from .arch import get_arch
from .errors import ConfigError

DTYPES = ("bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = {"head_dim_k": (64, 128), "head_dim_v": (64, 128, 256)}
CHUNK_SIZES = (32, 64)
DEFAULT_CHUNK_SIZE = 64

#: Fields of `OpConfig` that each kernel is specialised on; the others are None in its `Problem`, so rows are shared.
KERNEL_FIELDS = {
    "input_activation": ("dtype", "head_dim_k", "num_heads", "num_value_heads", "gate_dtype", "beta_dtype"),
    "kkt_inverse": ("dtype", "head_dim_k", "num_heads", "num_value_heads"),
    "fused_forward": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
    "segment_state": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
    "segment_correct": ("dtype", "head_dim_k", "head_dim_v", "num_value_heads"),
    "segment_forward": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
    "recompute_state": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
    "backward_state": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
    "backward_grad": ("dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads"),
    "segment_recompute": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
    "segment_gradient": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
    "segment_gradient_correct": ("dtype", "head_dim_k", "head_dim_v", "num_value_heads"),
    "segment_backward": (
        "dtype", "head_dim_k", "head_dim_v", "num_heads", "num_value_heads", "state_dtype", "state_v_first",
    ),
}  # fmt: skip
KERNELS = tuple(KERNEL_FIELDS)
#: What every operator runs; `input_activation` only where `OpConfig.activation` asks for it.
FORWARD_KERNELS = ("kkt_inverse", "fused_forward")
#: What takes the place of `fused_forward` where sequences are cut into segments.
SPLIT_KERNELS = ("segment_state", "segment_correct", "segment_forward")
#: The backward: states before every chunk, gradients of states and of V, then of everything else.
BACKWARD_KERNELS = ("recompute_state", "backward_state", "backward_grad")
#: What the backward of cut sequences runs besides, or in their place, `segment_state` and `segment_correct` too.
SPLIT_BACKWARD_KERNELS = ("segment_gradient", "segment_gradient_correct", "segment_recompute", "segment_backward")


class Pass(NamedTuple):
    """The kernels of a forward or a backward, in launch order: ``before`` and ``after`` whatever is cut, and between
    them ``whole`` where nothing is, ``split`` where sequences are cut into segments."""

    before: tuple[str, ...]
    whole: tuple[str, ...]
    split: tuple[str, ...]
    after: tuple[str, ...] = ()


FORWARD = Pass(("kkt_inverse",), ("fused_forward",), SPLIT_KERNELS)
BACKWARD = Pass(
    ("kkt_inverse",),
    ("recompute_state", "backward_state"),
    ("segment_state", "segment_correct", *SPLIT_BACKWARD_KERNELS),
    ("backward_grad",),
)
#: Kernels of a split backward that are the program of another one, started and ended elsewhere, or turned round.
SAME_PROGRAM = {
    "segment_gradient": "backward_state",
    "segment_gradient_correct": "segment_correct",
    "segment_recompute": "recompute_state",
    "segment_backward": "backward_state",
}
#: Numbers of CTAs that may share a head in them: those whose results `tests/gpu/test_backward.py` has compared with
#: float64 on a card, at five head configurations.  No trial of their own does, so a plan may choose nothing else.
CHECKED_SPLITS = {"segment_gradient": (1, 2), "segment_recompute": (1, 2), "segment_backward": (1, 2)}
#: Kernels that know nothing of chunks: their problems have the default chunk size.
UNCHUNKED_KERNELS = ("input_activation",)


def _require(condition: bool, invariant: str, got: str, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"`{invariant}` must hold, but got {got}; {remedy}")


@dataclass(frozen=True)
class OpConfig:
    """The operator asked for: Gated DeltaNet on ``[B, T, H, K]`` queries and keys, ``[B, T, HV, V]`` values.

    num_heads: query/key heads H.  num_value_heads: value heads HV, a multiple of H.  head_dim_k: 64 or 128;
    head_dim_v: also 256.
    dtype: of q, k, v, o.  state_dtype: of the states in memory (always accumulated in fp32).
    state_v_first: states are ``[N, HV, V, K]`` instead of ``[N, HV, K, V]``.  arch: ``sm90`` …
    activation: g and beta come in gate_dtype and beta_dtype, or a call may ask for q and k to be normalised, for
    sigmoid(beta) or for g from its logits; one more kernel does it.  Without it g and beta are fp32, as they are meant.

    Raises ConfigError when a field is outside what any template offers.
    """

    num_heads: int
    num_value_heads: int
    head_dim_k: int = 128
    head_dim_v: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    state_v_first: bool = False
    arch: str = "sm90"
    activation: bool = False
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", get_arch(self.arch).name)
        _require(self.num_heads >= 1, "num_heads >= 1", f"num_heads={self.num_heads}", "pass the number of q/k heads.")
        _require(
            self.num_value_heads >= 1 and self.num_value_heads % self.num_heads == 0,
            "num_value_heads % num_heads == 0",
            f"num_value_heads={self.num_value_heads}, num_heads={self.num_heads}",
            "repeat q and k heads until the ratio is whole.",
        )
        for name, dims in HEAD_DIMS.items():
            value = getattr(self, name)
            _require(value in dims, f"{name} in {dims}", f"{name}={value}", "pad with zeros to the next one.")
        _require(self.dtype in DTYPES, f"dtype in {DTYPES}", f"dtype={self.dtype!r}", "cast q, k and v.")
        _require(
            self.state_dtype in STATE_DTYPES,
            f"state_dtype in {STATE_DTYPES}",
            f"state_dtype={self.state_dtype!r}",
            "keep the state in float32.",
        )
        for name in ("gate_dtype", "beta_dtype"):
            value = getattr(self, name)
            _require(value in GATE_DTYPES, f"{name} in {GATE_DTYPES}", f"{name}={value!r}", "cast g and beta.")

    @property
    def group_size(self) -> int:
        """Value heads per query/key head."""
        return self.num_value_heads // self.num_heads

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of this operator in the order of their launches."""
        return ("input_activation", *FORWARD_KERNELS) if self.activation else FORWARD_KERNELS

    def problem(self, kernel: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> Problem:
        """The key of one kernel of this operator."""
        if kernel in UNCHUNKED_KERNELS:
            chunk_size = DEFAULT_CHUNK_SIZE
        chosen = {name: getattr(self, name) for name in KERNEL_FIELDS[kernel]}
        return Problem(kernel=kernel, arch=self.arch, chunk_size=chunk_size, **chosen)


_LATER_FIELDS = ("gate_dtype", "beta_dtype")


@dataclass(frozen=True)
class Problem:
    """What one kernel is specialised on: a kernel name, an arch, a chunk size, and the fields it depends on."""

    kernel: str
    arch: str
    chunk_size: int = DEFAULT_CHUNK_SIZE
    dtype: str | None = None
    head_dim_k: int | None = None
    head_dim_v: int | None = None
    num_heads: int | None = None
    num_value_heads: int | None = None
    state_dtype: str | None = None
    state_v_first: bool | None = None
    gate_dtype: str | None = None
    beta_dtype: str | None = None

    def __post_init__(self) -> None:
        _require(self.kernel in KERNEL_FIELDS, f"kernel in {KERNELS}", f"kernel={self.kernel!r}", "name one of them.")
        _require(
            self.chunk_size in CHUNK_SIZES,
            f"chunk_size in {CHUNK_SIZES}",
            f"chunk_size={self.chunk_size}",
            "use 64, or 32 on cards with little shared memory.",
        )

    @property
    def group_size(self) -> int:
        """Value heads per query/key head."""
        return self.num_value_heads // self.num_heads

    def as_dict(self) -> dict:
        """Plain values, for canonical JSON; None for what the kernel does not depend on.

        Fields that came after the first kernels are left out where they are None, so that older digests stay.
        """
        return {name: x for name, x in asdict(self).items() if x is not None or name not in _LATER_FIELDS}

    @classmethod
    def from_dict(cls, values: dict) -> Problem:
        """Inverse of `as_dict`; refuses unknown names."""
        unknown = set(values) - {f.name for f in fields(cls)}
        _require(not unknown, "only known problem fields", f"{sorted(unknown)}", "the row comes from a newer version.")
        return cls(**values)
