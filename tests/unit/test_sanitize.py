"""tools/sanitize.py without a card: what it would launch, and what it makes of the sanitizer's exit codes."""

import os

import pytest
from tool_files import load_tool

from qla_jit.resources import is_feasible


@pytest.fixture(scope="module")
def tool():
    return load_tool("sanitize")


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Puts a stand-in first on PATH: its exit code by kernel."""

    def install(body):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\necho launched 4\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_every_kernel_has_schedules_that_may_run(tool):
    for kernel in tool.KERNELS:
        specs = tool.schedules_of(kernel, (2, 8))
        assert len(specs) == len(set(specs)) >= 2 and all(is_feasible(s.problem, s.schedule) for s in specs), kernel


@pytest.mark.parametrize(
    ("body", "code", "verdict"),
    [
        ("exit 0", 0, "nothing found"),
        ("case $* in *kkt_inverse*) exit 9;; esac", 1, "found something"),
        ("exit 3", 2, "did not run"),
    ],
)
def test_exit_codes_become_verdicts(tool, sanitizer, capsys, body, code, verdict):
    sanitizer(body)
    assert tool.main(["--kernels", "fused_forward,kkt_inverse", "--tools", "racecheck"]) == code
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"| racecheck | `kkt_inverse` | 4 | {verdict} |" and len(said) == 4


def test_without_the_sanitizer_it_says_what_is_missing(tool, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert tool.main([]) == 2 and "compute-sanitizer must be on PATH" in capsys.readouterr().err
