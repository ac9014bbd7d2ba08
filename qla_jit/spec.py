"""Identity of a kernel: canonical JSON of everything its bytes depend on, hashed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from . import registry
from .arch import get_arch
from .config import Problem
from .schedule import Schedule

SPEC_VERSION = 1


def canonical_json(value) -> str:
    """The one JSON text of a value: sorted names, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def sha256(value) -> str:
    """Hex digest of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to build: the problem and the schedule that answers it."""

    problem: Problem
    schedule: Schedule

    @property
    def template_digest(self) -> str:
        return registry.digest(self.schedule.template)

    def as_dict(self) -> dict:
        return {
            "version": SPEC_VERSION,
            "problem": self.problem.as_dict(),
            "schedule": self.schedule.as_dict(),
            "template_digest": self.template_digest,
            "target": get_arch(self.problem.arch).target,
        }

    @property
    def digest(self) -> str:
        """sha256 of the question (problem, schedule, template source, target), without the toolchain."""
        return sha256(self.as_dict())

    def __str__(self) -> str:
        return f"{self.problem.kernel}[{self.digest[:10]}]"
