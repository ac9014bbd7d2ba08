"""How a lowered kernel is launched: read from TileLang's host IR, evaluated for the shapes of a call."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import EmulationError

CREATE_TENSOR_MAP = "__tvm_tensormap_create_tiled"
LAUNCH_PARAMETERS = "tirx.kernel_launch_params"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the TileLang function: its shape holds ints and the names of symbols; () for a number."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class HostPlan:
    """What the host code does: parameters of the function, calls that make tensor maps, arguments of the launch.

    Expressions are TVM's; `evaluate` gives their values under a binding of names.  Maps are keyed by TVM variables:
    several may have one name.
    """

    kernel: str
    parameters: tuple[Parameter, ...]
    tensor_maps: dict[object, tuple]
    arguments: tuple
    launch: dict[str, object]

    def bind(self, arguments: dict[str, object]) -> dict[str, object]:
        """Values of all symbols: the given numbers, and the extents of the given tensors.

        Raises EmulationError if an argument is missing, unknown or of the wrong type or shape.
        """
        names = [p.name for p in self.parameters]
        if set(arguments) != set(names):
            raise EmulationError(f"{self.kernel} takes {', '.join(names)}, but got {', '.join(arguments)}.")
        symbols: dict[str, object] = {}
        for parameter in self.parameters:
            value = arguments[parameter.name]
            if not parameter.shape:
                symbols[parameter.name] = value
                continue
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype != parameter.dtype or value.dim() != len(parameter.shape):
                raise EmulationError(
                    f"{parameter.name} must be {parameter.dtype} {parameter.shape}, "
                    f"but is {dtype} {tuple(value.shape)}."
                )
            for want, got in zip(parameter.shape, value.shape):
                want = symbols.setdefault(want, got) if isinstance(want, str) else want
                if want != got:
                    raise EmulationError(f"{parameter.name} must be {parameter.shape}, but is {tuple(value.shape)}.")
        return symbols


def read(function, lowered) -> HostPlan:
    """The plan of a TileLang ``function`` that was lowered to ``lowered``, a `qla_jit.build.Lowered`."""
    from tilelang import tvm

    parameters = []
    for variable in function.params:
        buffer = function.buffer_map.get(variable)
        if buffer is None:
            parameters.append(Parameter(variable.name, str(variable.dtype), ()))
        else:
            shape = tuple(_extent(extent) for extent in buffer.shape)
            parameters.append(Parameter(buffer.name, str(buffer.dtype), shape))

    (kernel, device), *others = lowered.artifact.device_mod.functions.items()
    if others:
        raise EmulationError("a lowered module must hold one kernel.")
    kernel = str(device.attrs["global_symbol"])
    calls = {}

    def visit(node):
        if isinstance(node, tvm.tirx.Call) and node.args and isinstance(node.args[0], tvm.tirx.StringImm):
            calls.setdefault(node.args[0].value, []).append(node.args[1:])

    for host in lowered.artifact.host_mod.functions.values():
        tvm.tirx.stmt_functor.post_order_visit(host.body, visit)
    tensor_maps = {args[0]: tuple(args[1:]) for args in calls.get(CREATE_TENSOR_MAP, [])}
    (values,) = calls[kernel]
    tags = [str(tag) for tag in device.attrs[LAUNCH_PARAMETERS]]
    extents = len([tag for tag in tags if "Idx." in tag or tag.endswith("dyn_shared_memory")])
    count = len(values) - extents
    return HostPlan(kernel, tuple(parameters), tensor_maps, tuple(values[:count]), dict(zip(tags, values[count:])))


def _extent(extent) -> int | str:
    return int(extent) if hasattr(extent, "value") else extent.name


def evaluate(expression, symbols: dict[str, object]) -> int | float:
    """The value of a TVM expression of named symbols."""
    from tilelang import tvm

    binding = {}

    def visit(node):
        if isinstance(node, tvm.tirx.Var):
            if node.name not in symbols:
                raise EmulationError(f"the host code uses {node.name}, whose value is unknown; extend {__name__}.")
            binding[node] = tvm.tirx.const(symbols[node.name], node.dtype)

    if isinstance(expression, int | float):
        return expression
    tvm.tirx.stmt_functor.post_order_visit(expression, visit)
    if binding:
        expression = tvm.tirx.stmt_functor.substitute(expression, binding)
    return tvm.arith.Analyzer().simplify(expression).value
