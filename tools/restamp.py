"""Give rows measured with older template sources today's digest, where they are of the very same kernels.

    python tools/restamp.py REVISION [--jobs N] [--template NAME ...] [FILE ...]

A row is stale as soon as a byte of its template's sources changes, a comment too.  This lowers every schedule that the
files name with the sources of git REVISION and with those of the working tree, and compares what nvcc and the host
compiler get: CUDA text, host code, shared memory, flags.  Only if all kernels of a template are equal, its digest is
replaced in all files; a template with a difference is left as it is, and the exit status is 1.

Files: tuning_db/*.jsonl and tuning_db/sweeps/*.jsonl by default; run tools/build_db.py after it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def spec_of(record: dict) -> str:
    """The (problem, schedule) of a record as text that two trees read alike."""
    return json.dumps({"problem": record["problem"], "schedule": record["schedule"]}, sort_keys=True)


def named_specs(files: Iterable[Path]) -> dict[str, dict[str, set[str]]]:
    """Template -> digest -> specs, of every record that names a kernel; models without heads name none."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "template_digest" in record and "schedule" in record:
                of_template = found[record["schedule"]["template"]][record["template_digest"]]
                if record["kind"] != "cost_model":
                    of_template.add(spec_of(record))
    return found


def answer(part: int, parts: int) -> None:
    """In one of the two trees: read specs on stdin, write the digest of each generated kernel, a line each."""
    from qla_jit import build
    from qla_jit.config import Problem
    from qla_jit.errors import BuildError
    from qla_jit.schedule import Schedule
    from qla_jit.spec import KernelSpec

    for index, line in enumerate(sys.stdin):
        if index % parts == part:
            values = json.loads(line)
            spec = KernelSpec(Problem.from_dict(values["problem"]), Schedule.from_dict(values["schedule"]))
            try:
                lowered = build.lower(spec, compile_device=False)
                made = (lowered.source, str(lowered.artifact.host_mod), lowered.smem_bytes, build.flags(spec))
            except BuildError as error:  # a schedule that one of the sources does not know equals nothing
                made = (os.getcwd(), error)
            print(index, hashlib.sha256(repr(made).encode()).hexdigest(), flush=True)


def package(folder: Path, revision: str | None) -> Path:
    """A folder to import `qla_jit` from, laid out as installed, with the sources of a revision or the working tree."""
    source = ROOT
    if revision is not None:
        source = folder / "revision"
        source.mkdir(parents=True)
        packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x"], cwd=source, check=True, input=packed)
    for name, place in (("qla_jit", "qla_jit"), ("templates", "qla_jit/templates"), ("tuning_db", "qla_jit/tuning_db")):
        shutil.copytree(source / name, folder / place, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def generated(tree: Path, specs: list[str], jobs: int) -> list[str]:
    """Digest of the kernel that ``tree`` generates for each spec."""
    text = "\n".join(specs) + "\n"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    running = []
    for part in range(jobs):
        command = [sys.executable, __file__, "--answer", str(part), str(jobs)]
        child = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        child.stdin.write(text)
        child.stdin.close()
        running.append(child)
    found = {}
    for child in running:
        for line in child.stdout:
            index, digest = line.split()
            found[int(index)] = digest
        if child.wait():
            raise SystemExit(f"a kernel of {tree} did not lower (exit status {child.returncode}); see above.")
    return [found[index] for index in range(len(specs))]


def digests(tree: Path, templates: list[str]) -> dict[str, str]:
    """Source digest of each template in ``tree``."""
    code = "import json, sys; from qla_jit.registry import digest; print(json.dumps([digest(t) for t in sys.argv[1:]]))"
    command = [sys.executable, "-c", code, *templates]
    said = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, text=True, stdout=subprocess.PIPE
    )
    return dict(zip(templates, json.loads(said.stdout)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--template", action="append", help="look at this one alone; may be repeated")
    options = parser.parse_intermixed_args(arguments)
    folder = ROOT / "tuning_db"
    files = options.files or sorted([*folder.glob("*.jsonl"), *folder.glob("sweeps/*.jsonl")])
    named = {name: found for name, found in named_specs(files).items() if name in (options.template or [name])}
    failed = False
    with tempfile.TemporaryDirectory(prefix="qla-restamp-") as scratch:
        before, after = (
            package(Path(scratch, name), revision) for name, revision in (("before", options.revision), ("after", None))
        )
        old, new = digests(before, sorted(named)), digests(after, sorted(named))
        for template, by_digest in named.items():
            specs = sorted(by_digest.get(old[template], ()))
            if old[template] == new[template] or not specs:
                continue
            was, now = (generated(tree, specs, options.jobs) for tree in (before, after))
            different = [spec for spec, a, b in zip(specs, was, now) if a != b]
            print(f"{template}: {len(specs) - len(different)} of {len(specs)} kernels are the same")
            if different:
                failed = True
                print(f"  not, for example: {different[0]}")
                continue
            for path in files:
                text = path.read_text(encoding="utf-8")
                path.write_text(text.replace(old[template], new[template]), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
