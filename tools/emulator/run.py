"""Kernels of this package by their spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qla_jit import build
from qla_jit.registry import get_template
from qla_jit.spec import KernelSpec

from .errors import EmulationError
from .host import HostPlan, evaluate, read
from .program import Argument, Program, TensorMap

#: Races that change nothing, as regular expressions of their reports.
BENIGN_RACES = (
    # Rows of K past the end of a sequence become zero while products with K as a K-major operand read them, of which
    # only the columns of absent tokens depend on them.
    "clear_rows.*false, false, 1, 1>",
    "false, false, 1, 1>.*clear_rows",
)


@dataclass(frozen=True)
class Kernel:
    """A lowered kernel compiled for the CPU: call it with the arguments of its TileLang function by name."""

    plan: HostPlan
    program: Program
    flush_denormals: bool

    def __call__(
        self, *, seed: int = 0, allowed: Sequence[str] = BENIGN_RACES, **arguments: torch.Tensor | int | float
    ) -> None:
        """One launch, writing outputs in place.  Raises EmulationError: see `Program.launch` and `HostPlan.bind`."""
        symbols = self.plan.bind(arguments)
        tensors = {p.name: arguments[p.name] for p in self.plan.parameters if p.shape}
        values: list[Argument] = []
        for expression in self.plan.arguments:
            name = getattr(expression, "name", None)
            if name in tensors:
                values.append(tensors[name])
            elif expression in self.plan.tensor_maps:
                values.append(self._tensor_map(expression, tensors, symbols))
            else:
                value = evaluate(expression, symbols)
                values.append(float(value) if str(expression.dtype) == "float32" else value)
        names = [getattr(expression, "name", "a number") for expression in self.plan.arguments]
        extents = {tag: int(evaluate(x, symbols)) for tag, x in self.plan.launch.items()}
        self.program.launch(
            [extents.get(f"blockIdx.{axis}", 1) for axis in "xyz"],
            [extents.get(f"threadIdx.{axis}", 1) for axis in "xyz"],
            values,
            next((bytes_ for tag, bytes_ in extents.items() if tag.endswith("dyn_shared_memory")), 0),
            seed,
            self.flush_denormals,
            names,
            allowed,
        )

    def _tensor_map(self, handle, tensors: dict[str, torch.Tensor], symbols: dict[str, object]) -> TensorMap:
        _, rank, tensor, *numbers = self.plan.tensor_maps[handle]
        rank = int(rank)
        numbers = [int(evaluate(x, symbols)) for x in numbers]
        dims, strides, box, steps = (tuple(numbers[i * rank : (i + 1) * rank]) for i in range(4))
        interleave, swizzle, _, fill = numbers[4 * rank :]
        if interleave or fill or set(steps) != {1}:
            raise EmulationError(
                f"{handle.name}: interleaving, element strides and NaN fill of tensor maps are not modelled."
            )
        return TensorMap(tensors[tensor.name], dims, strides, box, swizzle)


def kernel(spec: KernelSpec, cache: str | Path | None = None, races: bool = True) -> Kernel:
    """Lower ``spec`` and compile the CUDA text for the CPU; see `Program` for ``cache`` and ``races``.

    Raises EmulationError if the text holds what is not modelled, and what `qla_jit.build.lower` raises.
    """
    template = get_template(spec.schedule.template)
    lowered = build.lower(spec, compile_device=False)
    plan = read(template.prim_func(spec.problem, spec.schedule), lowered)
    fast_math = bool(template.pass_configs.get("TL_ENABLE_FAST_MATH", False))
    return Kernel(plan, Program(lowered.source, plan.kernel, cache, races), fast_math)


def emulate(
    spec: KernelSpec, *, seed: int = 0, cache: str | Path | None = None, **arguments: torch.Tensor | int | float
) -> None:
    """Run one kernel on CPU tensors, named as in `qla_jit.launch.ARGUMENTS`; outputs are written in place.

    seed: of the order in which warps run and asynchronous work happens.  `kernel` saves lowering for further calls.
    """
    kernel(spec, cache)(seed=seed, **arguments)
