import pytest

from qla_jit.errors import ConfigError
from qla_jit.workload import DEFAULT_WORKLOADS, lengths_of


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("8192x4", [8192] * 4),
        ("1x8192", [8192]),
        ("1*3", [1, 1, 1]),
        ("4096+28672", [4096, 28672]),
        ("7+5+1024*2", [7, 5, 1024, 1024]),
        ("100", [100]),
    ],
)
def test_text_becomes_lengths(text, lengths):
    assert lengths_of(text) == lengths


@pytest.mark.parametrize("text", ["", "x", "8192x", "8192x4x2", "0x4", "-1x8192", "1+", "a+b", "8192x99999", "²x4"])
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match="must"):
        lengths_of(text)


def test_default_workloads_are_well_formed():
    assert all(lengths_of(w) for w in DEFAULT_WORKLOADS)
