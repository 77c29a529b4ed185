"""Build the plan: name every value of a traced and split graph, and list the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ...errors import NotPortable, UnboundSymbol
from ...torch_compat.basics.ops import overload_name, overload_of
from ...torch_compat.basics.symbolic import Symbolic, original_symbol, python_text
from ..conditions.places import Place
from ..guards.prover import Guard
from ..ir.config import TOKENS, CompileConfig
from ..ir.locations import graph_source, node_location, short_location
from ..ir.plan import (
    CallStep,
    CompiledRange,
    Form,
    GuardCheck,
    GuardRecord,
    PieceStep,
    Plan,
    PlanPiece,
    Result,
    SizeUse,
    Symbol,
    UserInput,
    Weight,
    names_printed,
)
from ..ir.serialization import Expr, Ref, dtype_name, encode, encode_result, source
from ..pieces.contexts import AUTOCAST
from ..pieces.piece import BaseSymbols, Piece, size_positions, unwritten_results
from ..pieces.split import Section, takes_element
from ..trace.dynamo import Trace
from ..trace.examples import Leaf
from ..trace.mutations import written_placeholders
from ..trace.size_uses import uses_in_trace
from ..trace.symbols import argument_sizes, dims_of, follows_calls, sizes_of, symbol_labels


def base_symbols(trace: Trace) -> BaseSymbols:
    """A SymInt for each symbol that is the size of a dimension of an argument.

    Inductor names a size that a piece is given by the symbol that it was made with. Of sizes that
    are equal only one has the symbol that remains, which all code is in.
    """
    symbols: BaseSymbols = {}
    for _, _, size in argument_sizes(trace):
        expression = trace.symbol_of(size)
        if expression.is_Symbol and (
            expression not in symbols or original_symbol(size) == expression
        ):
            symbols[expression] = size
    return symbols


class PlanBuilder:
    """Names values while steps are added; `plan()` returns the result."""

    def __init__(self, trace: Trace, config: CompileConfig) -> None:
        self._trace = trace
        self._config = config
        self._names: dict[Node, str] = {}
        self._inputs: list[UserInput] = []
        self._weights: list[Weight] = []
        self._symbols = self._named_symbols()
        self._counter = 0
        self._steps: list[PieceStep | CallStep] = []
        self._shapes: dict[str, str] = {}
        self.written = written_placeholders(trace)
        """Placeholders of arguments and weights that some node writes to."""
        self.sizes = sizes_of(trace)
        for node, origin in trace.sources.items():
            if origin is not None:
                self._names[node] = self._bind(node, origin)

    def piece(self, index: int, piece: Piece) -> None:
        """Add a step that calls unique piece `index`."""
        args = tuple(
            self._names[key] if isinstance(key, Node) else self._symbols[key].name
            for key in piece.inputs
        )
        outs = tuple(self._fresh(node) for node in piece.outputs)
        self._steps.append(PieceStep(piece=index, args=args, outs=outs))

    def calls(self, section: Section) -> None:
        """Add one step for each splitting op of a section."""
        inside = set(section.nodes)
        for node in section.nodes:
            if takes_element(node):
                continue
            elements = [u for u in node.users if u in inside and takes_element(u)]
            self._steps.append(self._call(node, elements))

    def plan(
        self,
        unique: Sequence[tuple[str, Piece]],
        ranges: Sequence[CompiledRange],
        unproved: Sequence[Guard],
        records: Sequence[GuardRecord],
    ) -> Plan:
        outputs = self._trace.outputs()
        return Plan(
            inputs=tuple(self._inputs),
            constants=self._trace.examples.constants(),
            containers=self._trace.examples.containers({each.path for each in self._inputs}),
            weights=tuple(self._weights),
            symbols=tuple(self._symbols.values()),
            pieces=tuple(
                PlanPiece(
                    digest=digest,
                    nodes=len(piece.graph.nodes),
                    sizes=size_positions(piece.graph),
                    unwritten=unwritten_results(piece.graph),
                    text=graph_source(piece.module(self._trace.graph)),
                )
                for digest, piece in unique
            ),
            ranges=tuple(ranges),
            steps=tuple(self._steps),
            results=tuple(self._result(value) for value in outputs),
            structure=encode_result(self._trace.structure),
            checks=tuple(
                GuardCheck(
                    expression=python_text(guard.expression), where=short_location(guard.where)
                )
                for guard in unproved
            ),
            parameters=tuple(self._trace.examples.signature.parameters),
            shapes=self._shapes,
            guards=tuple(records),
            cut_at=self._config.code.cut_at,
            size_uses=self._size_uses(),
        )

    def _size_uses(self) -> tuple[SizeUse, ...]:
        labels = {s: symbol.label for s, symbol in self._symbols.items()}
        splitting = [step.op for step in self._steps if isinstance(step, CallStep)]
        return uses_in_trace(self._trace.graph.graph, labels, splitting)

    def _named_symbols(self) -> dict[sympy.Symbol, Symbol]:
        """The base symbols: the token count first, the others in the order of the arguments."""
        labels = symbol_labels(self._trace)
        arguments = [n for n, source in self._trace.sources.items() if isinstance(source, Leaf)]
        dimensions: dict[sympy.Symbol, tuple[int, int]] = {}
        for position, node in enumerate(arguments):
            for dim, size in dims_of(node.meta["example_value"]):
                symbol = self._trace.symbol_of(size)
                if symbol.is_Symbol:
                    dimensions.setdefault(symbol, (position, dim))
        declared = list(dict.fromkeys([TOKENS, *self._trace.examples.symbols.values()]))
        named: dict[sympy.Symbol, Symbol] = {}
        for symbol in sorted(dimensions, key=lambda s: declared.index(labels[s])):
            position, dim = dimensions[symbol]
            low, high = self._config.limits(labels[symbol])
            named[symbol] = Symbol(
                name=f"s{len(named)}",
                label=labels[symbol],
                source=f"i{position}",
                dim=dim,
                low=low,
                high=high,
            )
        return named

    def _bind(self, node: Node, source: Leaf | str | Place) -> str:
        value: Any = node.meta["example_value"]
        if not isinstance(value, torch.Tensor):
            name = f"i{len(self._inputs)}"
            number = UserInput(name=name, path=(node.name,), dtype="int64", device="cpu", shape=())
            self._inputs.append(number)
            return name
        dtype = dtype_name(value.dtype)
        if not isinstance(source, Leaf):
            name = f"w{len(self._weights)}"
            self._weights.append(
                Weight(
                    name=name,
                    target=source.name if isinstance(source, Place) else source,
                    dtype=dtype,
                    shape=tuple(value.shape),
                    stride=tuple(value.stride()),
                    written=node in self.written,
                    place=(source.root, list(source.steps)) if isinstance(source, Place) else None,
                )
            )
            return name
        name = f"i{len(self._inputs)}"
        shape = tuple(self._size(size) for size in value.shape)
        self._inputs.append(
            UserInput(
                name=name,
                path=source.path,
                dtype=dtype,
                device=str(value.device),
                shape=shape,
                written=node in self.written,
                stride=_stride(value),
            )
        )
        return name

    def _fresh(self, node: Node) -> str:
        self._names[node] = f"t{self._counter}"
        self._counter += 1
        self._shapes[self._names[node]] = self._form(node.meta.get("example_value"))
        return self._names[node]

    def _form(self, value: Any) -> str:
        """Dtype and shape as text, with labels for dynamic sizes."""
        if not isinstance(value, torch.Tensor):
            return type(value).__name__
        labels = {s: sympy.Symbol(symbol.label) for s, symbol in self._symbols.items()}
        sizes = (self._trace.symbol_of(size).xreplace(labels) for size in value.shape)
        return f"{dtype_name(value.dtype)}[{', '.join(map(str, sizes))}]"

    def _call(self, node: Node, elements: list[Node]) -> CallStep:
        op = overload_of(node)
        if elements:
            taken = {int(e.args[1]): self._fresh(e) for e in elements}  # type: ignore[arg-type]
            values = node.meta["example_value"]
            outs: tuple[str | None, ...] = tuple(taken.get(i) for i in range(len(values)))
        else:
            values = [node.meta.get("example_value")]
            outs = (self._fresh(node),) if node.users else ()
        return CallStep(
            op=overload_name(op),
            args=[encode(self._argument(arg)) for arg in node.args],
            kwargs={key: encode(self._argument(arg)) for key, arg in node.kwargs.items()},
            outs=outs,
            unpack=bool(elements),
            forms=tuple(
                self._told(value) if out else None for out, value in zip(outs, values, strict=False)
            ),
            autocast=encode(node.meta.get(AUTOCAST)),
        )

    def _told(self, value: Any) -> Form | None:
        """The form of a result in the trace."""
        if not isinstance(value, torch.Tensor):
            return None
        try:
            shape, stride = (tuple(map(self._size, of)) for of in (value.shape, value.stride()))
        except UnboundSymbol:
            return None
        return Form(dtype=dtype_name(value.dtype), shape=shape, stride=stride)

    def _argument(self, value: Any) -> Any:
        match value:
            case Node() if value not in self._names and value in self.sizes:
                return self._number(value)
            case Node():
                return Ref(self._names[value])
            case slice():
                return slice(*map(self._argument, (value.start, value.stop, value.step)))
            case tuple() | list():
                return type(value)(self._argument(item) for item in value)
            case dict():
                return {key: self._argument(item) for key, item in value.items()}
        return value

    def _number(self, node: Node) -> Any:
        """A number or a torch.Size, or its text over the plan's symbols."""
        value, where = node.meta["example_value"], node_location(node)
        if isinstance(value, torch.Size):
            return tuple(self._value(size, where) for size in value)
        if follows_calls(node, self.sizes):
            return Expr(_call_source(node, *map_arg((node.args, node.kwargs), self._number)))
        return self._value(value, where)

    def _value(self, value: Any, where: str | None) -> Any:
        number = self._size(value, where) if isinstance(value, Symbolic) else value
        return Expr(number) if isinstance(number, str) else number

    def _size(self, size: int | Symbolic, where: str | None = None) -> int | str:
        """A size as a number or as Python text over the plan's symbols."""
        expression = self._trace.symbol_of(size)
        if expression.is_Integer:
            return int(expression)
        for symbol in expression.free_symbols:
            if symbol not in self._symbols:
                raise UnboundSymbol(where=where, expression=expression)
        names = {s: sympy.Symbol(self._symbols[s].name, integer=True) for s in self._symbols}
        return python_text(expression.xreplace(names))

    def _result(self, value: Any) -> Result:
        tensor = value.meta["example_value"] if isinstance(value, Node) else None
        if isinstance(tensor, torch.Tensor):
            return Result(
                name=self._names[value],
                dtype=dtype_name(tensor.dtype),
                shape=tuple(self._size(size, node_location(value)) for size in tensor.shape),
            )
        number = self._number(value) if isinstance(value, Node) else value
        return Result(name=str(number), dtype=None, shape=())


def _call_source(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The call of a node of numbers as Python text; raises NotPortable for a function that the text
    cannot name."""
    constants: dict[str, Any] = {}
    arguments = [source(arg, constants) for arg in args]
    arguments += [f"{name}={source(arg, constants)}" for name, arg in kwargs.items()]
    module = str(getattr(node.target, "__module__", "")).removeprefix("_")
    name = getattr(node.target, "__name__", "")
    if node.op == "call_method":
        call = f"({arguments.pop(0)}).{node.target}"
    elif getattr(names_printed().get(module), name, None) is node.target and not constants:
        call = f"{module}.{name}"
    else:
        raise NotPortable(where=node_location(node), value=f"a number of {name}()", kind="number")
    return f"{call}({', '.join(arguments)})"


def _stride(value: torch.Tensor) -> tuple[int, ...]:
    """Strides of an input of fixed shape; empty if contiguous, as inputs of dynamic size are.

    To ask a tensor of dynamic size whether it is contiguous would add a guard on the size.
    """
    fixed = all(isinstance(size, int) for size in value.shape)
    return tuple(value.stride()) if fixed and not value.is_contiguous() else ()
