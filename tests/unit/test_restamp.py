"""tools/restamp.py: which kernels it compares, on which sources, and that it sees a difference."""

import json

import pytest
from tool_files import load_tool

from qla_jit import registry
from qla_jit.config import OpConfig
from qla_jit.registry import select


@pytest.fixture(scope="module")
def restamp():
    return load_tool("restamp")


def test_every_kernel_of_the_shipped_files_is_named_once(restamp):
    files = [*restamp.ROOT.glob("tuning_db/*.jsonl"), *restamp.ROOT.glob("tuning_db/sweeps/*.jsonl")]
    named = restamp.named_specs(files)
    assert "fused_forward_sm90" in named
    for template, by_digest in named.items():
        assert set(by_digest) == {registry.digest(template)}  # nothing shipped is stale
        for spec in by_digest[registry.digest(template)]:
            assert json.loads(spec)["schedule"]["template"] == template


def test_sources_are_those_of_the_folder_that_is_asked(restamp, tmp_path):
    tree = restamp.package(tmp_path / "tree", None)
    assert restamp.digests(tree, ["kkt_inverse_sm90"]) == {"kkt_inverse_sm90": registry.digest("kkt_inverse_sm90")}
    with open(tree / "qla_jit" / "templates" / "kkt_inverse_sm90.py", "a") as source:
        source.write("# a comment\n")
    assert restamp.digests(tree, ["kkt_inverse_sm90"]) != {"kkt_inverse_sm90": registry.digest("kkt_inverse_sm90")}


@pytest.mark.codegen
def test_a_comment_changes_no_kernel_and_a_changed_constant_does(restamp, tmp_path):
    pytest.importorskip("tilelang")
    problem = OpConfig(1, 1, 64, 64).problem("kkt_inverse")
    spec = json.dumps({"problem": problem.as_dict(), "schedule": select(problem).default(problem).as_dict()})
    found = []
    for name, edit in (
        ("same", None),
        ("comment", ("#", "# a comment\n#")),
        ("constant", ("1.4426950408889634f", "1.5f")),
    ):
        tree = restamp.package(tmp_path / name, None)
        source = tree / "qla_jit" / "templates" / ("inverse_sm90.py" if name == "constant" else "kkt_inverse_sm90.py")
        if edit:
            assert edit[0] in source.read_text()
            source.write_text(source.read_text().replace(*edit, 1))
        found += restamp.generated(tree, [spec], 1)
    assert found[0] == found[1] != found[2]
