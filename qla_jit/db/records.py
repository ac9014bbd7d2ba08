"""The rows of a tuning database: `Environment`, `Trial`, `BestRow`, `CostModel`, and their plain (JSON) forms.

Frozen, validated on construction, free of NaN, so that one record has one canonical text and one digest on every
machine.  Raises DatabaseError for a record that breaks its own invariants.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from ..config import KERNELS, Problem
from ..errors import ConfigError, DatabaseError
from ..schedule import Schedule
from ..spec import sha256

STATUSES = (
    "ok",
    "infeasible",
    "compile_error",
    "compile_timeout",
    "launch_error",
    "run_timeout",
    "wrong",
    "nonfinite",
    "crashed",
    "duplicate",
    "filtered",
)
PHASES = ("search", "final")
#: The `BestRow.workload` of the schedule that is best on the geometric mean over all workloads of its sweep.
ALL_WORKLOADS = "*"
#: Forms of a `CostModel` and the names of their coefficients, all in µs.
#: ``work``: max(a·depth, m·share) + b·CTAs + c, with share the chunks of an SM if all had as many: the limit of device
#: memory.  ``one_wave``: λ₁ L + λ₂ N/L + λ₀ for segments of L of N chunks.
FORMS = {
    "work": ("us_per_step", "us_per_cta", "us_constant", "us_per_share"),
    "one_wave": ("us_per_chunk", "us_per_segment", "us_constant"),
}
#: Coefficients that may be absent, then 0.
_OPTIONAL = ("us_per_share",)


_LATER_FIELDS = ("sm_mhz", "memory_mhz")


def _require(condition: bool, invariant: str, got: str, remedy: str) -> None:
    if not condition:
        raise DatabaseError(f"`{invariant}` must hold, but got {got}; {remedy}")


def _as_floats(record, *names: str) -> None:
    """SQLite gives 1.0 back for 1, and the two have different canonical texts."""
    for name in names:
        value = getattr(record, name)
        if value is not None:
            object.__setattr__(record, name, float(value))


def problem_body(problem: Problem) -> dict:
    """Plain form of a problem without the fields its kernel ignores, so that a later field leaves old ids alone."""
    return {name: value for name, value in problem.as_dict().items() if value is not None}


def unknown_kernel(values: Mapping) -> str | None:
    """The kernel of a plain record where this version has none of that name, so that it can be left out, not refused:
    a database outlives the kernels that it has rows of."""
    problem = values.get("problem")
    kernel = problem.get("kernel") if isinstance(problem, Mapping) else None
    return kernel if isinstance(kernel, str) and kernel not in KERNELS else None


def short_id(body: Mapping) -> str:
    """Key of a plain record: the first 16 hex digits of its canonical JSON's sha256."""
    return sha256(body)[:16]


@dataclass(frozen=True)
class Environment:
    """What a time was measured with: card, SM count, driver, CUDA, TileLang and torch versions."""

    gpu: str
    arch: str
    sm_count: int
    driver: str
    cuda: str
    tilelang: str
    torch: str

    @property
    def id(self) -> str:
        return short_id(asdict(self))

    def as_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> Environment:
        return cls(**_known(cls, values))

    def __str__(self) -> str:
        return f"{self.gpu} ({self.arch}), driver {self.driver}, CUDA {self.cuda}, TileLang {self.tilelang}"


@dataclass(frozen=True)
class Times:
    """Where a trial's wall time went, in seconds; `overhead_s` is what the other four do not explain."""

    compile_s: float = 0.0
    verify_s: float = 0.0
    measure_s: float = 0.0
    search_s: float = 0.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        _as_floats(self, *(f.name for f in fields(self)))


@dataclass(frozen=True)
class Trial:
    """One attempt to run one schedule: what was tried, how it ended and why, and what it cost.

    samples_us: every timing taken, in order.  error: relative error against the float64 reference.
    phase: ``search``, or ``final`` for the interleaved race that decides the best row.
    sm_mhz, memory_mhz: clocks observed while it was timed; None where the driver's library does not tell.
    """

    problem: Problem
    schedule: Schedule
    workload: str
    template_digest: str
    environment: Environment
    status: str
    reason: str = ""
    phase: str = "search"
    samples_us: tuple[float, ...] = ()
    error: float | None = None
    registers: int | None = None
    smem_bytes: int | None = None
    local_bytes: int | None = None
    times: Times = field(default_factory=Times)
    created: str = ""
    sm_mhz: int | None = None
    memory_mhz: int | None = None

    def __post_init__(self) -> None:
        _as_floats(self, "error")
        object.__setattr__(self, "samples_us", tuple(map(float, self.samples_us)))
        _require(self.status in STATUSES, f"status in {STATUSES}", f"{self.status!r}", "the row may be newer.")
        _require(self.phase in PHASES, f"phase in {PHASES}", f"{self.phase!r}", "the row may be newer.")
        _require(
            bool(self.samples_us) == (self.status == "ok"),
            "samples_us if and only if status is ok",
            f"status={self.status!r} with {len(self.samples_us)} samples",
            "store what was measured.",
        )
        _require(
            self.status == "ok" or bool(self.reason),
            "a reason for every status but ok",
            f"status={self.status!r} without one",
            "say what went wrong.",
        )
        numbers = (*self.samples_us, *asdict(self.times).values(), 0.0 if self.error is None else self.error)
        _require(all(map(math.isfinite, numbers)), "finite numbers", f"{numbers}", "use status nonfinite and no error.")

    @property
    def median_us(self) -> float | None:
        return statistics.median(self.samples_us) if self.samples_us else None

    @property
    def iqr_us(self) -> float | None:
        if len(self.samples_us) < 2:
            return 0.0 if self.samples_us else None
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return high - low

    def as_dict(self) -> dict:
        """Plain form; the environment is named by its id.

        Fields that came after the first trials are left out where they are None, so that older uids stay.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _LATER_FIELDS:
            if values[name] is None:
                del values[name]
        values.update(
            problem=problem_body(self.problem),
            schedule=self.schedule.as_dict(),
            environment=self.environment.id,
            samples_us=list(self.samples_us),
            times=asdict(self.times),
        )
        return values

    @classmethod
    def from_dict(cls, values: Mapping, environments: Mapping[str, Environment]) -> Trial:
        values = _known(cls, values)
        return cls(
            **{
                **values,
                "problem": Problem.from_dict(values["problem"]),
                "schedule": Schedule.from_dict(values["schedule"]),
                "environment": _environment(values["environment"], environments),
                "samples_us": tuple(values.get("samples_us", ())),
                "times": Times(**values.get("times", {})),
            }
        )

    @property
    def uid(self) -> str:
        """Digest of the whole record: importing the same trial twice stores it once."""
        return short_id(self.as_dict())


@dataclass(frozen=True)
class BestRow:
    """The winner for (problem, workload), and what it was measured against.

    median_us, default_median_us: from the same interleaved race (geometric means over workloads where workload is
    `ALL_WORKLOADS`).  trials: attempts of the sweep that chose it.
    """

    problem: Problem
    workload: str
    schedule: Schedule
    median_us: float
    default_median_us: float | None
    template_digest: str
    environment: Environment
    trials: int
    created: str = ""

    def __post_init__(self) -> None:
        _as_floats(self, "median_us", "default_median_us")
        times = (self.median_us, self.default_median_us or 1.0)
        sound = all(math.isfinite(t) and t > 0 for t in times)
        _require(sound, "positive finite medians", f"{times}", "measure it again.")

    @property
    def gain(self) -> float | None:
        """How many times faster than the template's default schedule; None where the default could not run."""
        return None if self.default_median_us is None else self.default_median_us / self.median_us

    def as_dict(self) -> dict:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values.update(
            problem=problem_body(self.problem), schedule=self.schedule.as_dict(), environment=self.environment.id
        )
        return values

    @classmethod
    def from_dict(cls, values: Mapping, environments: Mapping[str, Environment]) -> BestRow:
        values = _known(cls, values)
        return cls(
            **{
                **values,
                "problem": Problem.from_dict(values["problem"]),
                "schedule": Schedule.from_dict(values["schedule"]),
                "environment": _environment(values["environment"], environments),
            }
        )


@dataclass(frozen=True)
class CostModel:
    """Fitted time of one schedule of a kernel family as a function of what a call asks for.

    problem: a family, so without head counts, in form ``work``; with them in ``one_wave``.  form: of `FORMS`.
    coefficients: µs, in the order of its names, none negative; those that may be absent are 0 then.  rows: medians
    fitted.  loo_error, loo_p90: median and 90th percentile of the relative error on rows that were left out of the fit,
    one at a time.  fitted_on: digest of those rows, of their template's source and of the environment.
    """

    problem: Problem
    schedule: Schedule
    form: str
    coefficients: tuple[float, ...]
    rows: int
    loo_error: float
    loo_p90: float
    fitted_on: str
    template_digest: str
    environment: Environment
    created: str = ""

    def __post_init__(self) -> None:
        _as_floats(self, "loo_error", "loo_p90")
        _require(self.form in FORMS, f"form in {tuple(FORMS)}", f"{self.form!r}", "the row may be newer.")
        absent = (0.0 for name in FORMS[self.form][len(self.coefficients) :] if name in _OPTIONAL)
        object.__setattr__(self, "coefficients", (*map(float, self.coefficients), *absent))
        numbers = (*self.coefficients, self.loo_error, self.loo_p90)
        sound = len(self.coefficients) == len(FORMS[self.form]) and all(math.isfinite(n) and n >= 0 for n in numbers)
        _require(sound, f"{FORMS[self.form]} and errors finite and >= 0", f"{numbers}", "fit it again.")
        heads = self.problem.num_value_heads
        sound = (heads is None) == (self.form == "work")
        _require(sound, "head counts if and only if form is one_wave", f"{heads} in {self.form}", "fit it again.")

    @property
    def values(self) -> dict[str, float]:
        """Coefficients by name, without those that may be absent and are 0."""
        named = zip(FORMS[self.form], self.coefficients)
        return {name: value for name, value in named if value or name not in _OPTIONAL}

    def predict_us(self, first: float, second: float, share: float = 0.0) -> float:
        """Time at (depth, CTAs) and this share, or at (L, N/L) of the one-wave form."""
        a, b, constant, *m = self.coefficients
        return max(a * first, *(of * share for of in m), 0.0) + b * second + constant

    def as_dict(self) -> dict:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values.update(
            problem=problem_body(self.problem), schedule=self.schedule.as_dict(), environment=self.environment.id,
            coefficients=self.values,
        )  # fmt: skip
        return values

    @classmethod
    def from_dict(cls, values: Mapping, environments: Mapping[str, Environment]) -> CostModel:
        values = _known(cls, values)
        names = FORMS.get(values["form"], ())
        named = values["coefficients"]
        needed = {name for name in names if name not in _OPTIONAL}
        sound = needed <= set(named) <= set(names)
        _require(sound, f"coefficients {names}", f"{tuple(named)}", "the row may be newer.")
        return cls(
            **{
                **values,
                "problem": Problem.from_dict(values["problem"]),
                "schedule": Schedule.from_dict(values["schedule"]),
                "environment": _environment(values["environment"], environments),
                "coefficients": tuple(named.get(name, 0.0) for name in names),
            }
        )


def _environment(key: str, environments: Mapping[str, Environment]) -> Environment:
    _require(key in environments, "every row's environment is stored", f"{key!r}", "take a complete export.")
    return environments[key]


def _known(cls, values: Mapping) -> dict:
    names = {f.name for f in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is f.default_factory}  # both MISSING: no default
    _require(
        required <= set(values) <= names,
        f"fields of a {cls.__name__}",
        f"missing {sorted(required - set(values))}, unknown {sorted(set(values) - names)}",
        "the record was written by another version; upgrade qla-jit.",
    )
    return dict(values)


def parse(make, *arguments):
    """Call a ``from_dict`` and report whatever is malformed in its input as DatabaseError."""
    try:
        return make(*arguments)
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise DatabaseError(f"a well-formed record must be given, but got {error!r}; export it again.") from error
