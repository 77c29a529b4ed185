"""One Dynamo graph of a model, dynamic in its declared dimensions, with every input's source.

The model is not executed: Dynamo runs it on fake tensors. Each placeholder is bound to its source
(a weight by qualified name, an argument by path, a size by input and dimension). The structure of
the result is found by running Dynamo's bytecode with a stand-in for each output.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ...errors import (
    FakeMissing,
    HostRead,
    InputNotTraceable,
    NothingToCompile,
    ReturnedUnread,
    ReturnsShape,
    ReturnsWeight,
    StateChanged,
    TraceFailed,
    TransformInForward,
)
from ...events import Events
from ...torch_compat.basics.symbolic import (
    Symbolic,
    expression_of,
    shape_guards,
    sizes_by_source,
)
from ...torch_compat.basics.tensors import is_transformed
from ...torch_compat.tracing.dynamo import (
    Captured,
    StateChange,
    capture_full_graph,
    dynamo_tracing,
    import_dynamo,
    input_source,
    unsupported_op,
    user_location,
)
from ..conditions.conditions import Conditions
from ..conditions.from_dynamo import record_conditions
from ..conditions.locator import Locator, Unlocatable
from ..conditions.places import Place
from ..ir.compilation import CompileRequest
from ..ir.locations import first_line, node_location
from ..ir.serialization import Ref, with_refs
from ..speedups import capture
from .examples import Examples, Leaf, example_inputs, mark
from .inline_regions import inline_opaque_values, inline_regions
from .splitting import is_splitting

NUMPY_NUMBER = (
    "torch.compile reads a number of numpy at each call, which no graph does: make it a number of "
    "Python outside of the forward, as with item(). "
)


@dataclass(frozen=True)
class Trace:
    """A traced model. `sources` has the source of each placeholder."""

    graph: GraphModule
    shape_env: Any
    sources: dict[Node, Leaf | str | Place | None]
    """An argument, the qualified name of a weight, the place of a tensor that is neither, or None
    for a size."""
    tensors: dict[Node, torch.Tensor]
    """The tensor of each placeholder in the trace."""
    structure: Any
    """The result, with `Ref('o<n>')` for the n-th output and `Ref('L.<label>')` for arguments."""
    examples: Examples
    conditions: Conditions
    """What outside the graph it relied on."""

    def outputs(self) -> list[Any]:
        """What the graph returns, flat."""
        results: Any = self.graph.graph.output_node().args[0]
        return list(results)

    def symbol_of(self, value: Any) -> sympy.Expr:
        """A number as an expression over the symbols that remain after Dynamo's equalities."""
        if isinstance(value, Symbolic):
            return expression_of(value)
        return sympy.Integer(value)


def trace(request: CompileRequest) -> Trace:
    """Trace the model's forward.

    Raises TraceFailed with the user's file:line on a graph break or a data-dependent branch,
    InputNotTraceable for a tensor that no path leads to, and the errors of `example_inputs`.
    """
    model, config, events = request.model, request.config, request.events
    with events.span("import dynamo", level=logging.INFO):
        import_dynamo()
    examples = example_inputs(model, config, request.device, request.examples)
    mark(examples, config)
    args, kwargs = examples.call_arguments()
    dynamo = events.span("trace.dynamo", level=logging.INFO)
    with dynamo, dynamo_tracing(config.code.dynamic_shapes.value):
        try:
            captured = (
                capture(model, args, kwargs, events)
                if request.copies_layers
                else capture_full_graph(model, args, kwargs)
            )
        except Exception as error:  # Dynamo also raises many exceptions other than its own
            where = user_location(error)
            if op := unsupported_op(error):
                raise FakeMissing(where=where, op=op) from error
            raise TraceFailed(where=where, reason=_reason(error)) from error
    if captured is None:
        raise NothingToCompile(model=type(model).__name__)
    events.count("dynamo_traces")
    graph = captured.graph
    inline_regions(graph)
    inline_opaque_values(graph)
    _check_host_reads(graph)
    _check_transforms(graph)
    _check_state(captured, events)
    locator = Locator(model, captured)
    sources, tensors = _sources(captured, model, examples, locator)
    with events.span("conditions", level=logging.INFO):
        conditions = record_conditions(model, captured, locator, is_splitting(config))
    structure, returned = _structure(captured, model, examples)
    sizes = _sizes_alone(captured, sources, examples)
    for leaf in [each for each in examples.leaves() if each.label in sizes] + returned:
        if leaf not in sources.values():
            node = _add_input(captured, leaf, sources, examples, sizes.get(leaf.label, {}))
            sources[node], tensors[node] = leaf, leaf.value
    return Trace(
        graph=graph,
        shape_env=captured.fake_mode.shape_env,
        sources=sources,
        tensors=tensors,
        structure=structure,
        examples=examples,
        conditions=conditions,
    )


def _check_host_reads(graph: GraphModule) -> None:
    """Raise HostRead for a node that needs a tensor's value: no CUDA graph can hold it."""
    for node in graph.graph.find_nodes(op="call_method", target="item"):
        raise HostRead(where=node_location(node), op="item()")


def _check_transforms(graph: GraphModule) -> None:
    """Raise TransformInForward: what a transformed function writes to cannot be found."""
    for node in graph.graph.nodes:
        if is_transformed(node.meta.get("example_value")):
            raise TransformInForward(where=node_location(node))


def _check_state(captured: Captured, events: Events) -> None:
    """Warn of each change of a Python object, which no step makes.

    Raises StateChanged where the trace also reads it and tensors are kept in it: a step would need
    those of the step before.
    """
    read = {
        f"{guard.expression}.{guard.argument}" if guard.kind == "HASATTR" else guard.expression
        for guard in captured.guards
        if guard.kind != "TYPE_MATCH"
    }
    read |= set(map(input_source, captured.graph.graph.find_nodes(op="placeholder")))
    for change in captured.changes:
        name, owner = _changed_name(change), change.expression
        ends = f".{change.attribute}", f"['{change.attribute}']"
        is_read = any(
            each.startswith(owner) if change.attribute is None
            else owner in each and each.endswith(ends)
            for each in read
        )  # fmt: skip
        if is_read and change.tensors:
            raise StateChanged(where=change.where, name=name)
        events.emit("effect_dropped", level=logging.WARNING, changed=name, where=change.where)


def _changed_name(change: StateChange) -> str:
    """`L['self']._modules['proj'].scores` as the user writes it: `self.proj.scores`."""
    owner = re.sub(r"[LG]\['(\w+)'\]", r"\1", change.expression)
    kinds = r"(?:\.__dict__\['_(?:modules|buffers|parameters)'\]|\._(?:modules|buffers|parameters))"
    owner = re.sub(kinds + r"(?:\['(\w+)'\])?", lambda m: f".{m[1]}" if m[1] else "", owner)
    return owner if change.attribute in (None, owner) else f"{owner}.{change.attribute}"


def _reason(error: BaseException) -> str:
    """Dynamo's message: its first line, the explanation and the context where it gives them."""
    first = first_line(error).removeprefix("Consider annotating your code using torch._check*(). ")
    if "data-dependent expression" in first:
        first = f"a branch, an index or a size depends on a tensor's value. {first}"
    lines = [line.strip() for line in str(error).splitlines()]
    labels = ("Explanation: ", "Developer debug context: ")
    said = [
        line.removeprefix(label) for line in lines for label in labels if line.startswith(label)
    ]
    return ". ".join(part.rstrip(".") for part in [first, *said])


def _sources(
    captured: Captured, model: torch.nn.Module, examples: Examples, locator: Locator
) -> tuple[dict[Node, Leaf | str | Place | None], dict[Node, torch.Tensor]]:
    """Evaluate each placeholder's source expression and identify the resulting object."""
    weights = _weight_names(model)
    arguments = {id(leaf.value): leaf for leaf in examples.leaves()}
    sources: dict[Node, Leaf | str | Place | None] = {}
    tensors: dict[Node, torch.Tensor] = {}
    for node in captured.graph.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["example_value"], torch.SymInt):
            sources[node] = None
            continue
        expression = input_source(node)
        remedy = NUMPY_NUMBER if expression.startswith("___from_numpy") else ""
        where = next(filter(None, map(node_location, node.users)), None)
        try:
            value = _value_of(expression, captured)
            leaf = arguments.get(id(value))
            source = leaf or _place(expression, weights.get(id(value)), locator)
        except Exception as error:
            raise InputNotTraceable(where=where, source=expression, remedy=remedy) from error
        sources[node], tensors[node] = source, value
    return sources, tensors


def _value_of(expression: str, captured: Captured) -> Any:
    arguments_of_forward = {**captured.closure, **captured.local_scope}
    scope = {"L": arguments_of_forward, "G": captured.global_scope}
    return eval(expression, {"___from_numpy": torch.as_tensor}, scope)


def _weight_names(model: torch.nn.Module) -> dict[int, str]:
    """Qualified names of parameters and buffers by identity; of several the first."""
    return {
        id(tensor): name
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in reversed(list(named(remove_duplicate=False)))
    }


def _place(expression: str, weight: str | None, locator: Locator) -> str | Place:
    """Where steps find a tensor: by the path that the trace took, which for most is a weight's.

    A list may hold a tensor that is also a parameter: if the parameter is replaced, the model goes
    on to read the tensor of the list.
    """
    try:
        place = locator.place(expression)
    except Unlocatable:
        if weight is None:
            raise
        return weight
    return place if weight is None or not locator.is_registered(place) else weight


def _stand_in(output: Any, index: int) -> Any:
    """For an integer a number that nothing else is, and for a float, which Dynamo's bytecode reads
    from a tensor, one of such a number."""
    number = 2**60 + 2**10 * index  # no tensor is as large, and floats have no number between
    if isinstance(output, Node) and isinstance(output.meta["example_value"], torch.SymInt):
        return number
    if isinstance(output, Node) and output.target is torch.scalar_tensor:
        return torch.tensor(number, dtype=torch.float64, device="cpu")
    return torch.empty(0, device="meta")


def _structure(
    captured: Captured, model: torch.nn.Module, examples: Examples
) -> tuple[Any, list[Leaf]]:
    """Run the bytecode that surrounds the graph, with one stand-in per graph output. Returns the
    result, and the arguments that are in it. Outputs that are read as floats become floats.
    """
    outputs: Any = captured.graph.graph.output_node().args[0]
    stand_ins = [_stand_in(output, i) for i, output in enumerate(outputs)]
    numbers: dict[float, int] = {
        int(n): i for i, n in enumerate(stand_ins) if type(n) is int or n.numel()
    }
    floats = set[Node]()
    args, kwargs = examples.call_arguments()
    result = captured.call(lambda *_: tuple(stand_ins))(*args, **kwargs)
    references = {id(value): Ref(f"o{i}") for i, value in enumerate(stand_ins)}
    dynamic = {examples.size_of(label) for label in examples.symbols.values()}
    arguments = {
        id(leaf.value): leaf
        for leaf in reversed(examples.leaves())
        if isinstance(leaf.value, torch.Tensor)
    }
    weights = _weight_names(model)
    returned: dict[str, Leaf] = {}

    def ref(value: Any) -> Ref | None:
        if type(value) in (int, float) and value in numbers:
            if type(value) is float:
                floats.add(outputs[numbers[value]])
            return Ref(f"o{numbers[value]}")
        if isinstance(value, torch.Size) and not dynamic.isdisjoint(value):
            raise ReturnsShape(sizes=tuple(value))  # read from the example, not by the graph
        if (leaf := arguments.get(id(value))) is not None:
            returned[leaf.label] = leaf
            return Ref(f"L.{leaf.label}")
        if isinstance(value, torch.Tensor) and id(value) not in references:
            weight = weights.get(id(value))
            other = f"a tensor of shape {list(value.shape)}, such as x.real"
            raise ReturnsWeight(name=f"its weight or buffer {weight!r}" if weight else other)
        return references.get(id(value))

    structure = with_refs(result, ref)
    for node in floats:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        captured.graph.graph.erase_node(node)
    return structure, list(returned.values())


def _sizes_alone(
    captured: Captured, sources: Mapping[Node, Leaf | str | Place | None], examples: Examples
) -> dict[str, dict[int, torch.SymInt]]:
    """By argument and dimension the sizes of arguments of which Dynamo made no inputs of the graph,
    but of one of their sizes, or a guard: nothing else of them is read."""
    shapes = [node.meta["example_value"].shape for node, leaf in sources.items() if leaf]
    known = {expression_of(size) for shape in shapes for size in shape if not isinstance(size, int)}
    found: dict[str, dict[int, torch.SymInt]] = {}
    labels = {id(leaf.value): leaf.label for leaf in examples.leaves()}
    alone = [node for node, source in sources.items() if source is None]
    inputs = [(input_source(node), node.meta["example_value"]) for node in alone]
    env = captured.fake_mode.shape_env
    asked = {expression_of(size) for _, size in inputs}
    asked |= {symbol for guard, _ in shape_guards(env) for symbol in guard.free_symbols}
    read = set[str]()
    for expression, size in (*inputs, *sizes_by_source(env)):
        place = re.fullmatch(r"(.+)\.size\(\)\[(\d+)\]", expression)
        if place is None or expression_of(size) in known:
            continue
        if label := labels.get(id(_value_of(place[1], captured))):
            found.setdefault(label, {}).setdefault(int(place[2]), size)
            read |= {label} if expression_of(size) in asked else set()
    return {label: sizes for label, sizes in found.items() if label in read}


def _add_input(
    captured: Captured,
    leaf: Leaf,
    sources: Mapping[Node, Leaf | str | Place | None],
    examples: Examples,
    own: Mapping[int, torch.SymInt],
) -> Node:
    """Add an argument that is only returned or asked for its sizes, of which Dynamo makes no input,
    to the graph. `own` are the sizes it was asked for.

    Raises ReturnedUnread if no other argument has one of its other dynamic sizes.
    """
    sizes = {
        examples.symbols.get((source.label, dim)): size
        for node, source in sources.items()
        if isinstance(source, Leaf)
        for dim, size in enumerate(node.meta["example_value"].shape)
    }
    value, shape = leaf.value, list(leaf.value.shape)
    for dim in range(value.dim()):
        if (symbol := examples.symbols.get((leaf.label, dim))) is not None:
            if dim not in own and symbol not in sizes:
                raise ReturnedUnread(name=leaf.label, dim=dim)
            shape[dim] = own.get(dim, sizes.get(symbol))
    graph = captured.graph.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        node = graph.placeholder(re.sub(r"\W+", "_", f"returned_{leaf.label}"))
    form = {"dtype": value.dtype, "device": value.device}
    with captured.fake_mode:
        if all(type(size) is int for size in shape):
            fake = torch.empty_strided(shape, value.stride(), **form)
        else:
            fake = torch.empty(shape, **form)  # inputs of dynamic size are contiguous
    node.meta["example_value"] = fake
    return node
