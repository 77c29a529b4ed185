"""Trace equal modules once: the call of a module copies what an equal one left in the graph.

Dynamo traces each layer of a model, though most are equal. `regions` says when one may be copied.
Guards of the module that was traced hold for each copy: `copied_facts` states them for its place.
"""

from __future__ import annotations

import re
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.utils import get_fake_value, has_torch_function, set_example_value
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
    functions,
    nn_module,
    torch_function,
)
from torch._dynamo.variables.builder import VariableBuilder, handle_traced_output
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.nn_module import (
    UnspecializedBuiltinNNModuleVariable,
    UnspecializedNNModuleVariable,
)
from torch._guards import Source
from torch._library.opaque_object import should_hoist
from torch.fx.experimental import sym_node
from torch.fx.node import map_aggregate

from ...basics.facts import SHARED_CELL, GuardFact
from ...basics.patch import replaced
from .copied_values import CopiedValues, RegionValues, copied_weight
from .passed_values import (
    OPAQUE_CLASS,
    PASSED,
    Names,
    Number,
    PassedConstant,
    PassedObject,
    text,
)
from .region_match import Match
from .regions import (
    Reads,
    Region,
    changes_of,
    form_of,
    form_of_node,
)

_MODULES = (UnspecializedNNModuleVariable, UnspecializedBuiltinNNModuleVariable)
_LAZY_VALUES = "computed_lazy_constant_max_nodes"
_FEWEST_NODES = 3
_MOST_REGIONS = 4
"""How many regions a call is compared with."""


@dataclass
class Copies:
    """What a trace copied, and why it did not copy more."""

    places: list[tuple[str, str]] = field(default_factory=list)
    """Expressions of a module that was traced and of one whose call copied its region, in order."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By class, why the last call that could be compared was traced, unless it was copied."""
    names: Names = field(default_factory=Names)
    """Values of modules in the arguments of nodes."""


@contextmanager
def equal_modules_traced_once() -> Iterator[Copies]:
    """Within one trace, copy regions of equal modules. Torch below 2.13 lacks what it takes."""
    regions = _Regions()
    if not hasattr(Source, "clone"):
        yield regions.copies
        return
    module: Any = UnspecializedNNModuleVariable
    builder: Any = VariableBuilder
    translator: Any = InliningInstructionTranslator
    lazy: Any = LazyVariableTracker
    call_module, build, wrap = module.call_function, builder.__call__, builder._wrap
    create, load = lazy.create, SideEffects.load_attr
    symbolic: Any = sym_node
    to_node = symbolic.to_node
    opener: Any = _owner(UserDefinedObjectVariable, "get_dict_vt")
    open_dict = opener.get_dict_vt
    make, asks = OPAQUE_CLASS.call_function, has_torch_function
    inline = translator.inline_call.__func__

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return regions.call(call_module, self, tx, list(args), kwargs)

    def built(self: Any, value: Any) -> Any:
        variable = build(self, value)
        regions.read(self.source, value, variable)
        return variable

    def created(value: Any, source: Any, *args: Any, **options: Any) -> Any:
        regions.read(source, value, None)
        return create(value, source, *args, **options)

    def wrapped(self: Any, value: Any) -> Any:
        variable = wrap(self, value)
        if regions.active and type(value) in PASSED and type(variable) is ConstantVariable:
            return PassedConstant(value, names=regions.names, source=self.source)
        return variable

    def made(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        for region in regions.active:
            region.makes.add(self.value)
        given = {*map(type, args)} if should_hoist(self.value) and not kwargs else set()
        if PassedConstant not in given or not given <= {PassedConstant, ConstantVariable}:
            return make(self, tx, args, kwargs)
        plain = [each.plain() if type(each) is PassedConstant else each for each in args]
        return PassedObject.of(make(self, tx, plain, kwargs), regions.names)

    def asked(variable: Any) -> bool:
        """Dynamo asks each argument of an operator, which for these is a question of the class."""
        return asks(variable.plain() if type(variable) is PassedObject else variable)

    def inline_call(cls: Any, parent: Any, func: Any, *rest: Any, **kwargs: Any) -> Any:
        for region in regions.active:
            region.functions.add(getattr(func, "fn", func.get_code()))
        return inline(cls, parent, func, *rest, **kwargs)

    def looked(hidden: bool) -> None:
        for region in regions.active:
            region.unseen |= hidden

    def watched(owner: Any, name: str, hides: Callable[..., bool] = lambda *_: True) -> Any:
        """A function of Dynamo that looks into objects without a read."""
        called = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            looked(hides(*args))
            return called(*args, **kwargs)

        return replaced(owner, name, call)

    def get_dict(self: Any, *args: Any) -> Any:
        for region in regions.active:
            region.opened.append(getattr(self, "value", None))
        return open_dict(self, *args)

    def operand(self: Any, value: Any) -> Any:
        return to_node(self, int(value) if type(value) is Number else value)

    def load_attr(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        for region in regions.active:
            region.loads_change |= "Existing" in type(item.mutation_type).__name__
        return load(self, item, *args, **kwargs)

    # from torch 2.14 on a value made of constants does not show that they were looked at
    without_lazy_values = {name: 0 for name in [_LAZY_VALUES] if hasattr(dynamo_config, name)}
    with (
        dynamo_config.patch(without_lazy_values),
        replaced(module, "call_function", call_function),
        replaced(builder, "__call__", built),
        replaced(builder, "_wrap", wrapped),
        replaced(lazy, "create", staticmethod(created)),
        replaced(translator, "inline_call", classmethod(inline_call)),
        replaced(SideEffects, "load_attr", load_attr),
        replaced(symbolic, "to_node", operand),  # of a size and a number
        watched(functions, "invoke_and_store_as_constant"),
        watched(nn_module, "invoke_and_store_as_constant"),
        replaced(opener, "get_dict_vt", get_dict),
        replaced(OPAQUE_CLASS, "call_function", made),
        replaced(torch_function, "has_torch_function", asked),
        watched(BuiltinVariable, "call_isinstance", _runs_instance_check),
        replaced(BuiltinVariable, "call_function_handler_cache", {}),  # has unwatched functions
    ):
        yield regions.copies


def _owner(kind: type, name: str) -> type:
    """The class from which another one has a method."""
    return next(each for each in kind.__mro__ if name in vars(each))


def _runs_instance_check(dynamo: Any, tx: Any, value: Any, kinds: Any) -> bool:
    """Whether `isinstance` runs code of the model, which Dynamo calls instead of tracing it."""
    given = kinds.as_python_constant()
    checks = {
        type(each).__instancecheck__ for each in (given if type(given) is tuple else (given,))
    }
    return not checks <= {type.__instancecheck__, ABCMeta.__instancecheck__}


def copied_facts(
    facts: Iterable[GuardFact], copies: Sequence[tuple[str, str]]
) -> tuple[GuardFact, ...]:
    """`facts`, and those on a traced module also for each module that copied its region."""
    found = {(fact.expression, fact.kind, repr(fact.argument)): fact for fact in facts}
    inside: dict[str, list[GuardFact]] = {}
    """By expression of a module that was traced, the facts that mention it."""
    for original, copied in copies:
        if original not in inside:
            inside[original] = [each for each in found.values() if original in each.expression]
        named = re.compile(re.escape(original) + r"(?!\w)")
        for fact in list(inside[original]):
            expression, argument = named.sub(lambda _: copied, fact.expression), fact.argument  # noqa: B023
            if fact.kind in ("DUPLICATE_INPUT", SHARED_CELL):
                argument, mentions = named.subn(lambda _: copied, argument)  # noqa: B023
                if fact.kind == "DUPLICATE_INPUT" and not mentions:
                    continue  # Dynamo has added its own, if the copy has that object too
            identity = (expression, fact.kind, repr(argument))
            if identity not in found:
                moved = found[identity] = replace(fact, expression=expression, argument=argument)
                for each in [each for each in inside if each in expression]:
                    inside[each].append(moved)
    return tuple(found[each] for each in sorted(found))


class _Regions:
    """All regions of one trace."""

    def __init__(self) -> None:
        self.copies = Copies()
        self.active: list[Region] = []
        self.names = self.copies.names
        self.reads = Reads()
        self._known: dict[Any, list[Region]] = {}
        self._output: Any = None

    def _begin(self, output: Any) -> None:
        """Forget what belongs to another graph: Dynamo may start a trace over."""
        if output is not self._output:
            self._output = output
            names, copies = vars(self.names).values(), self.copies
            for table in (copies.places, copies.reasons, *names, self._known):
                table.clear()
            self.reads.clear()

    def call(
        self,
        original: Callable[..., Any],
        variable: Any,
        tx: Any,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of calling a module: of a copied region, else of Dynamo's trace."""
        self._begin(tx.output)
        module, kind = variable.value, type(variable.value).__qualname__
        is_leaf = type(variable) is not UnspecializedNNModuleVariable and not module._modules
        if type(variable) not in _MODULES or is_leaf or not _plain(variable, tx):
            return original(variable, tx, args, kwargs)
        inputs: list[Any] = []
        forms = [form_of(each, inputs) for each in (*args, *kwargs.values())]
        effects = tx.output.side_effects
        if None in forms or any(map(effects.has_pending_mutation, inputs)):
            return original(variable, tx, args, kwargs)
        known = self._known.setdefault((type(module), (*forms,), (*kwargs,), len(args)), [])
        for region in known:
            match = Match(region, module, variable.source, tx)
            if match.holds():
                for each in module.modules():
                    self.copies.reasons.pop(type(each).__qualname__, None)
                return self._copied(region, match, inputs, tx)
            self.copies.reasons[kind] = f"not as {region.name}: {match.reason}"
        region = Region(module, variable.source, inputs, tx, self.names, self.reads)
        self.active.append(region)
        try:
            result = original(variable, tx, args, kwargs)
        finally:
            self.active.remove(region)
        with suppress(Exception):  # what cannot be examined is not copied
            if len(known) < _MOST_REGIONS and _plain(variable, tx):
                reason = region.end(result)
                if reason is not None:
                    self.copies.reasons[kind] = f"{region.name} {reason}"
                elif len(region.nodes) >= _FEWEST_NODES:
                    region.values = RegionValues(region, tx.fake_mode)
                    known.append(region)
        return result

    def _copied(self, region: Region, match: Match, inputs: list[Any], tx: Any) -> Any:
        """Add the nodes of a region to the graph as Dynamo does; returns the result of the call."""
        graph, tracer = tx.output.graph, tx.output.current_tracer
        variables = dict(zip(region.given, inputs, strict=True))
        new = {node: variable.as_proxy().node for node, variable in variables.items()}
        for node in region.outside:
            if (made := match.made(node)) is not None:
                new[node] = tx.output.synthetic_graph_input(*made).as_proxy().node
                continue
            found = match.placeholder(node)
            new[node] = self._weight(tx, node, *found) if found else node
        for source, value in match.shared:
            VariableBuilder(tx, source)(value)  # adds the guard that both are one object
        for tensor in match.to_mark:
            torch._dynamo.mark_static_address(tensor, guard=False)
        self.copies.places.append((region.name, text(match.source)))

        def leaf(value: Any) -> Any:
            if type(value) in PASSED.values():
                return match.passed(value)
            return new[value] if isinstance(value, torch.fx.Node) else value

        results = region.result if isinstance(region.result, tuple) else (region.result,)
        values, run = CopiedValues(region.values), []
        for node, other in new.items():
            values.pair(node.meta["example_value"], other.meta["example_value"])
        for node in region.nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), leaf)
            made = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            made.meta = {key: node.meta[key] for key in node.meta if key != "example_value"}
            new[node] = made
            if values.are_known(node):
                value = values.copy(node.meta["example_value"])
            else:
                value = get_fake_value(made, tx, allow_non_graph_fake=True)
                values.pair(node.meta.get("example_value"), value)
                run.append(node)
            if node in results:
                proxy = torch.fx.Proxy(made, tracer)
                variables[node] = handle_traced_output(value, tx, proxy, {}, None, TensorVariable)
                tracer.record_proxyable_vt(variables[node])
            elif value is not None:
                set_example_value(made, value)
        values.end()
        if any(form_of_node(node) != form_of_node(new[node]) for node in run):
            raise RuntimeError("an operator has results of another form for another name")
        for active in self.active:
            active.reads += match.reads()
            active.functions |= region.functions
            active.makes |= region.makes
            active.unseen |= region.unseen
            active.opened += match.opened()
        none = ConstantVariable.create(None)
        items = [none if node is None else variables[node] for node in results]
        return TupleVariable(items) if isinstance(region.result, tuple) else items[0]

    def _weight(self, tx: Any, node: torch.fx.Node, source: Any, value: torch.Tensor) -> Any:
        """The placeholder for a weight that stands for that of `node`."""
        variable = copied_weight(tx, node, source, value)
        if variable is None:
            variable = VariableBuilder(tx, source)(value)
        else:
            self.read(source, value, variable)
        return variable.as_proxy().node

    def read(self, source: Any, value: Any, variable: Any) -> None:
        """Note what the trace has read, and the variable that it became, if any."""
        self.reads.add(source, value)
        for region in self.active:
            region.reads.append((source, value, variable))


def _plain(variable: Any, tx: Any) -> bool:
    """Whether a call has a place of its own, in a trace that changes nothing but attributes."""
    return bool(
        variable.source is not None
        and len(tx.output.tracers) == 1
        and not tx.output.export
        and not tx.symbolic_torch_function_state.mode_stack
        and changes_of(tx) is not None
    )
