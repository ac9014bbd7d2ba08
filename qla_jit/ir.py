"""What the lowered TVM IR of a kernel says it costs, counted before nvcc sees it.

`count` walks the one device function of `build.lower`'s module (6 ms).  Threads, shared memory and registers are read
where the IR states them; products and copies are the calls that survive lowering (`ptx_wgmma_*`, `ptx_mma`, `tma_load`,
`tma_store`, loads and stores of device memory) times static trip counts times the warps that run them.

The loop over chunks is the one whose extent is a run-time value: `per_chunk` is one iteration of it, by the whole CTA.
A kernel without such a loop handles one chunk per CTA, and `per_chunk` is all of it.  What C++ helpers do
(`call_extern`) is in the CUDA text only: they are named in `helpers`, and what they cost is not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, replace

from .errors import ToolError

WARP, WARP_GROUP = 32, 128
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


@dataclass(frozen=True)
class Traffic:
    """Tensor FLOPs, and bytes between device memory and the CTA.

    tma_*: bulk copies, exact.  plain_*: ordinary loads and stores, an upper bound: predicates are taken as true, equal
    loads of one loop body count once, and so does a load whose address is the same in all threads.
    """

    flops: int = 0
    tma_bytes_read: int = 0
    tma_bytes_written: int = 0
    plain_bytes_read: int = 0
    plain_bytes_written: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class RegisterLimit:
    """A `setmaxnreg`: the threads ``[first, end)`` that run it and the registers per thread they then own."""

    first: int
    end: int
    registers: int


@dataclass(frozen=True)
class IrCounts:
    """Costs of one CTA.

    smem_bytes, static_smem_bytes: dynamic and static shared memory (the static part includes mbarriers, 8 B each).
    wgmma, mma: instructions of the whole kernel after unrolling, each site once however many warps run it.
    waits: how many ``wait_wgmma(n)`` there are, as (n, count) pairs.  syncs: CTA or named barriers.
    """

    threads: int
    smem_bytes: int
    static_smem_bytes: int
    mbarriers: int
    register_limits: tuple[RegisterLimit, ...]
    wgmma: int
    mma: int
    waits: tuple[tuple[int, int], ...]
    syncs: int
    per_chunk: Traffic
    once: Traffic
    helpers: tuple[str, ...]


def report(device_mod) -> dict:
    """Build-report fields: ``ir``, the counts as plain values, and ``ir_source``: how, or why there are none.

    A TVM whose IR this module does not know must not break a build.
    """
    try:
        return {"ir": asdict(count(device_mod)), "ir_source": "lowered TVM IR"}
    except (ToolError, AttributeError, KeyError, TypeError, ValueError) as error:
        return {"ir": None, "ir_source": f"not counted: {type(error).__name__}: {error}"}


def count(device_mod) -> IrCounts:
    """Counts of a module that lowering returned; ToolError if it does not hold one device function."""
    functions = list(device_mod.functions.values())
    if len(functions) != 1:
        raise ToolError(f"a module must have one device function, but got {len(functions)}; count them apart.")
    attrs = functions[0].attrs
    threads = int(attrs["thread_extent"]["threadIdx.x"])
    walk = _Walk()
    walk.statement(functions[0].body, _Place(0, threads))
    in_loop = walk.loops > 0
    return IrCounts(
        threads=threads,
        smem_bytes=int(attrs.get("dyn_shared_memory_buf", 0)),
        static_smem_bytes=walk.static_bytes,
        mbarriers=walk.mbarriers,
        register_limits=tuple(walk.limits),
        wgmma=walk.sites["wgmma"],
        mma=walk.sites["mma"],
        waits=tuple(sorted(walk.waits.items())),
        syncs=walk.sites["sync"],
        per_chunk=walk.inside if in_loop else walk.outside,
        once=walk.outside if in_loop else Traffic(),
        helpers=tuple(sorted(walk.helpers)),
    )


@dataclass(frozen=True)
class _Place:
    """Where a statement sits: threads ``[first, end)`` reach it, ``trips`` times, in the loop over chunks or not."""

    first: int
    end: int
    trips: int = 1
    in_chunk_loop: bool = False
    body: int = 0  # number of the innermost loop body, within which equal loads count once

    @property
    def threads(self) -> int:
        return self.end - self.first


class _Walk:
    """One pass over a function body, adding to its counters."""

    def __init__(self):
        from tilelang import tvm

        self.tvm, self.tirx = tvm, tvm.tirx
        self.inside, self.outside = Traffic(), Traffic()
        self.sites: Counter[str] = Counter()
        self.waits: Counter[int] = Counter()
        self.limits: list[RegisterLimit] = []
        self.helpers: set[str] = set()
        self.static_bytes = self.mbarriers = self.loops = self.bodies = 0
        self._thread = None
        self._known_trips: dict = {}
        self._seen: set = set()

    def statement(self, node, place: _Place) -> None:
        t = self.tirx
        if isinstance(node, t.SeqStmt):
            for child in node.seq:
                self.statement(child, place)
        elif isinstance(node, t.For):
            self._loop(node, place)
        elif isinstance(node, t.IfThenElse):
            self._branch(node, place)
        elif isinstance(node, t.AttrStmt):
            if node.attr_key == "thread_extent" and node.node.thread_tag == "threadIdx.x":
                self._thread = node.node.var
            self.statement(node.body, place)
        elif isinstance(node, t.AllocBuffer):
            self._allocation(node.buffer)
        elif isinstance(node, t.BufferStore):
            self._expression(node.value, place)
            if node.buffer.scope() == "global":
                self._plain("plain_bytes_written", node, place)
        elif isinstance(node, (t.Evaluate, t.Bind)):
            self._expression(node.value, place)
        elif isinstance(node, t.While):
            self.statement(node.body, place)
        elif not isinstance(node, (t.DeclBuffer, t.AssertStmt)):
            raise ToolError(f"every statement must be known, but got {type(node).__name__}; teach qla_jit.ir.")

    def _loop(self, node, place: _Place) -> None:
        self.bodies += 1
        place = replace(place, body=self.bodies)
        if isinstance(node.extent, self.tirx.IntImm):
            extent = int(node.extent)
            self._known_trips[node.loop_var] = extent
            self.statement(node.body, replace(place, trips=place.trips * extent))
        elif any(self._uses(node.extent, var) for var in self._known_trips):
            bound = max(1, max(n for var, n in self._known_trips.items() if self._uses(node.extent, var)))
            self.statement(node.body, replace(place, trips=place.trips * bound))  # triangular: at most the outer extent
        else:
            self.loops += 1
            self.statement(node.body, replace(place, in_chunk_loop=True))

    def _branch(self, node, place: _Place) -> None:
        self._expression(node.condition, place)
        taken, other = self._split(node.condition, place)
        if taken.threads > 0:
            self.statement(node.then_case, taken)
        if node.else_case is not None and other.threads > 0:
            self.statement(node.else_case, other)

    def _split(self, condition, place: _Place) -> tuple[_Place, _Place]:
        """Threads of the two branches; both are ``place`` unless the condition is a bound on threadIdx.x."""
        t = self.tirx
        if isinstance(condition, t.LT) and self._is_thread(condition.a) and isinstance(condition.b, t.IntImm):
            bound = int(condition.b)
        elif isinstance(condition, t.LE) and self._is_thread(condition.b) and isinstance(condition.a, t.IntImm):
            above, below = self._at(place, int(condition.a))
            return below, above
        else:
            return place, place
        return self._at(place, bound)

    @staticmethod
    def _at(place: _Place, bound: int) -> tuple[_Place, _Place]:
        bound = min(max(bound, place.first), place.end)
        return replace(place, end=bound), replace(place, first=bound)

    def _is_thread(self, node) -> bool:
        return self._thread is not None and node.same_as(self._thread)

    def _uses(self, expression, var) -> bool:
        found: list[bool] = []
        self.tirx.stmt_functor.post_order_visit(expression, lambda node: found.append(node.same_as(var)))
        return any(found)

    def _allocation(self, buffer) -> None:
        scope = buffer.scope()
        if scope in ("shared", "shared.barrier"):
            elements = 1
            for extent in buffer.shape:
                elements *= int(extent)
            self.static_bytes += elements * self._itemsize(buffer.dtype)
            self.mbarriers += elements if scope == "shared.barrier" else 0

    def _expression(self, root, place: _Place) -> None:
        problems: list[ToolError] = []  # raised after the walk: TVM turns what a visitor raises into a RuntimeError

        def visit(node):
            if isinstance(node, self.tirx.Call):
                try:
                    self._call(node, place)
                except ToolError as problem:
                    problems.append(problem)
            elif isinstance(node, self.tirx.BufferLoad) and node.buffer.scope() == "global":
                key = (place.body, place.first, str(node))
                if key not in self._seen:
                    self._seen.add(key)
                    self._plain("plain_bytes_read", node, place)

        self.tirx.stmt_functor.post_order_visit(root, visit)
        if problems:
            raise problems[0]

    def _call(self, node, place: _Place) -> None:
        name = getattr(node.op, "name", "")
        if name.startswith("tl.ptx_wgmma"):
            self.sites["wgmma"] += place.trips
            self._add(place, flops=self._flops(node) * place.trips * (place.threads // WARP_GROUP))
        elif name.endswith("ptx_mma"):
            self.sites["mma"] += place.trips
            self._add(place, flops=self._flops(node) * place.trips * (place.threads // WARP))
        elif name == "tl.tma_load":  # issued by one elected thread, whatever the number of threads that reach it
            self._add(place, tma_bytes_read=self._tile_bytes(node) * place.trips)
        elif name == "tl.tma_store":
            self._add(place, tma_bytes_written=self._tile_bytes(node) * place.trips)
        elif name == "tl.set_max_nreg":
            self.limits.append(RegisterLimit(place.first, place.end, int(node.args[0])))
        elif name == "tl.wait_wgmma":
            self.waits[int(node.args[0])] += 1
        elif name == "tirx.tvm_storage_sync":
            self.sites["sync"] += 1
        elif name == "tl.ptx_cp_async":  # (shared pointer, global pointer, elements, predicate), by every thread
            moved = int(node.args[2]) * self._itemsize(node.args[0].args[0].dtype)
            self._add(place, plain_bytes_read=moved * place.trips * place.threads)
        elif "cp_async" in name and not name.endswith(("commit_group", "wait_group", "commit", "wait")):
            raise ToolError(f"every copy must be counted, but got {name}; teach qla_jit.ir.")
        elif name == "tirx.call_extern":
            self.helpers.add(str(node.args[0].value))

    def _plain(self, field: str, node, place: _Place) -> None:
        lanes = 1
        for index in node.indices:
            lanes *= self.tvm.DataType(str(index.dtype)).lanes
        by_thread = self._thread is not None and any(self._uses(index, self._thread) for index in node.indices)
        accesses = place.trips * (place.threads if by_thread else 1)
        self._add(place, **{field: lanes * self._itemsize(node.buffer.dtype) * accesses})

    def _add(self, place: _Place, **amounts: int) -> None:
        if place.in_chunk_loop:
            self.inside += Traffic(**amounts)
        else:
            self.outside += Traffic(**amounts)

    @staticmethod
    def _flops(node) -> int:
        for argument in node.args:
            match = _SHAPE.fullmatch(str(getattr(argument, "value", "")))
            if match:
                m, n, k = map(int, match.groups())
                return 2 * m * n * k
        raise ToolError(f"a product must carry its shape, but got {node}; teach qla_jit.ir.")

    def _tile_bytes(self, node) -> int:
        """Bytes of the shared tile of a bulk copy: extent of its access pointer × bytes per element."""
        for argument in node.args:
            if isinstance(argument, self.tirx.Call) and argument.op.name == "tirx.tvm_access_ptr":
                return int(argument.args[3]) * self._itemsize(argument.args[0].dtype)
        raise ToolError(f"a bulk copy must name its shared tile, but got {node}; teach qla_jit.ir.")

    def _itemsize(self, dtype) -> int:
        return (self.tvm.DataType(str(dtype)).bits + 7) // 8
