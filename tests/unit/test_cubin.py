"""nvdisasm's listing is read line by line; without the tool a report says "not measured" and how to get it."""

import pytest

from qla_jit import cubin
from qla_jit.cubin import CubinCounts, LiveRegisters
from qla_jit.errors import ToolError
from qla_jit.schedule import Role

HEAD = "        .global         kernel                                     // |     01234567890123456789012345678901\n"
ROLES = (Role("state0", 4, 192, ""), Role("state1", 4, 192, ""), Role("aux", 4, 104, ""), Role("load", 4, 24, ""))


def line(address: int, code: str, live: int) -> str:
    return f"        /*{address:04x}*/                   {code} ;          // | {live:3d} :: ^^  | 1 : |  3 ::  |\n"


LISTING = HEAD + "".join(
    line(16 * i, code, live)
    for i, (code, live) in enumerate(
        [
            ("LDC R1, c[0x0][0x28]", 4),
            ("USETMAXREG.DEALLOC.CTAPOOL 0x18", 30),
            ("LDL.64 R2, [R1]", 22),
            ("USETMAXREG.DEALLOC.CTAPOOL 0x68", 9),
            ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT", 94),
            ("WARPGROUP.DEPBAR.LE gsb0, 0x0", 80),
            ("@!P0 BRA `(.L_x_4)", 80),
            ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xc0", 7),
            ("HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR12].tnspB, R24", 178),
            ("@P1 STL [R1+0x4], R2", 178),
            ("WARPGROUP.DEPBAR.LE gsb0, 0x1", 80),
            ("WARPGROUP.ARRIVE", 80),
            ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xc0", 7),
            ("HMMA.16816.F32.BF16 R4, R8, R10, R4", 177),
            ("WARPGROUP.DEPBAR.LE gsb0, 0x1", 80),
            ("DEPBAR.LE SB0, 0x0", 5),
        ]
    )
)
STRETCHES = tuple(LiveRegisters(*s) for s in ((None, 4), (24, 30), (104, 94), (192, 178), (192, 177)))


def test_listing_is_counted_and_cut_at_setmaxnreg():
    assert cubin.count(LISTING) == CubinCounts(
        hgmma=2, hmma=1, stl=1, ldl=1, waits=((0, 1), (1, 2)), stretches=STRETCHES
    )


def test_roles_get_the_stretch_of_their_limit_in_order():
    found = cubin.role_registers(ROLES, cubin.count(LISTING))
    assert list(found) == ["state0", "state1", "aux", "load"]
    assert {name: row["live"] for name, row in found.items()} == {"state0": 178, "state1": 177, "aux": 94, "load": 30}
    assert found["aux"]["limit"] == 104


def test_role_without_a_stretch_is_not_invented():
    counts = CubinCounts(0, 0, 0, 0, (), (LiveRegisters(None, 9), LiveRegisters(24, 20)))
    found = cubin.role_registers((Role("a", 4, 24, ""), Role("b", 4, 240, "")), counts)
    assert (found["a"]["live"], found["b"]["live"]) == (20, None)


def test_kernel_of_one_role_is_one_stretch():
    counts = CubinCounts(0, 0, 0, 0, (), (LiveRegisters(None, 56),))
    assert cubin.role_registers((Role("all", 4, 64, ""),), counts) == {"all": {"limit": 64, "live": 56}}


@pytest.fixture
def no_tools(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cubin.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def install(folder, body):
    path = folder / "nvdisasm"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return path


def test_missing_tool_is_an_error_with_the_remedy_and_the_report_says_not_measured(no_tools):
    with pytest.raises(ToolError, match="pip install nvidia-cuda-nvdisasm"):
        cubin.disassemble(b"")
    found = cubin.report(ROLES, b"")
    assert found["instructions"] is None
    assert {row["live"] for row in found["role_registers"].values()} == {None}
    assert found["role_registers"]["load"]["limit"] == 24
    assert found["cubin_source"].startswith("not measured: ") and "pip install" in found["cubin_source"]


def test_tool_that_refuses_the_cubin_is_an_error_with_its_words(no_tools):
    install(no_tools, "echo 'nvdisasm fatal: unknown option plr' >&2; exit 255")
    with pytest.raises(ToolError, match="unknown option plr.*13.0 or newer"):
        cubin.disassemble(b"")
    assert "unknown option plr" in cubin.report(ROLES, b"")["cubin_source"]


def test_hanging_tool_is_an_error(no_tools, monkeypatch):
    install(no_tools, "exec /bin/sleep 30")
    monkeypatch.setattr(cubin, "TIMEOUT_S", 0.2)
    with pytest.raises(ToolError, match="timed out"):
        cubin.disassemble(b"")


def test_listing_that_cannot_be_read_does_not_break_a_report(no_tools):
    install(no_tools, "echo '        /*0010*/   WARPGROUP.DEPBAR.LE gsb0 ;  // | 3 |'")
    assert cubin.report(ROLES, b"")["cubin_source"].startswith("not measured")


def test_tool_on_path_reads_the_bytes_it_is_given(no_tools):
    path = install(no_tools, 'for last; do :; done; exec /bin/cat "$last"')
    assert cubin.find_nvdisasm() == str(path)
    found = cubin.report(ROLES, LISTING.encode())
    assert found["cubin_source"] == "nvdisasm -plr"
    assert found["role_registers"]["state1"] == {"limit": 192, "live": 177}
    assert found["instructions"] == {"hgmma": 2, "hmma": 1, "stl": 1, "ldl": 1, "waits": ((0, 1), (1, 2))}


def test_cuda_home_wins_over_path(no_tools, monkeypatch):
    install(no_tools, "")
    (no_tools / "home" / "bin").mkdir(parents=True)
    path = install(no_tools / "home" / "bin", "")
    monkeypatch.setenv("CUDA_HOME", str(no_tools / "home"))
    assert cubin.find_nvdisasm() == str(path)


def test_registers_in_one_line():
    table = cubin.role_registers(ROLES, cubin.count(LISTING))
    text = cubin.registers_text({"registers": 128, "role_registers": table})
    assert text == "128 (state0 178/192, state1 177/192, aux 94/104, load 30/24)"
    unmeasured = cubin.role_registers(ROLES, None)
    assert cubin.registers_text({"registers": 128, "role_registers": unmeasured}) == "128 (per role: not measured)"
    table["aux"]["live"] = None
    assert "aux ?/104" in cubin.registers_text({"registers": 128, "role_registers": table})
    one = {"all": {"limit": 64, "live": 56}}
    assert cubin.registers_text({"registers": 56, "role_registers": one}) == "56"
    assert cubin.registers_text({}) == "-"
