"""What a cubin says about itself, read from nvdisasm's listing.

ptxas reports one register count for the whole kernel; once `setmaxnreg` splits it among warp groups, that number is the
launch's, not a role's.  nvdisasm prints the live registers of every instruction (``-plr``), and the listing is cut at
USETMAXREG.  The cut is by address, so it is approximate: code that the compiler moved to the end counts for the last
role.  It takes 0.5 s a kernel.

nvdisasm comes with the CUDA toolkit or with ``pip install nvidia-cuda-nvdisasm``.  Where it is missing or refuses a
cubin, ToolError says so, and reports say "not measured".
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ToolError
from .schedule import Role

INSTALL = "pip install nvidia-cuda-nvdisasm"
TIMEOUT_S = 60
_LIMIT = re.compile(r"USETMAXREG\.(?:\S+)\s+(?:UP\d+,\s*)?(0x[0-9a-f]+)")
_LIVE = re.compile(r"//\s*\|\s*(\d+)\s")
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\S*)\s*([^;]*);")


@dataclass(frozen=True)
class LiveRegisters:
    """Code between two USETMAXREG: registers per thread it may use (None before the first), and the most live."""

    limit: int | None
    live: int


@dataclass(frozen=True)
class CubinCounts:
    """Instructions of a kernel, each site once: tensor products (hgmma, hmma), spill stores and loads (stl, ldl).

    waits: WARPGROUP.DEPBAR as (products that may stay in flight, count) pairs.  stretches: live registers, in address
    order; one stretch without USETMAXREG.
    """

    hgmma: int
    hmma: int
    stl: int
    ldl: int
    waits: tuple[tuple[int, int], ...]
    stretches: tuple[LiveRegisters, ...]


def find_nvdisasm() -> str:
    """Path of nvdisasm: $CUDA_HOME, then PATH, then the PyPI package; ToolError with the remedy if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home) / "bin" / "nvdisasm"] if home else []
    on_path = shutil.which("nvdisasm")
    places += [Path(on_path)] if on_path else []
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        places += sorted(Path(folder).glob("*/bin/nvdisasm"))
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            return str(place)
    raise ToolError(f"nvdisasm must be installed to read registers per role, but it was not found; {INSTALL}.")


def disassemble(cubin: bytes) -> str:
    """Listing of a cubin with the live registers of every instruction; ToolError if nvdisasm is missing or fails."""
    tool = find_nvdisasm()
    with tempfile.NamedTemporaryFile(prefix="qla-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-plr", "-lrm", "narrow", "-c", file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{tool} must run, but: {error}; {INSTALL}.") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ToolError(f"{tool} must read the cubin, but said: {said}; {INSTALL} (13.0 or newer).")
    return done.stdout


def count(listing: str) -> CubinCounts:
    """Counts of a listing made by `disassemble`."""
    opcodes: Counter[str] = Counter()
    waits: Counter[int] = Counter()
    stretches: list[list] = [[None, 0]]
    for line in listing.splitlines():
        found = _OPCODE.search(line)
        if not found:
            continue
        opcode, suffix, operands = found.groups()
        opcodes[opcode] += 1
        if opcode == "WARPGROUP" and suffix.startswith(".DEPBAR"):
            waits[int(operands.split(",")[1], 16)] += 1
        if limit := _LIMIT.search(line):
            stretches.append([int(limit.group(1), 16), 0])
        if live := _LIVE.search(line):
            stretches[-1][1] = max(stretches[-1][1], int(live.group(1)))
    return CubinCounts(
        hgmma=opcodes["HGMMA"],
        hmma=opcodes["HMMA"],
        stl=opcodes["STL"],
        ldl=opcodes["LDL"],
        waits=tuple(sorted(waits.items())),
        stretches=tuple(LiveRegisters(*stretch) for stretch in stretches),
    )


def role_registers(roles: Iterable[Role], counts: CubinCounts | None) -> dict[str, dict]:
    """Per role: ``limit``, the declared registers per thread, and ``live``, the most in use (None: not measured).

    Roles are matched to stretches by their register limit, in order.  A kernel with one role has one stretch.
    """
    roles = tuple(roles)
    free = [s for s in counts.stretches if s.limit is not None] if counts else []
    whole = max((s.live for s in counts.stretches), default=0) if counts else None
    table = {}
    for role in roles:
        match = next((s for s in free if s.limit == role.registers), None)
        if match is not None:
            free.remove(match)
        live = match.live if match else (whole if len(roles) == 1 else None)
        table[role.name] = {"limit": role.registers, "live": live}
    return table


def registers_text(report: dict) -> str:
    """A build report's registers in one line: at launch, then live/limit of each role of a kernel that has several."""
    text = str(report.get("registers", "-"))
    table = report.get("role_registers") or {}
    if len(table) < 2:
        return text
    if not any(row["live"] for row in table.values()):
        return f"{text} (per role: not measured)"
    cells = (f"{name} {'?' if row['live'] is None else row['live']}/{row['limit']}" for name, row in table.items())
    return f"{text} ({', '.join(cells)})"


def report(roles: Iterable[Role], cubin: bytes) -> dict:
    """Build-report fields: ``role_registers``, ``instructions`` (None: not measured), and ``cubin_source``, which says
    how they were measured, or why not."""
    try:
        counts = count(disassemble(cubin))
    except (ToolError, ValueError, IndexError) as error:  # a listing we cannot read must not break a build
        return {
            "role_registers": role_registers(roles, None),
            "instructions": None,
            "cubin_source": f"not measured: {error}",
        }
    instructions = asdict(counts)
    instructions.pop("stretches")
    return {
        "role_registers": role_registers(roles, counts),
        "instructions": instructions,
        "cubin_source": "nvdisasm -plr",
    }
