"""Runs a portable template on the CPU: TileLang's ``c`` target, one thread, fp32 everywhere.

It checks arithmetic and indexing, not races, layouts or rounding.  TileLang has no shared memory, fragments, bf16 or
exp2 there, so the function is rewritten before it is compiled: every scope becomes local, every 16-bit type fp32, and
``exp2(x)`` becomes ``exp(x)``, which is right because `CpuKernel` hands it log-gates to base e.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from unittest import mock

import torch

from qla_jit import harness, launch, registry
from qla_jit.config import Problem
from qla_jit.schedule import Schedule

TOLERANCE = 3e-6  # fp32 sums of a few thousand products
SCOPES, DTYPES = ("shared.dyn", "shared", "local.fragment"), ("bfloat16", "float16")


class CpuKernel:
    """A template's kernel compiled for the host; `error` runs it on a case."""

    def __init__(self, problem: Problem, schedule: Schedule):
        import tilelang
        import tilelang.engine.lower  # noqa: F401

        self.problem = problem
        function = registry.get_template(schedule.template).prim_func(problem, schedule)
        module = sys.modules["tilelang.engine.lower"]
        check = module.PreLowerSemanticCheck
        module.PreLowerSemanticCheck = lambda mod: None  # it refuses fragments on a target without them
        try:
            self._run = tilelang.compile(
                _for_host(function),
                target="c",
                execution_backend="cython",
                pass_configs={tilelang.PassConfigKey.TIR_DISABLE_VECTORIZE: True},
            )
        finally:
            module.PreLowerSemanticCheck = check

    def error(self, case: harness.Case) -> float:
        """Largest relative error of the outputs; outputs start as NaN, so what is not written is seen."""
        case.poison()
        if "log_gates" in case.tensors and "log_gates" not in launch.OUTPUTS[self.problem.kernel]:
            case.tensors["log_gates"] = case.tensors["log_gates"] * math.log(2.0)
        case.launch(self._run)
        return case.error()


def make_case(problem: Problem, lengths, seed: int, gates: str, chunks_per_checkpoint: int = 0) -> harness.Case:
    """`harness.make_case` with inputs in fp32, so that nothing but the kernel's own fp32 arithmetic is off."""
    dtypes = {n: "float32" for n in ("dtype", "gate_dtype", "beta_dtype") if getattr(problem, n) is not None}
    exact = replace(problem, **dtypes)
    with mock.patch.dict(harness.GPU_TOLERANCE, {torch.float32: TOLERANCE}):
        case = harness.make_case(exact, lengths, seed, "cpu", gates=gates, chunks_per_checkpoint=chunks_per_checkpoint)
    for name, value in case.tensors.items():
        if isinstance(value, torch.Tensor) and value.numel() == 0:  # its strides may be those of a transposed tensor
            case.tensors[name] = torch.empty(value.shape, dtype=value.dtype)
    return case


def _for_host(function):
    from tilelang import tvm

    text = tvm.ir.save_json(function)
    for scope in SCOPES:
        text = text.replace(f'"{scope}"', '"local"')
    for dtype in DTYPES:
        text = text.replace(f'"{dtype}"', '"float32"')
    return tvm.ir.load_json(text.replace("tirx.exp2", "tirx.exp"))
