"""Identity: one text per value, one digest per question, and a new digest whenever the kernel could differ."""

import importlib
import os
import subprocess
import sys

import pytest

from qla_jit import registry
from qla_jit.config import OpConfig
from qla_jit.errors import ConfigError
from qla_jit.spec import KernelSpec, canonical_json, sha256


def spec(**changes) -> KernelSpec:
    problem = OpConfig(**{"num_heads": 2, "num_value_heads": 8, **changes}).problem("fused_forward")
    return KernelSpec(problem, registry.select(problem).default(problem))


@pytest.fixture
def fresh_digests():
    registry.digest.cache_clear()
    yield
    registry.digest.cache_clear()


def test_canonical_json_is_one_text_per_value():
    assert canonical_json({"b": [1, True, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,true,null]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert sha256({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_digest_is_the_same_in_every_process():
    code = (
        "from qla_jit import registry; from qla_jit.config import OpConfig; from qla_jit.spec import KernelSpec\n"
        "p = OpConfig(2, 8).problem('fused_forward'); print(KernelSpec(p, registry.select(p).default(p)).digest)"
    )
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.strip() == spec().digest


CHANGES = {"num_value_heads": 4, "dtype": "float16", "head_dim_v": 64, "state_dtype": "bfloat16", "state_v_first": True,
           "arch": "sm120"}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_digest_changes_with_the_problem(field):
    assert spec(**{field: CHANGES[field]}).digest != spec().digest


def test_archs_that_share_a_schedule_do_not_share_a_kernel():
    one, two = spec(arch="sm120"), spec(arch="sm121")
    assert one.schedule == two.schedule and one.digest != two.digest
    assert (one.as_dict()["target"], two.as_dict()["target"]) == ("sm_120a", "sm_121a")


def test_digest_changes_with_the_schedule():
    assert KernelSpec(spec().problem, spec().schedule.replace(stages_kq=2)).digest != spec().digest


def test_digest_changes_with_any_byte_of_the_templates_sources(monkeypatch, tmp_path, fresh_digests):
    before = spec().digest
    sources = registry.get_template("fused_forward_sm90").sources
    assert len(sources) > 1
    folder = importlib.import_module("qla_jit.templates").__path__[0]
    for source in sources:
        copy = tmp_path / source
        copy.parent.mkdir(exist_ok=True)
        for name in sources:
            text = open(f"{folder}/{name}", "rb").read()
            (tmp_path / name).write_bytes(text + (b"#" if name == source else b""))
        monkeypatch.setattr(registry.resources, "files", lambda package: tmp_path)
        registry.digest.cache_clear()
        assert spec().digest != before, source


def test_digest_depends_on_which_file_holds_which_bytes(monkeypatch, tmp_path, fresh_digests):
    sources = registry.get_template("fused_forward_sm90").sources
    monkeypatch.setattr(registry.resources, "files", lambda package: tmp_path)
    digests = []
    for contents in ((b"xy", b""), (b"", b"xy")):
        for name, content in zip(sources, contents):
            (tmp_path / name).write_bytes(content)
        for name in sources[2:]:
            (tmp_path / name).write_bytes(b"")
        registry.digest.cache_clear()
        digests.append(registry.digest("fused_forward_sm90"))
    assert digests[0] != digests[1]


def test_sources_cover_every_template_module_that_a_template_imports():
    """A helper module left out of `sources` would let a stale kernel be reused after the helper changed."""
    folder = importlib.import_module("qla_jit.templates").__path__[0]
    for template in registry.templates().values():
        for source in template.sources:
            text = open(f"{folder}/{source}").read()
            for helper in ("fragments_sm90", "inverse_sm90"):
                if f"from .{helper} import" in text:
                    assert f"{helper}.py" in template.sources, f"{template.name} uses {helper}"


def test_unknown_template_lists_the_known_ones():
    with pytest.raises(ConfigError, match="fused_forward_sm90.*'no_such'"):
        registry.get_template("no_such")


def test_spec_reads_as_kernel_and_digest():
    assert str(spec()) == f"fused_forward[{spec().digest[:10]}]"
