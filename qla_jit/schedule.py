"""How a kernel is built: parameters with their choices, named rules, warp-group roles, and a chosen `Schedule`.

All of it is data.  A template declares these objects; the tuner, the resource model and the reader look at the same
ones.  Nothing here imports TileLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .config import Problem
from .errors import ConfigError

Value = int | str | bool


@dataclass(frozen=True)
class Parameter:
    """One axis of a template's space: its name, what it means, its choices, and the default."""

    name: str
    choices: tuple[Value, ...]
    default: Value
    meaning: str


@dataclass(frozen=True)
class Rule:
    """A named constraint: ``broken(problem, schedule, arch)`` says what is wrong, or returns None."""

    name: str
    broken: Callable[..., str | None]


@dataclass(frozen=True)
class Violation:
    """Why a schedule is not feasible: the rule's name and the numbers that broke it."""

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


@dataclass(frozen=True)
class Role:
    """A group of warps of a CTA that runs one program: its warps, registers per thread, and what it does."""

    name: str
    warps: int
    registers: int
    work: str

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True)
class Schedule:
    """A template's name and one value per parameter, in name order, so equal schedules compare and hash equal."""

    template: str
    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, template: str, params: Mapping[str, Value]) -> Schedule:
        return cls(template, tuple(sorted(params.items())))

    def __getitem__(self, name: str) -> Value:
        for key, value in self.items:
            if key == name:
                return value
        raise KeyError(name)

    def replace(self, **changes: Value) -> Schedule:
        unknown = set(changes) - {key for key, _ in self.items}
        if unknown:
            raise ConfigError(f"only parameters of {self.template} may be replaced, but got {sorted(unknown)}.")
        return Schedule.of(self.template, {**dict(self.items), **changes})

    def params(self) -> dict[str, Value]:
        return dict(self.items)

    def as_dict(self) -> dict:
        return {"template": self.template, "params": self.params()}

    @classmethod
    def from_dict(cls, values: Mapping) -> Schedule:
        return cls.of(values["template"], values["params"])

    def __str__(self) -> str:
        return f"{self.template}({', '.join(f'{k}={v}' for k, v in self.items)})"


def registers_rule(roles: Callable[[Problem, Schedule], tuple[Role, ...]]) -> Rule:
    """The register file must hold what the roles ask for: Σ threads × registers ≤ 64 K."""

    def broken(problem: Problem, schedule: Schedule, arch) -> str | None:
        asked = sum(r.threads * r.registers for r in roles(problem, schedule))
        if asked > arch.registers_per_sm:
            return f"roles ask for {asked} registers, an SM has {arch.registers_per_sm}"
        return None

    return Rule("registers_fit_the_sm", broken)


def check_params(template: str, parameters: Iterable[Parameter], schedule: Schedule) -> list[Violation]:
    """Names and values must be the template's own."""
    declared = {p.name: p for p in parameters}
    given = schedule.params()
    found = []
    if schedule.template != template:
        found.append(Violation("template_matches", f"schedule is for {schedule.template}, not {template}"))
    if set(given) != set(declared):
        missing, extra = sorted(set(declared) - set(given)), sorted(set(given) - set(declared))
        found.append(Violation("parameters_match", f"missing {missing}, unknown {extra}"))
        return found
    for name, parameter in declared.items():
        if given[name] not in parameter.choices:
            found.append(Violation("value_is_a_choice", f"{name}={given[name]!r} is not among {parameter.choices}"))
    return found
