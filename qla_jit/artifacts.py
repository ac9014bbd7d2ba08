"""Content-addressed folder of compiled kernels.

    <root>/<spec digest>/<build digest>/{kernel.so, kernel.cu, manifest.json}

The spec digest covers problem, schedule, template source and target; the build digest adds flags and the TileLang and
nvcc versions.  An entry is written to a staging folder and published by one rename, so readers see all of it or none.
An entry whose files do not hash to what its manifest says is a miss.  The root belongs to the user alone: one that
others can write is refused, because what it holds is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import env, toolchain
from .errors import CacheError
from .spec import KernelSpec, canonical_json, sha256

LIBRARY, SOURCE, MANIFEST = "kernel.so", "kernel.cu", "manifest.json"


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel on disk; ``report`` holds registers, spills, shared memory and build times."""

    spec: KernelSpec
    path: Path
    report: dict

    @property
    def library(self) -> Path:
        return self.path / LIBRARY

    @property
    def source(self) -> str:
        """The CUDA text the kernel was compiled from."""
        return (self.path / SOURCE).read_text()


def build_digest(spec: KernelSpec, flags: tuple[str, ...], tools: toolchain.Toolchain) -> str:
    """Identity of a build: what is asked, how it is compiled, and with what."""
    return sha256({"spec": spec.as_dict(), "flags": list(flags), "toolchain": tools.as_dict()})


class ArtifactStore:
    """Reads and publishes artifacts under one folder; safe for many processes."""

    def __init__(self, root: Path | str | None = None):
        self.root = Path(root) if root is not None else env.cache_dir()

    def get(self, spec: KernelSpec, flags: tuple[str, ...]) -> Artifact | None:
        """The artifact of ``spec`` built by this machine's toolchain, or None.

        Without nvcc here, any build by the installed TileLang's version serves: it cannot be rebuilt anyway.
        """
        if not self.root.exists():
            return None
        self._check_owner()
        tools = toolchain.current()
        folder = self.root / spec.digest
        if tools.nvcc is not None:
            return self._read(spec, folder / build_digest(spec, flags, tools))
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            artifact = self._read(spec, entry)
            if artifact and artifact.report["toolchain"]["tilelang"] == tools.tilelang:
                return artifact
        return None

    def publish(self, spec: KernelSpec, flags: tuple[str, ...], files: dict[str, bytes], report: dict) -> Artifact:
        """Store a build in one rename; an equal entry published meanwhile by another process is kept."""
        self._create()
        tools = toolchain.current()
        target = self.root / spec.digest / build_digest(spec, flags, tools)
        manifest = {
            "spec": spec.as_dict(),
            "report": {**report, "toolchain": tools.as_dict(), "flags": list(flags)},
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=self.root))
        try:
            for name, data in files.items():
                (staging / name).write_bytes(data)
            (staging / MANIFEST).write_text(canonical_json(manifest) + "\n")
            target.parent.mkdir(mode=0o700, exist_ok=True)
            self._rename(spec, staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        artifact = self._read(spec, target)
        if artifact is None:
            raise CacheError(f"an artifact just written must be readable, but {target} is not; check the disk and its space.")
        return artifact

    def _rename(self, spec: KernelSpec, staging: Path, target: Path) -> None:
        try:
            os.rename(staging, target)
        except OSError:
            if self._read(spec, target) is not None:
                return  # another process published the same build first
            broken = Path(tempfile.mkdtemp(prefix=".broken-", dir=self.root))
            os.rename(target, broken / "entry")
            os.rename(staging, target)
            shutil.rmtree(broken, ignore_errors=True)

    def _read(self, spec: KernelSpec, path: Path) -> Artifact | None:
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            hashes = manifest["sha256"]
            whole = all(hashlib.sha256((path / name).read_bytes()).hexdigest() == want for name, want in hashes.items())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not whole or LIBRARY not in hashes or manifest.get("spec") != spec.as_dict():
            return None
        return Artifact(spec=spec, path=path, report=manifest["report"])

    def _create(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"the kernel cache {self.root} must be writable, but: {error}; set {env.CACHE_DIR}.") from error
        self._check_owner()

    def _check_owner(self) -> None:
        info = self.root.stat()
        if info.st_uid not in (os.getuid(), 0) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheError(
                f"the kernel cache must belong to you alone, but {self.root} has owner {info.st_uid} and mode "
                f"{stat.filemode(info.st_mode)}: its files would be executed. Run `chmod go-w` on it, or set {env.CACHE_DIR}."
            )
