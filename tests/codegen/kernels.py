"""The kernels that code generation is tested on, and how many may be built at a time."""

from __future__ import annotations

from dataclasses import dataclass

from qla_jit import build, registry
from qla_jit.artifacts import ArtifactStore
from qla_jit.config import OpConfig
from qla_jit.errors import QlaError
from qla_jit.spec import KernelSpec


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile: a template's schedule for an operator, the default with some values replaced."""

    template: str
    config: OpConfig
    chunk_size: int = 64
    changes: tuple[tuple[str, object], ...] = ()

    @property
    def spec(self) -> KernelSpec:
        template = registry.get_template(self.template)
        problem = self.config.problem(template.kernel, self.chunk_size)
        return KernelSpec(problem, template.default(problem).replace(**dict(self.changes)))

    def __str__(self) -> str:
        c = self.config
        parts = [self.template, c.arch, f"{c.head_dim_k}x{c.head_dim_v}", *(f"{k}={v}" for k, v in self.changes)]
        parts += [f"chunk{self.chunk_size}"] * (self.chunk_size != 64)
        parts += [f"g={c.gate_dtype}"] * (c.gate_dtype != "float32") + [f"beta={c.beta_dtype}"] * (
            c.beta_dtype != "float32"
        )
        parts += [f"{c.dtype}+{c.state_dtype}"] * ((c.dtype, c.state_dtype) != ("bfloat16", "float32"))
        return "-".join(parts + ["v_first"] * c.state_v_first)


def config(arch: str, head_dim_k: int = 128, head_dim_v: int = 128, **more) -> OpConfig:
    return OpConfig(2, 8, head_dim_k=head_dim_k, head_dim_v=head_dim_v, arch=arch, **more)


DIMS = ((128, 128), (64, 128), (128, 64), (64, 64))
FORWARD, INVERSE, GRADIENTS = "fused_forward_sm90", "kkt_inverse_sm90", "backward_grad_sm90"
HOPPER = (
    *(Kernel(FORWARD, config("sm90", *dims)) for dims in DIMS),
    Kernel(INVERSE, config("sm90")),
    *(Kernel(GRADIENTS, config("sm90", *dims)) for dims in DIMS),
)
#: The default of every template on every arch it declares.
DEFAULTS = tuple(Kernel(t.name, config(arch)) for t in registry.templates().values() for arch in t.archs)
#: Variants whose code differs in kind: other dtypes, state layout, split, product order, chunk size.
VARIANTS = (
    Kernel(FORWARD, config("sm90", dtype="float16", state_dtype="bfloat16", state_v_first=True)),
    Kernel(GRADIENTS, config("sm90", dtype="float16")),
    Kernel("fused_forward_mma", config("sm120", 64, 64), chunk_size=32),
    Kernel("kkt_inverse_mma", config("sm120", 64), chunk_size=32),
    *(
        Kernel("input_activation", config("sm90", 64, gate_dtype=g, beta_dtype=beta, dtype=dtype))
        for dtype, g, beta in (("bfloat16", "bfloat16", "float32"), ("float16", "float32", "float16"))
    ),
)
ALL = tuple(dict.fromkeys(HOPPER + DEFAULTS + VARIANTS))


def build_into(kernel: Kernel, root: str) -> str | None:
    """What went wrong with a build, or None; runs in a process of its own."""
    try:
        build.ensure(kernel.spec, ArtifactStore(root))
    except QlaError as error:
        return f"{type(error).__name__}: {error}"
    return None
