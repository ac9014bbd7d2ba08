"""A layer with the operator in DDP and FSDP, two processes on the CPU: gradients are the average over both batches."""

import pytest
import torch
import training_processes

from qla_jit.numerics import relative_error


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_gradients_are_the_average_of_one_process(tmp_path, wrapper):
    wanted = training_processes.averaged_gradients(2, "cpu")
    found = training_processes.run(2, wrapper, "cpu", tmp_path)
    assert found.keys() == wanted.keys() and any("A_log" in name for name in found)
    for name, want in wanted.items():
        assert want.any() and relative_error(found[name], want) < 1e-5, name
