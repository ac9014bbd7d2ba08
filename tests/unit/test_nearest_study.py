"""tools/nearest_study.py: what it says of the shipped recordings is what the distance in use rests on."""

import pytest
from tool_files import load_tool

from qla_jit.config import OpConfig
from qla_jit.db import lookup


@pytest.fixture(scope="module")
def tool():
    return load_tool("nearest_study")


def test_the_weights_in_use_lose_least_or_little_more(tool, capsys):
    tool.main([])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    by_kernel = {}
    for kernel, weight, left_out, mean, _ in rows:
        assert int(left_out) >= 15
        by_kernel.setdefault(kernel.strip("`"), {})[weight] = float(mean.strip("%"))
    assert set(lookup.KEY_HEAD_KERNELS) < set(by_kernel) and len(by_kernel) == 5
    for kernel, losses in by_kernel.items():
        (used,) = (loss for weight, loss in losses.items() if weight.endswith("*"))
        assert used <= min(losses.values()) + 0.5, kernel
    assert by_kernel["kkt_inverse"]["2 *"] < by_kernel["kkt_inverse"]["heads"] / 4


def test_a_row_that_cannot_run_is_passed_over(tool):
    near, between, far = (OpConfig(*heads).problem("fused_forward") for heads in ((2, 8), (4, 16), (8, 32)))
    times = {near: {"x": 2.0, "y": 1.0}, between: {"z": 1.0}, far: {"x": 3.0, "z": 4.0}}
    assert sorted(tool.losses({"w": times})) == pytest.approx([1.0 / 3.0, 1.0])
