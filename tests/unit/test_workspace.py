"""A workspace grows, never shrinks, and keeps what a captured graph reads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qla_jit import InputError, OpConfig, Workspace, device_indices, workspace, workspace_bytes
from qla_jit.workspace import intermediates, take_kept

CPU = torch.device("cpu")
CONFIG = OpConfig(2, 4)


def take(workspace, tokens, sequences=1, chunk_size=64):
    return workspace.take(intermediates(CONFIG.problem("fused_forward", chunk_size), tokens, sequences), CPU)


def test_tensors_have_a_slot_per_chunk_and_share_no_byte():
    a, log_gates = take(Workspace(), 300, 2)
    assert a.shape == (300 // 64 + 2, 4, 64, 64) and a.dtype == torch.bfloat16 and a.is_contiguous()
    assert log_gates.shape == a.shape[:3] and log_gates.dtype == torch.float32 and log_gates.is_contiguous()
    a.fill_(1)
    log_gates.fill_(2)
    assert (a == 1).all() and (log_gates == 2).all()
    assert a.data_ptr() % 16 == log_gates.data_ptr() % 16 == 0


def test_it_grows_on_demand_and_never_shrinks():
    workspace = Workspace()
    assert workspace.nbytes == 0
    small = take(workspace, 100)
    assert take(workspace, 100) is small
    take(workspace, 1000)
    grown = workspace.nbytes
    a, _ = take(workspace, 100)
    assert workspace.nbytes == grown and a.data_ptr() == take(workspace, 1000)[0].data_ptr()


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 1), (1, 1), (64, 1), (1000, 7), (63, 63)])
def test_bytes_are_known_ahead_for_every_chunk_size(tokens, sequences):
    workspace = Workspace()
    workspace.reserve(CONFIG, tokens, sequences, CPU)
    assert workspace.nbytes == workspace_bytes(CONFIG, tokens, sequences)
    for chunk_size in (32, 64):
        take(workspace, tokens, sequences, chunk_size)
    assert workspace.nbytes == workspace_bytes(CONFIG, tokens, sequences)
    assert workspace_bytes(CONFIG, tokens, sequences) == (tokens // 64 + sequences) * 4 * (2 * 64 * 64 + 4 * 64)


def test_one_workspace_serves_one_card():
    workspace = Workspace()
    take(workspace, 100)
    with pytest.raises(InputError, match="per card and stream"):
        workspace.reserve(CONFIG, 100, 1, "meta")


def test_what_a_graph_reads_is_kept(monkeypatch):
    workspace = Workspace()
    monkeypatch.setattr("qla_jit.workspace.is_capturing", lambda device: True)
    a, _ = take(workspace, 100)
    take(workspace, 100)
    monkeypatch.undo()
    take(workspace, 1000)
    assert [kept.data_ptr() for kept in workspace._captured] == [a.data_ptr()]


def test_views_are_bounded(monkeypatch):
    monkeypatch.setattr("qla_jit.workspace._MAX_CACHED_VIEWS", 4)
    workspace = Workspace()
    for n in reversed(range(1, 10)):
        take(workspace, 64 * n)
    assert len(workspace._views) <= 4


LAYOUT = intermediates(CONFIG.problem("fused_forward"), 100, 1)


@pytest.fixture
def on_stream(monkeypatch):
    """Makes a stream the current one; nothing is kept before or after the test."""
    monkeypatch.setattr(workspace, "_kept", workspace._Kept())
    return lambda stream: monkeypatch.setattr(device_indices, "_stream", lambda device: stream)


def test_kept_intermediates_belong_to_a_stream(on_stream):
    taken = {}
    for stream in (7, 8, 7, 8):
        on_stream(stream)
        a, _ = taken.setdefault(stream, take_kept(LAYOUT, CPU))
        assert take_kept(LAYOUT, CPU)[0] is a
    assert taken[7][0].data_ptr() != taken[8][0].data_ptr()


def test_kept_intermediates_belong_to_a_thread(on_stream):
    """Two threads may launch on one stream in turns, kernel by kernel."""
    on_stream(7)
    mine = take_kept(LAYOUT, CPU)
    with ThreadPoolExecutor(1) as other_thread:
        theirs = [other_thread.submit(take_kept, LAYOUT, CPU).result() for _ in range(2)]
    assert theirs[0] is theirs[1] and theirs[0][0].data_ptr() != mine[0].data_ptr()
    assert take_kept(LAYOUT, CPU) is mine


def test_nothing_is_kept_for_a_graph_or_taken_from_what_is_kept(on_stream, monkeypatch):
    take_kept(LAYOUT, CPU)
    monkeypatch.setattr(device_indices, "is_capturing", lambda device: True)
    assert take_kept(LAYOUT, CPU) is None


def test_of_streams_used_long_ago_nothing_is_kept(on_stream):
    first = None
    for stream in range(5):
        on_stream(stream)
        first = first or take_kept(LAYOUT, CPU)
        take_kept(LAYOUT, CPU)
    assert list(workspace._kept.workspaces) == [(None, stream) for stream in (1, 2, 3, 4)]
    on_stream(0)
    assert take_kept(LAYOUT, CPU) is not first
