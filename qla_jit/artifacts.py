"""Content-addressed folder of compiled kernels.

    <root>/<spec digest>/<build digest>/{kernel.so, kernel.cu, kernel.cubin, manifest.json}

The spec digest covers problem, schedule, template source and target; the build digest adds flags and the TileLang and
nvcc versions.  An entry is written to a staging folder and published by one rename, so readers see all of it or none.
An entry that does not hash to what its manifest says, or does not belong where it lies, is a miss and gets replaced.

    <root>/.texts/<digest of CUDA text, target, flags, versions> -> ../<spec digest>/<build digest>

finds a build whose nvcc was given the same text, so that specs that lower to one text share its cubin.

What the folder holds is executed, so it belongs to the user alone: a root that others can write is refused, and an
entry that others can write is a miss.  A root that only root can write, such as an image's, serves for reading.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import env, toolchain
from .errors import CacheError
from .spec import KernelSpec, canonical_json, sha256

LIBRARY, SOURCE, CUBIN, MANIFEST = "kernel.so", "kernel.cu", "kernel.cubin", "manifest.json"
STAGING, BROKEN, TEXTS = ".staging-", ".broken-", ".texts"
STALE_S = 3600  # staging folders older than this were left by a killed process
REPLACE_ATTEMPTS = 5


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel on disk; ``report`` holds registers, spills, shared memory, build times and the toolchain."""

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

    @property
    def cubin(self) -> bytes:
        """The device code inside the library."""
        return (self.path / CUBIN).read_bytes()


@dataclass(frozen=True)
class DeviceCode:
    """What nvcc made of a CUDA text: the cubin, and the report and name of the build that it was made for."""

    cubin: bytes
    report: dict
    build: str


def build_digest(spec: KernelSpec, flags: tuple[str, ...], tools: toolchain.Toolchain) -> str:
    """Identity of a build: what is asked, how it is compiled, and with what."""
    return _build_digest(spec.as_dict(), flags, tools.as_dict())


def _build_digest(spec: dict, flags, tools: dict) -> str:
    return sha256({"spec": spec, "flags": list(flags), "toolchain": tools})


class ArtifactStore:
    """Reads and publishes artifacts under one folder; safe for many processes."""

    def __init__(self, root: Path | str | None = None):
        # Resolved once: what is checked is what is read, even if someone turns a symbolic link meanwhile.
        self.root = (Path(root).expanduser() if root is not None else env.cache_dir().expanduser()).resolve()

    def get(self, spec: KernelSpec, flags: tuple[str, ...]) -> Artifact | None:
        """The artifact of ``spec`` built by this machine's toolchain, or None.

        Without nvcc here, any build by the installed TileLang's version serves: it cannot be rebuilt anyway.
        Raises CacheError for a root that others can write.
        """
        if not self.root.exists():
            return None
        self._check_owner()
        tools = toolchain.current()
        folder = self.root / spec.digest
        if tools.nvcc is not None:
            return self._read(spec, folder / build_digest(spec, flags, tools))
        try:
            entries = sorted(folder.iterdir())
        except OSError:  # no build of this spec, or not ours to read: a miss
            return None
        found = [a for a in (self._read(spec, entry) for entry in entries) if a is not None]
        usable = [a for a in found if a.report["toolchain"]["tilelang"] == tools.tilelang]
        return min(usable, key=lambda a: a.report["flags"] != list(flags), default=None)

    def device_code(self, text: str, target: str, flags: tuple[str, ...]) -> DeviceCode | None:
        """What this machine's nvcc made of an equal CUDA text for any spec, or None."""
        try:
            path = self._text_link(text, target, flags).resolve(strict=True)
            manifest = self._manifest(path)
            if (
                manifest is None
                or path.parent.parent != self.root
                or manifest["sha256"].get(SOURCE) != hashlib.sha256(text.encode()).hexdigest()
                or CUBIN not in manifest["sha256"]
            ):
                return None
            return DeviceCode((path / CUBIN).read_bytes(), manifest["report"], str(path.relative_to(self.root)))
        except OSError:  # nothing of this text, or a build that is gone: a miss
            return None

    def remember_text(self, text: str, target: str, flags: tuple[str, ...], artifact: Artifact) -> None:
        """Let `device_code` find an artifact by the text that nvcc was given; CacheError if that cannot be written."""
        link = self._text_link(text, target, flags)
        try:
            link.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            with contextlib.suppress(FileExistsError):  # another process was first
                link.symlink_to(Path("..", artifact.path.relative_to(self.root)))
        except OSError as error:
            raise self._unwritable(error) from error

    def _text_link(self, text: str, target: str, flags: tuple[str, ...]) -> Path:
        what = {"text": text, "target": target, "flags": list(flags), "toolchain": toolchain.current().as_dict()}
        return self.root / TEXTS / sha256(what)

    def toolchains(self) -> list[dict | None]:
        """The toolchain of every entry, None where its manifest cannot be read; CacheError as `get`."""
        if not self.root.exists():
            return []
        self._check_owner()
        return [_toolchain_of(entry) for entry in sorted(self.root.glob("[!.]*/[!.]*"))]

    def prepare(self) -> None:
        """Create the root if need be (mode 0700); raise CacheError unless it can be written and is the user's alone."""
        missing = [p for p in (self.root, *self.root.parents) if not p.exists()]
        try:
            for folder in reversed(missing):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        self._check_owner()
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise self._unwritable("it is read-only for you")

    def publish(self, spec: KernelSpec, flags: tuple[str, ...], files: dict[str, bytes], report: dict) -> Artifact:
        """Store a build in one rename; an equal valid entry published meanwhile by another process is kept.

        Raises CacheError if the folder cannot be written.
        """
        self.prepare()
        tools = toolchain.current()
        target = self.root / spec.digest / build_digest(spec, flags, tools)
        manifest = {
            "spec": spec.as_dict(),
            "report": {**report, "toolchain": tools.as_dict(), "flags": list(flags)},
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        try:
            self._remove_stale()
            staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=self.root))
            try:
                for name, data in files.items():
                    (staging / name).write_bytes(data)
                (staging / MANIFEST).write_text(canonical_json(manifest) + "\n")
                for path in staging.iterdir():
                    path.chmod(0o600)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                self._place(spec, staging, target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        except OSError as error:
            raise self._unwritable(error) from error
        artifact = self._read(spec, target)
        if artifact is None:
            raise CacheError(f"an artifact just written must be readable, but {target} is not; check the disk.")
        return artifact

    def _place(self, spec: KernelSpec, staging: Path, target: Path) -> None:
        """Rename staging to target; what lies there already stays if it is valid, else it is replaced."""
        for _ in range(REPLACE_ATTEMPTS):
            try:
                os.rename(staging, target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            with self._locked():  # two processes that replace must not move each other's good entry away
                if self._read(spec, target) is not None:
                    return
                broken = Path(tempfile.mkdtemp(prefix=BROKEN, dir=self.root))
                with contextlib.suppress(FileNotFoundError):
                    os.rename(target, broken / "entry")
                shutil.rmtree(broken, ignore_errors=True)
        raise OSError(errno.EBUSY, "entries keep appearing that are not valid", str(target))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _remove_stale(self) -> None:
        now = time.time()
        for path in self.root.glob(".*-*"):
            if path.name.startswith((STAGING, BROKEN)):
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    if now - path.stat().st_mtime > STALE_S:
                        shutil.rmtree(path, ignore_errors=True)

    def _read(self, spec: KernelSpec, path: Path) -> Artifact | None:
        """The entry at ``path`` if it is valid and of ``spec``; else None."""
        manifest = self._manifest(path)
        if manifest is None or manifest["spec"] != spec.as_dict():
            return None
        return Artifact(spec=spec, path=path, report=manifest["report"])

    def _manifest(self, path: Path) -> dict | None:
        """The manifest of an entry that is whole, in its place, and writable by no one else; else None."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            hashes, report = manifest["sha256"], manifest["report"]
            valid = (
                LIBRARY in hashes
                and _build_digest(manifest["spec"], report["flags"], report["toolchain"]) == path.name
                and all(_is_private(p) for p in (path.parent, path, *(path / name for name in (MANIFEST, *hashes))))
                and all(hashlib.sha256((path / n).read_bytes()).hexdigest() == want for n, want in hashes.items())
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return manifest if valid else None

    def _check_owner(self) -> None:
        if not _is_private(self.root):
            info = self.root.stat()
            raise CacheError(
                f"the kernel cache must belong to you alone, but {self.root} has owner {info.st_uid} and mode "
                f"{stat.filemode(info.st_mode)}: its files would be executed. Run `chmod -R go-w` on it, or set "
                f"{env.CACHE_DIR} to a folder of yours."
            )

    def _unwritable(self, why: object) -> CacheError:
        return CacheError(f"the kernel cache {self.root} must be writable, but: {why}; set {env.CACHE_DIR}.")


def _toolchain_of(entry: Path) -> dict | None:
    try:
        found = json.loads((entry / MANIFEST).read_text())["report"]["toolchain"]
    except (OSError, ValueError, KeyError, TypeError):  # such an entry is a miss, too
        return None
    return found if isinstance(found, dict) else None


def _is_private(path: Path) -> bool:
    """Owned by this user or by root, and writable by nobody else."""
    info = path.stat()
    return info.st_uid in (os.geteuid(), 0) and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
