"""Which template computes which kernel on which arch, and the digest that identifies its source."""

from __future__ import annotations

import functools
import hashlib
import importlib
from importlib import resources

from .config import KERNELS, Problem
from .errors import ConfigError, UnsupportedError
from .template import Template

#: Modules of qla_jit.templates, first choice first where several answer the same problem.
TEMPLATE_MODULES = (
    "input_activation",
    "kkt_inverse_sm90",
    "kkt_inverse_mma",
    "fused_forward_sm90",
    "fused_forward_mma",
    "segment_state_sm90",
    "segment_correct_sm90",
    "segment_forward_sm90",
    "recompute_state_sm90",
    "backward_state_sm90",
    "backward_grad_sm90",
    "segment_gradient_sm90",
    "segment_backward_sm90",
    "segment_recompute_sm90",
    "segment_gradient_correct_sm90",
)


@functools.cache
def templates() -> dict[str, Template]:
    """All templates by name."""
    loaded = (importlib.import_module(f"qla_jit.templates.{module}").TEMPLATE for module in TEMPLATE_MODULES)
    return {template.name: template for template in loaded}


def get_template(name: str) -> Template:
    """A template by name; ConfigError lists the known ones."""
    try:
        return templates()[name]
    except KeyError:
        known = sorted(templates())
        raise ConfigError(f"`template in {known}` must hold, but got {name!r}; the row may be newer.") from None


def candidates(problem: Problem) -> list[Template]:
    """Templates that answer this problem on its arch, preferred ones first."""
    fitting = [
        t
        for t in templates().values()
        if t.kernel == problem.kernel and problem.arch in t.archs and t.unsupported(problem) is None
    ]
    return sorted(fitting, key=lambda t: problem.arch not in t.preferred)


def select(problem: Problem) -> Template:
    """The first choice for a problem; UnsupportedError says what each template lacks."""
    fitting = candidates(problem)
    if fitting:
        return fitting[0]
    reasons = [
        f"{t.name}: {t.unsupported(problem) or f'not for {problem.arch}'}"
        for t in templates().values()
        if t.kernel == problem.kernel
    ]
    raise UnsupportedError(f"a template for {problem} must exist, but {'; '.join(reasons)}; use CPU tensors instead.")


@functools.cache
def digest(name: str) -> str:
    """sha256 over the bytes of a template's source files, in declared order."""
    folder = resources.files("qla_jit.templates")
    hasher = hashlib.sha256()
    for source in get_template(name).sources:
        hasher.update(source.encode() + b"\0")
        hasher.update(folder.joinpath(source).read_bytes())
    return hasher.hexdigest()


__all__ = ["KERNELS", "candidates", "digest", "get_template", "select", "templates"]
