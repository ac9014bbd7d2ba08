"""What compiles here is found without importing TileLang, and a missing compiler is said with what still works."""

import importlib.metadata
import subprocess
import sys

import pytest

from qla_jit import toolchain
from qla_jit.errors import BuildError, CompilerMissingError
from qla_jit.toolchain import Toolchain


def fake_nvcc(folder, version="12.9.41", text=None):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvcc"
    said = f"Cuda compilation tools, release 12.9, V{version}"
    path.write_text(text if text is not None else f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_here(monkeypatch, tmp_path):
    """No nvcc but what a test puts under tmp_path."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(toolchain, "DEFAULT_NVCC", tmp_path / "default" / "nvcc")
    return tmp_path


def test_missing_nvcc_is_none_and_requiring_it_says_what_still_works(only_here):
    tools = toolchain.current()
    assert (tools.nvcc, tools.nvcc_path) == (None, None)
    with pytest.raises(CompilerMissingError, match="nvcc was not found") as raised:
        tools.require()
    for works in ("cache", "CPU tensors", "replays", "database", "CUDA_HOME"):
        assert works in str(raised.value)
    assert isinstance(raised.value, BuildError)


def test_missing_tilelang_is_named():
    with pytest.raises(CompilerMissingError, match="tilelang was not found"):
        Toolchain(tilelang=None, nvcc="13.0.1", nvcc_path="/x/nvcc").require()
    with pytest.raises(CompilerMissingError, match="tilelang and nvcc"):
        Toolchain(tilelang=None, nvcc=None).require()


def test_cuda_home_wins_over_path_and_path_over_the_default(only_here, monkeypatch):
    fake_nvcc(only_here / "default", "12.8.1")
    assert toolchain.current().nvcc == "12.8.1"
    fake_nvcc(only_here / "path", "12.8.2")
    assert toolchain.current().nvcc == "12.8.2"
    monkeypatch.setenv("CUDA_HOME", str(only_here / "home"))
    assert toolchain.current().nvcc == "12.8.2"  # nothing there
    path = fake_nvcc(only_here / "home" / "bin", "12.8.3")
    assert toolchain.current() == Toolchain(toolchain.current().tilelang, "12.8.3", str(path))


@pytest.mark.parametrize("text", ["", "#!/bin/sh\nexit 1\n", "#!/nowhere/shell\n", "\x7fELF of another machine"])
def test_broken_nvcc_counts_as_missing(only_here, text):
    fake_nvcc(only_here / "path", text=text)
    assert toolchain.current().nvcc is None
    with pytest.raises(CompilerMissingError):
        toolchain.current().require()


def test_path_is_no_part_of_the_identity():
    here, there = (Toolchain("0.1.15", "13.0.1", path).as_dict() for path in ("/a/nvcc", "/b/nvcc"))
    assert here == there == {"tilelang": "0.1.15", "nvcc": "13.0.1"}


def test_tilelang_version_is_read_without_importing_it():
    code = "import sys; from qla_jit import toolchain; print(toolchain.current().tilelang, 'tilelang' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == [importlib.metadata.version("tilelang"), "False"]
