"""What may be asked, how refusals read, and that a problem keeps only what its kernel depends on."""

import pytest

from qla_jit.config import FORWARD_KERNELS, KERNEL_FIELDS, KERNELS, OpConfig, Problem
from qla_jit.db.records import problem_body
from qla_jit.errors import ConfigError, QlaError, UnsupportedError
from qla_jit.spec import canonical_json


@pytest.mark.parametrize(
    "fields, invariant, value, remedy",
    [
        ({"num_heads": 0}, "num_heads >= 1", "num_heads=0", "number of q/k heads"),
        ({"num_heads": 3}, "num_value_heads % num_heads == 0", "num_value_heads=8, num_heads=3", "repeat q and k"),
        ({"num_value_heads": 0}, "num_value_heads % num_heads == 0", "num_value_heads=0", "repeat"),
        ({"head_dim_k": 96}, "head_dim_k in (64, 128)", "head_dim_k=96", "pad"),
        ({"head_dim_v": 512}, "head_dim_v in (64, 128, 256)", "head_dim_v=512", "pad"),
        ({"dtype": "float32"}, "dtype in ('bfloat16', 'float16')", "dtype='float32'", "cast q, k and v"),
        ({"gate_dtype": "float64"}, "gate_dtype in", "gate_dtype='float64'", "cast g and beta"),
        ({"state_dtype": "float16"}, "state_dtype in", "state_dtype='float16'", "float32"),
    ],
)
def test_refusal_states_invariant_values_and_remedy(fields, invariant, value, remedy):
    with pytest.raises(ConfigError) as raised:
        OpConfig(**{"num_heads": 2, "num_value_heads": 8, **fields})
    text = str(raised.value)
    assert f"`{invariant}" in text and value in text and remedy in text
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, QlaError)


def test_unknown_arch_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="sm90.*sm121.*arch='sm80'"):
        OpConfig(1, 1, arch="sm80")


def test_arch_may_be_given_as_nvcc_writes_it():
    assert OpConfig(1, 1, arch="sm_90a") == OpConfig(1, 1, arch="sm90")
    assert OpConfig(1, 1, arch="sm_121a").arch == "sm121"


def test_equal_configs_are_equal_keys():
    assert hash(OpConfig(2, 8)) == hash(OpConfig(2, 8, dtype="bfloat16"))
    assert OpConfig(2, 8) != OpConfig(2, 8, state_v_first=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_problem_keeps_only_the_fields_its_kernel_depends_on(kernel):
    problem = OpConfig(2, 8).problem(kernel)
    given = {name for name, value in problem.as_dict().items() if value is not None}
    assert given == {"kernel", "arch", "chunk_size", *KERNEL_FIELDS[kernel]}


def test_configs_that_a_kernel_cannot_tell_apart_share_its_problem():
    assert OpConfig(2, 8, head_dim_v=64).problem("kkt_inverse") == OpConfig(2, 8, head_dim_v=128).problem("kkt_inverse")
    assert OpConfig(2, 8).problem("kkt_inverse") == OpConfig(2, 8, state_v_first=True).problem("kkt_inverse")
    assert OpConfig(2, 8).problem("fused_forward") != OpConfig(2, 8, state_v_first=True).problem("fused_forward")


def test_activation_is_a_kernel_of_the_operators_that_ask_for_it():
    assert OpConfig(2, 8).kernels == FORWARD_KERNELS
    assert OpConfig(2, 8, activation=True).kernels == ("input_activation", *FORWARD_KERNELS)
    assert OpConfig(2, 8, activation=True).problem("kkt_inverse") == OpConfig(2, 8).problem("kkt_inverse")
    narrow = OpConfig(2, 8, gate_dtype="bfloat16", head_dim_v=64)
    assert narrow.problem("fused_forward") == OpConfig(2, 8, head_dim_v=64).problem("fused_forward")
    assert narrow.problem("input_activation", 32) == narrow.problem("input_activation", 64)
    assert narrow.problem("input_activation") != OpConfig(2, 8).problem("input_activation")


def test_fields_of_later_kernels_change_no_key_of_the_first_ones():
    """Digests of compiled kernels and ids of rows hash this text."""
    problem = OpConfig(2, 8).problem("kkt_inverse")
    assert canonical_json(problem.as_dict()) == (
        '{"arch":"sm90","chunk_size":64,"dtype":"bfloat16","head_dim_k":128,"head_dim_v":null,"kernel":"kkt_inverse",'
        '"num_heads":2,"num_value_heads":8,"state_dtype":null,"state_v_first":null}'
    )
    assert problem_body(problem) == {name: x for name, x in problem.as_dict().items() if x is not None}


def test_group_size_is_value_heads_per_key_head():
    assert OpConfig(4, 16).group_size == OpConfig(4, 16).problem("kkt_inverse").group_size == 4


@pytest.mark.parametrize("kernel", KERNELS)
def test_problem_survives_the_round_trip(kernel):
    problem = OpConfig(2, 8, arch="sm120", dtype="float16", state_v_first=True).problem(kernel, 32)
    assert Problem.from_dict(problem.as_dict()) == problem


def test_problem_of_a_newer_version_is_refused():
    with pytest.raises(ConfigError, match=r"\['window'\].*newer version"):
        Problem.from_dict({**OpConfig(2, 8).problem("kkt_inverse").as_dict(), "window": 4})


def test_problem_refuses_unknown_kernels_and_chunk_sizes():
    with pytest.raises(ConfigError, match="kernel='no_such'"):
        Problem(kernel="no_such", arch="sm90")
    with pytest.raises(ConfigError, match="chunk_size=48; use 64"):
        Problem(kernel="kkt_inverse", arch="sm90", num_value_heads=8, chunk_size=48)
