"""A build that cannot succeed says why, before it costs anything, and publishes nothing."""

import threading
from pathlib import Path

import pytest

from qla_jit import build, toolchain
from qla_jit.artifacts import LIBRARY, ArtifactStore
from qla_jit.config import OpConfig
from qla_jit.errors import BuildError, CacheError, CompilerMissingError, InfeasibleError
from qla_jit.registry import get_template
from qla_jit.spec import KernelSpec
from qla_jit.toolchain import Toolchain

TOOLS = Toolchain(tilelang="0.1.15", nvcc="13.0.88", nvcc_path="/nowhere/nvcc")


def small_spec(**changes) -> KernelSpec:
    problem = OpConfig(1, 8, head_dim_k=64).problem("kkt_inverse", chunk_size=32)
    return KernelSpec(problem, get_template("kkt_inverse_mma").default(problem).replace(**changes))


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "cache")


@pytest.fixture
def nothing_lowers(monkeypatch):
    def lower(*arguments, **named):
        raise AssertionError("lowering began")

    monkeypatch.setattr(build, "lower", lower)


def test_infeasible_schedule_is_refused_with_its_violations_before_anything_compiles(store, nothing_lowers):
    problem = OpConfig(1, 8, head_dim_v=64).problem("fused_forward")
    schedule = get_template("fused_forward_mma").default(problem).replace(dv_split=2, threads=128)
    with pytest.raises(InfeasibleError, match="4 warps need 64 rows of d_v, the tile has 32") as raised:
        build.ensure(KernelSpec(problem, schedule), store)
    assert [v.rule for v in raised.value.violations] == ["each_warp_owns_16_rows"]
    assert not store.root.exists()


def test_without_nvcc_a_build_says_what_still_works(store, nothing_lowers, monkeypatch):
    monkeypatch.setattr(toolchain, "current", lambda: Toolchain(tilelang="0.1.15", nvcc=None))
    with pytest.raises(CompilerMissingError, match="nvcc was not found.*cache.*still work"):
        build.ensure(small_spec(), store)
    assert not store.root.exists()


def test_without_nvcc_a_cached_kernel_is_returned(store, nothing_lowers, monkeypatch):
    spec = small_spec()
    monkeypatch.setattr(toolchain, "current", lambda: TOOLS)
    made = store.publish(spec, build.flags(spec), {LIBRARY: b"so"}, {})
    monkeypatch.setattr(toolchain, "current", lambda: Toolchain(tilelang="0.1.15", nvcc=None))
    assert build.ensure(spec, store).path == made.path


def test_cache_that_cannot_be_trusted_is_refused_before_anything_compiles(store, nothing_lowers, monkeypatch):
    monkeypatch.setattr(toolchain, "current", lambda: TOOLS)
    store.root.mkdir()
    store.root.chmod(0o777)
    with pytest.raises(CacheError):
        build.build(small_spec(), store)


def test_flags_carry_the_templates_pass_options():
    problem = OpConfig(1, 8).problem("fused_forward")
    spec = KernelSpec(problem, get_template("fused_forward_sm90").default(problem))
    assert set(build.NVCC_FLAGS) < set(build.flags(spec))
    assert "TL_ENABLE_FAST_MATH=True" in build.flags(spec)


class TestWithTileLang:
    """These lower a small kernel; nvcc is a script."""

    @pytest.fixture(autouse=True)
    def tilelang(self):
        pytest.importorskip("tilelang")

    @pytest.fixture
    def nvcc(self, tmp_path, monkeypatch):
        """Install a script as nvcc; it runs in the folder of the source, with nvcc's arguments."""

        def install(body: str) -> None:
            path = tmp_path / "nvcc"
            path.write_text("#!/bin/sh\n" + body)
            path.chmod(0o755)
            monkeypatch.setattr(toolchain, "current", lambda: Toolchain("0.1.15", "13.0.88", str(path)))

        return install

    def test_nvcc_failure_carries_its_log_and_publishes_nothing(self, store, nvcc):
        nvcc("for i in $(seq 300); do echo 'a long warning about a header' >&2; done\n"
             "echo 'kernel.cu(7): error: expected a semicolon' >&2\necho 'a note' >&2\nexit 1")  # fmt: skip
        with pytest.raises(BuildError, match="expected a semicolon") as raised:
            build.ensure(small_spec(), store)
        assert "a long warning" in raised.value.log and "a long warning" not in str(raised.value)
        assert list(store.root.iterdir()) == []

    def test_equal_cuda_text_is_compiled_once_and_both_builds_are_whole(self, store, nvcc, tmp_path, monkeypatch):
        count = tmp_path / "count"
        nvcc(f"echo x >> {count}\ncat kernel.cu > kernel.cubin\necho 'ptxas info : Used 77 registers' >&2")
        monkeypatch.setattr(build.cubin, "report", lambda roles, cubin: {})
        library = "tilelang.tvm.runtime.Module.export_library"
        monkeypatch.setattr(library, lambda self, path: Path(path).write_bytes(b"library"))
        first = build.build(small_spec(), store)
        monkeypatch.setattr("qla_jit.registry.digest", lambda name: "e" * 64)  # a comment in the template changed
        second = build.build(small_spec(), store)
        assert count.read_text() == "x\n"
        assert (second.path != first.path, second.cubin, second.source) == (True, first.cubin, first.source)
        assert first.report["registers"] == second.report["registers"] == 77
        assert second.report["device_code_of"] == str(first.path.relative_to(store.root))
        assert store.get(small_spec(), build.flags(small_spec())) == second

    def test_nvcc_that_cannot_start_is_a_build_error(self, store, nvcc, tmp_path):
        nvcc("")
        (tmp_path / "nvcc").write_text("#!/nowhere/shell\n")
        with pytest.raises(BuildError, match="nvcc must start"):
            build.ensure(small_spec(), store)

    def test_lowering_failure_names_the_schedule_and_the_cause(self, monkeypatch):
        from dataclasses import replace

        from qla_jit import registry

        def broken(problem, schedule):
            raise ValueError("no such layout")

        template = replace(get_template("kkt_inverse_mma"), prim_func=broken)
        monkeypatch.setattr(registry, "templates", lambda: {"kkt_inverse_mma": template})
        with pytest.raises(BuildError, match=r"kkt_inverse_mma\(threads=128\) must lower.*no such layout"):
            build.lower(small_spec(), compile_device=False)

    def test_hidden_nvcc_flags_do_not_reach_nvcc(self, nvcc, monkeypatch):
        nvcc('echo "[$NVCC_APPEND_FLAGS$NVCC_PREPEND_FLAGS]" > kernel.cubin')
        monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
        monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-G")
        assert build.nvcc_cubin("", "sm_90a", []) == b"[]\n"

    def test_builds_in_threads_keep_their_logs_apart(self, nvcc):
        nvcc("cat kernel.cu > kernel.cubin")
        import tvm_ffi
        from tilelang import tvm

        target, made = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}), {}

        def run(number):
            build._current.run = made[number] = build._Run([])
            build._install_nvcc_callback()
            callback = tvm_ffi.get_global_func(build.CUDA_CALLBACK)
            for i in range(20):
                callback(f"// {number} {i}", target, {})
            build._current.run = None

        workers = [threading.Thread(target=run, args=(n,)) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        for number in range(3):
            assert made[number].cubins == [f"// {number} {i}".encode() for i in range(20)]
            assert len(made[number].log) == 20

    def test_kernels_of_others_go_where_they_went_before(self):
        import tvm_ffi
        from tilelang import tvm

        seen = []

        def theirs(code, target, pass_config=None):
            seen.append(str(code))
            return bytearray(b"theirs")

        original = tvm_ffi.get_global_func(build.CUDA_CALLBACK)
        try:
            tvm_ffi.register_global_func(build.CUDA_CALLBACK, theirs, override=True)
            build._install_nvcc_callback()
            ours = tvm_ffi.get_global_func(build.CUDA_CALLBACK)
            build._install_nvcc_callback()
            assert tvm_ffi.get_global_func(build.CUDA_CALLBACK).same_as(ours)  # once is enough
            target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
            assert bytes(ours("// not ours", target, {})) == b"theirs"
            assert seen == ["// not ours"]
        finally:
            tvm_ffi.register_global_func(build.CUDA_CALLBACK, original, override=True)

    def test_unwritable_home_is_a_build_error_with_the_remedy(self, tmp_path):
        import subprocess
        import sys

        (tmp_path / "file").write_text("")
        code = (
            "from qla_jit import build\nfrom qla_jit.errors import BuildError\n"
            "try: build._import_tilelang()\nexcept BuildError as error: print(error)"
        )
        home = str(tmp_path / "file")
        environment = {"HOME": home, "TILELANG_CACHE_DIR": f"{home}/x", "PATH": "/usr/bin:/bin"}
        said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert "set TILELANG_CACHE_DIR" in said.stdout
