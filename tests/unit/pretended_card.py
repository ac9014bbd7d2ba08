"""CPU tensors that take the way of CUDA tensors on a Hopper card of 132 SMs, to kernels that record their arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from qla_jit import dispatch, op, validate, workspace


def pretend(monkeypatch, load: Callable) -> None:
    """For the rest of the test.  load: makes a kernel's entry of its artifact, which knows its spec alone."""
    monkeypatch.setattr(op.build, "ensure", lambda spec, store: SimpleNamespace(spec=spec, report={}))
    monkeypatch.setattr(op.runtime, "load", load)
    monkeypatch.setattr(dispatch, "_arch_name", lambda index: "sm90")
    monkeypatch.setattr(dispatch, "_has_several_cards", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(validate.Call, "runs_kernels", property(lambda call: not call.is_empty))
    monkeypatch.setattr(validate, "_calls", {})
    monkeypatch.setattr(workspace, "_kept", workspace._Kept())
    forget_operators()


def forget_operators() -> None:
    """Operators keep the entries that they were compiled with."""
    dispatch.compiled.cache_clear()
    dispatch.compiled_backward.cache_clear()
