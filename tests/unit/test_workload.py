import pytest

from qla_jit.errors import ConfigError
from qla_jit.workload import (
    DEFAULT_SPLIT_WORKLOADS,
    DEFAULT_WORKLOADS,
    Workload,
    lengths_of,
    parse,
    suited,
    workload_of,
)


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
    assert all(parse(w).segment_chunks for w in DEFAULT_SPLIT_WORKLOADS)


@pytest.mark.parametrize(
    ("text", "found", "gates"),
    [
        ("1x32768/16", Workload((32768,), 16, 75), "bench"),
        ("1x32768/16~75", Workload((32768,), 16, 75), "bench"),
        ("1x32768/16~0", Workload((32768,), 16, 0), "mild:0"),
        ("8192x2/8~100", Workload((8192, 8192), 8, 100), "mild:100"),
        ("7+5+1024*2/1~50", Workload((7, 5, 1024, 1024), 1, 50), "mild:50"),
        ("1x8192", Workload((8192,)), "bench"),
    ],
)
def test_a_cut_follows_the_lengths(text, found, gates):
    assert parse(text) == found
    assert found.gates == gates
    assert found.case == ({"segment_chunks": found.segment_chunks, "gates": gates} if "/" in text else {})


@pytest.mark.parametrize(
    "text",
    ["1x8192/", "1x8192/0", "1x8192/-1", "1x8192/a", "1x8192/8~", "1x8192/8~101", "1x8192/8~-1", "1x8192/8/8", "/8"]
    + ["1x8192/8~5~5", "1x8192~50", "1x8192/²", "1x8192/8x4"],
)
def test_a_cut_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="must be"):
        parse(text)


def test_kernels_take_the_workloads_that_suit_them():
    both = ["1x8192", "1x8192/16", "8192x4", "1x8192/8~0"]
    assert suited("fused_forward", both) == ["1x8192", "8192x4"]
    assert suited("segment_correct", both) == ["1x8192/16", "1x8192/8~0"]
    assert workload_of("segment_state", "1x8192/16").segment_chunks == 16
    with pytest.raises(ConfigError, match="of segment_state must cut its sequences.*write for example 1x32768/16"):
        workload_of("segment_state", "1x8192")
    with pytest.raises(ConfigError, match="of kkt_inverse must leave its sequences whole.*remove what follows"):
        workload_of("kkt_inverse", "1x8192/16")
    with pytest.raises(ConfigError, match="workload of whole sequences"):
        lengths_of("1x8192/16")
