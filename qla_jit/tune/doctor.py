"""What this machine has for building, running and tuning kernels, what is missing or stale, and what fixes it.

`examine` changes nothing and never raises for what it finds: every trouble is a `Finding`.  A card is not required, and
neither are rows for cards that are not here; both are noted without making the verdict of the whole bad.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from .. import env, runtime, toolchain
from ..arch import ARCHS
from ..artifacts import ArtifactStore
from ..cubin import INSTALL, find_nvdisasm
from ..db import BestRow, Database
from ..db.layers import shipped_rows
from ..db.lookup import command, family, is_current
from ..db.schema import MIGRATIONS
from ..errors import CacheError, DatabaseError, ToolError, UnsupportedError
from .environment import environment_of, has_gpu

VERDICTS = ("ok", "note", "missing", "stale", "broken")
PROBLEMS = ("missing", "stale", "broken")
OLDEST_NVCC = (12, 8)
INSTALL_NVCC = "install the CUDA toolkit (nvcc 12.8 or newer) on PATH or under $CUDA_HOME"
INSTALL_TILELANG = "pip install 'tilelang>=0.1.15,<0.2'"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.  verdict: of `VERDICTS`.  fix: the command or step that mends it.  values: for programs."""

    name: str
    verdict: str
    found: str
    fix: str = ""
    values: dict = field(default_factory=dict)

    @property
    def is_problem(self) -> bool:
        return self.verdict in PROBLEMS

    def as_dict(self) -> dict:
        return asdict(self)


def examine(db: Database, store: ArtifactStore) -> list[Finding]:
    """Findings on tools, card, kernel cache and databases, in the order in which they are needed."""
    tools = toolchain.current()
    card, arch = _gpu()
    own, user = _user_database(db)
    shipped, layers = _shipped()
    rows = [*own, *shipped]
    return [
        _tilelang(tools),
        _nvcc(tools),
        _nvdisasm(),
        _runtime_libraries(),
        card,
        _kernel_cache(store, tools),
        user,
        layers,
        *_rows_left_out(user),
        *_rows_for_card(arch, rows),
        *_stale_rows(rows),
    ]


def _tilelang(tools: toolchain.Toolchain) -> Finding:
    if tools.tilelang is None:
        return Finding("TileLang", "missing", "not installed", INSTALL_TILELANG)
    return Finding("TileLang", "ok", tools.tilelang)


def _nvcc(tools: toolchain.Toolchain) -> Finding:
    if tools.nvcc is None:
        return Finding("nvcc", "missing", "not found; cached kernels still run", INSTALL_NVCC)
    found = f"{tools.nvcc} at {tools.nvcc_path}"
    if tuple(int(part) for part in tools.nvcc.split(".")[:2]) < OLDEST_NVCC:
        return Finding("nvcc", "stale", found, INSTALL_NVCC)
    return Finding("nvcc", "ok", found)


def _nvdisasm() -> Finding:
    try:
        return Finding("nvdisasm", "ok", find_nvdisasm())
    except ToolError:
        return Finding("nvdisasm", "missing", "not found; registers per role are not measured", INSTALL)


def _runtime_libraries() -> Finding:
    try:
        runtime.start()
    except (ToolError, ImportError) as error:
        return Finding("runtime libraries", "broken", str(error), f"{INSTALL_TILELANG} --force-reinstall")
    return Finding("runtime libraries", "ok", f"{', '.join(runtime.LIBRARIES)} load")


def _gpu() -> tuple[Finding, str | None]:
    """The finding, and the card's arch where it is one of ours."""
    if not has_gpu():
        return Finding("GPU", "note", "none seen by PyTorch; replays, builds and the database work without"), None
    try:
        environment = environment_of()
    except (UnsupportedError, RuntimeError) as error:  # a card of another family, or a driver that does not start
        return Finding("GPU", "note", str(error)), None
    return Finding("GPU", "ok", str(environment), values=environment.as_dict()), environment.arch


def _kernel_cache(store: ArtifactStore, tools: toolchain.Toolchain) -> Finding:
    if not store.root.exists():
        return Finding("kernel cache", "ok", f"{store.root}, not made yet", values={"path": str(store.root)})
    try:
        entries = store.toolchains()
    except CacheError as error:
        root = shlex.quote(str(store.root))
        return Finding("kernel cache", "broken", str(error), f"chmod -R go-w {root}, or set {env.CACHE_DIR}")
    own, unreadable = tools.as_dict(), entries.count(None)
    others = len(entries) - entries.count(own) - unreadable
    counts = {"entries": len(entries), "of_other_toolchains": others, "unreadable": unreadable}
    found = f"{store.root}, yours alone, {len(entries)} entries, {others} of other toolchains, {unreadable} unreadable"
    return Finding("kernel cache", "ok", found, values={"path": str(store.root), **counts})


def _user_database(db: Database) -> tuple[list[BestRow], Finding]:
    values = {"path": str(db.path)}
    try:
        reader = db.reader()
        if reader is None:
            return [], Finding("user database", "ok", f"{db.path}, not made yet", values=values)
        with reader:
            rows, trials, left_out = reader.best_rows(), reader.num_trials, reader.left_out()
    except (DatabaseError, OSError) as error:
        fix = f"the remedy above, or {env.DATABASE}=PATH of another file"
        return [], Finding("user database", "broken", str(error), fix, values)
    values.update(schema=len(MIGRATIONS), trials=trials, best_rows=len(rows))  # a reader opens no other version
    values["left_out"] = dict(left_out)
    found = f"{db.path}, schema {len(MIGRATIONS)}, {trials} trials, {len(rows)} best rows"
    return rows, Finding("user database", "ok", found, values=values)


def _shipped() -> tuple[list[BestRow], Finding]:
    rows: list[BestRow] = []
    try:
        for arch in ARCHS:
            rows += shipped_rows(arch)
    except DatabaseError as error:
        return rows, Finding("shipped rows", "broken", str(error), "reinstall qla-jit")
    counts = Counter(row.problem.arch for row in rows)
    values = {arch: counts[arch] for arch in ARCHS}
    return rows, Finding("shipped rows", "ok", ", ".join(f"{a} {n}" for a, n in values.items()), values=values)


def _rows_left_out(user: Finding) -> Iterator[Finding]:
    """No problem: they cost nothing, no command clears them, and the version that stored them may come back."""
    left_out = user.values.get("left_out")
    if left_out:
        counts = ", ".join(f"{rows} rows of {kernel}" for kernel, rows in sorted(left_out.items()))
        found = f"{counts}, which this version does not have; they are not used"
        yield Finding("rows of other versions", "note", found, values=left_out)


def _rows_for_card(arch: str | None, rows: list[BestRow]) -> Iterator[Finding]:
    if arch is not None and not any(row.problem.arch == arch for row in rows):
        found = f"none for {arch}, the arch of this card; defaults are used"
        yield Finding("tuned rows", "missing", found, f"qla-tune --arch {arch}")


def _stale_rows(rows: list[BestRow]) -> Iterator[Finding]:
    """Rows of older or unknown templates, a finding per command; not those that a current row already outranks."""
    current = {row.problem for row in rows if is_current(row)}
    stale = [row for row in rows if row.problem not in current]
    for group in _grouped(stale, lambda row: family(row.problem)):
        problems = list(dict.fromkeys(row.problem for row in group))
        templates = ", ".join(sorted({row.schedule.template for row in group}))
        found = f"{len(group)} rows of {group[0].problem.arch} were measured with another source of {templates}"
        yield Finding("stale rows", "stale", found, command(*problems), {"rows": len(group)})
    if not stale:
        yield Finding("stale rows", "ok", f"none among {len(rows)} rows")


def _grouped(rows: list[BestRow], key: Callable) -> list[list[BestRow]]:
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())
