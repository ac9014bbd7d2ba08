"""Every default compiles for every arch, and what was declared is what TVM lowered and what ptxas made of it."""

import pytest
from kernels import ALL, DEFAULTS, DIMS, FORWARD, GRADIENTS, HOPPER, INVERSE, Kernel, config

from qla_jit import cubin, registry
from qla_jit.arch import ARCHS, get_arch
from qla_jit.resources import SMEM_ALIGNMENT, estimate, is_feasible

#: Most bytes of spill stores in kernels other than the Hopper defaults, which have none: a few registers, once.
PORTABLE_SPILL_BYTES = 64
HOPPER_VARIANT_SPILL_BYTES = 16
#: Shared memory that TileLang saves by laying buffers over each other that are not live at the same time.
OVERLAID_BYTES = {"kkt_inverse_mma": lambda p: 2 * p.chunk_size * p.head_dim_k + 4 * p.chunk_size}  # K and the gates
#: What finding the sequence of a slot reads, at most.
SEARCH_BYTES = 32
#: What the row of a checkpoint reads in a chunk where one is due: once per state group, or per element of a thread.
CHECKPOINT_ROW_BYTES = 4 * 128


def each(kernels):
    """Parametrise over kernels."""
    return pytest.mark.parametrize("kernel", tuple(kernels), ids=str)


def declared(kernel: Kernel):
    return estimate(kernel.spec.problem, kernel.spec.schedule)


@pytest.fixture(scope="module")
def needs_nvdisasm():
    try:
        cubin.find_nvdisasm()
    except cubin.ToolError as error:
        pytest.skip(str(error))


def test_every_template_is_compiled_for_every_arch_it_declares():
    compiled = {(k.template, k.config.arch) for k in DEFAULTS}
    assert compiled == {(t.name, arch) for t in registry.templates().values() for arch in t.archs}
    assert {arch for _, arch in compiled} == set(ARCHS)


@each(ALL)
def test_kernel_compiles_with_its_text_its_cubin_and_its_library(kernel, artifact):
    assert "__global__" in artifact.source
    assert artifact.cubin[:4] == artifact.library.read_bytes()[:4] == b"\x7fELF"
    assert artifact.cubin in artifact.library.read_bytes()  # the library carries this very device code
    assert artifact.report["registers"] > 0 and artifact.report["build_seconds"] > 0


@each(HOPPER)
def test_hopper_default_has_no_spill_and_no_performance_warning(kernel, artifact):
    report = artifact.report
    assert (report["spill_bytes"], report["local_bytes"]) == (0, 0)
    assert report["warnings"] == []  # C7510 to C7515: ptxas serialises every product of the function


@each([k for k in ALL if k not in HOPPER])
def test_other_kernels_spill_little(kernel, artifact):
    hopper = kernel.template.endswith("_sm90")
    assert artifact.report["spill_bytes"] <= (HOPPER_VARIANT_SPILL_BYTES if hopper else PORTABLE_SPILL_BYTES)


@each(ALL)
def test_shared_memory_is_what_was_declared_and_fits_the_card(kernel, artifact):
    cost, report = declared(kernel), artifact.report
    overlaid = OVERLAID_BYTES.get(kernel.template, lambda p: 0)(kernel.spec.problem)
    in_ir = report["ir"]["smem_bytes"] + report["ir"]["static_smem_bytes"]
    assert in_ir == cost.smem_bytes - overlaid
    static = report["ir"]["static_smem_bytes"]
    assert report["smem_bytes"] == report["ir"]["smem_bytes"]
    assert static <= report["static_smem_bytes"] <= -(-static // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    in_cubin = report["smem_bytes"] + report["static_smem_bytes"]
    assert in_cubin <= cost.padded_smem_bytes <= get_arch(kernel.config.arch).smem_bytes_per_cta


@each(ALL)
def test_threads_barriers_and_register_limits_are_what_was_declared(kernel, artifact):
    cost, ir = declared(kernel), artifact.report["ir"]
    assert (ir["threads"], ir["mbarriers"]) == (cost.threads, cost.barriers)
    if not ir["register_limits"]:
        assert len(cost.roles) == 1
        return
    first, expected = 0, []
    for role in cost.roles:
        expected.append({"first": first, "end": first + role.threads, "registers": role.registers})
        first += role.threads
    assert ir["register_limits"] == expected


@each(ALL)
def test_launch_registers_cover_what_the_roles_were_promised(kernel, artifact):
    cost, registers = declared(kernel), artifact.report["registers"]
    if artifact.report["ir"]["register_limits"]:  # setmaxnreg shares out what the launch reserved
        assert cost.registers <= registers * cost.threads <= 65536
    else:
        assert registers <= cost.roles[0].registers


@each(ALL)
def test_cubin_holds_every_product_that_was_lowered(kernel, artifact, needs_nvdisasm):
    ir, made = artifact.report["ir"], artifact.report["instructions"]
    heads = kernel.spec.problem.group_size if kernel.template == GRADIENTS else 1  # in a loop that stays one
    assert made["hgmma"] * heads == ir["wgmma"]
    if not ir["helpers"]:
        assert made["hmma"] <= ir["mma"]  # serial loops of the IR may stay loops
        assert bool(made["hmma"]) == bool(ir["mma"])
    if kernel.template == FORWARD:
        assert made["hgmma"] > 0 and made["hmma"] == 0
    assert (made["stl"] > 0) == (artifact.report["local_bytes"] > 0)


@each([k for k in ALL if k.template in (FORWARD, INVERSE)])
def test_no_wait_for_products_was_serialised(kernel, artifact, needs_nvdisasm):
    """`wait_wgmma(1)` must stay `DEPBAR 1`: ptxas may turn it into 0, which is right but twice as slow."""
    assert artifact.report["instructions"]["waits"] == artifact.report["ir"]["waits"]


@each(HOPPER)
def test_live_registers_of_every_role_are_measured_and_within_its_limit(kernel, artifact, needs_nvdisasm):
    roles = artifact.report["role_registers"]
    assert set(roles) == {r.name for r in declared(kernel).roles}
    for name, row in roles.items():
        assert row["live"] is not None and 8 <= row["live"] <= row["limit"], f"{name}: {row}"
    assert artifact.report["cubin_source"] == "nvdisasm -plr"


@each([k for k in ALL if k.template == FORWARD or k.template == "fused_forward_mma"])
def test_forward_flops_and_tile_bytes_are_what_was_declared(kernel, artifact):
    problem, schedule = kernel.spec.problem, kernel.spec.schedule
    work, chunk = declared(kernel).work, artifact.report["ir"]["per_chunk"]
    split = schedule["dv_split"]
    assert chunk["flops"] * split == work.flops
    c, dk, dv = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    read = chunk["tma_bytes_read"] + chunk["plain_bytes_read"]
    shared_by_group = 2 * 2 * c * dk * split * (problem.group_size - 1) // problem.group_size
    gates = 0 if chunk["tma_bytes_read"] == 0 else 4 * c  # read in a helper, which the IR only names
    assert 0 <= (read + gates) * split - shared_by_group - work.bytes_read <= CHECKPOINT_ROW_BYTES * split
    state = dv // split * dk * (4 if problem.state_dtype == "float32" else 2)
    checkpoint = state if chunk["tma_bytes_read"] == 0 else 0  # where one is due; a helper of the other template has it
    written = chunk["tma_bytes_written"] + chunk["plain_bytes_written"] - checkpoint
    assert written * split == work.bytes_written == 2 * c * dv


@each([k for k in ALL if k.template.startswith("kkt_inverse")])
def test_inverse_flops_and_bytes_are_what_was_declared(kernel, artifact):
    problem = kernel.spec.problem
    work, chunk = declared(kernel).work, artifact.report["ir"]["per_chunk"]
    c, dk = problem.chunk_size, problem.head_dim_k
    assert chunk["flops"] == 2 * c * c * dk
    if kernel.template == INVERSE:  # the merges of the blocks are in a helper, which the IR only names
        heads = kernel.spec.schedule["value_heads_per_cta"]
        merges = 4 * (2 * 2 * 8**3) + 2 * (2 * 2 * 16**3) + 2 * 2 * 32**3
        assert work.flops == chunk["flops"] // heads + merges
        assert any("invert" in name for name in artifact.report["ir"]["helpers"])
        beta_and_gates = 2 * 4 * c
        assert work.bytes_read == chunk["tma_bytes_read"] // heads + beta_and_gates
        assert 0 <= chunk["plain_bytes_read"] - heads * beta_and_gates <= SEARCH_BYTES
    else:
        assert work.flops == chunk["flops"]
        assert 0 <= chunk["plain_bytes_read"] - work.bytes_read <= SEARCH_BYTES
        assert work.bytes_written == chunk["plain_bytes_written"]


@each([k for k in ALL if k.template == GRADIENTS])
def test_gradients_of_a_chunk_cost_what_was_declared_for_each_value_head(kernel, artifact):
    problem, work = kernel.spec.problem, declared(kernel).work
    chunk, heads = artifact.report["ir"]["per_chunk"], problem.group_size
    assert chunk["flops"] == work.flops * heads
    beta_and_gates = 2 * 4 * problem.chunk_size  # read in a helper
    assert chunk["tma_bytes_read"] == (work.bytes_read - beta_and_gates) * heads
    assert chunk["tma_bytes_written"] == chunk["plain_bytes_read"] == 0


@each([k for k in ALL if k.template == GRADIENTS])
def test_gradients_products_were_not_serialised(kernel, artifact, needs_nvdisasm):
    """Products that may stay in flight while the one before is used; serialised, each would be waited for."""
    made, ir = (dict(map(tuple, artifact.report[name]["waits"])) for name in ("instructions", "ir"))
    assert made[1] == ir[1]
    assert sum(made.values()) < artifact.report["instructions"]["hgmma"] // 4


@each([k for k in ALL if k.template == "input_activation"])
def test_activation_bytes_are_what_was_declared(kernel, artifact):
    """A CTA has `rows` rows of q and of k, and the gates of their value heads, each of which is 1/64 of a chunk's."""
    problem, schedule = kernel.spec.problem, kernel.spec.schedule
    work, chunk = declared(kernel).work, artifact.report["ir"]["per_chunk"]
    value_rows = schedule["rows"] * problem.group_size
    parameters = chunk["plain_bytes_read"] - work.bytes_read * value_rows // problem.chunk_size
    assert 0 < parameters <= 2 * (4 + 2) * value_rows
    twice = chunk["plain_bytes_written"] - work.bytes_written * value_rows // problem.chunk_size
    assert twice in (0, 4 * value_rows)  # g is stored in one of two branches
    assert artifact.report["spill_bytes"] == artifact.report["smem_bytes"] == 0


def test_hopper_dims_are_all_tested():
    assert {(k.config.head_dim_k, k.config.head_dim_v) for k in HOPPER if k.template == FORWARD} == set(DIMS)
    assert all(is_feasible(k.spec.problem, k.spec.schedule) for k in ALL)
    assert config("sm90").group_size > 1  # bytes shared by a group must show
