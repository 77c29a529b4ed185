"""How a model uses its sizes other than as a shape: as a number, and to choose.

Rows of a batch of 5 tokens may be other ones in a batch padded to 8 if the model multiplies by the
number of tokens, or runs other code up to 6. The same is true of other dynamic sizes. A trace
states its choices as guards; a model that is not traced runs once on symbolic sizes for each way
through its Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...torch_compat.basics.ops import (
    is_op,
    overload_name,
    overload_of,
    scalar_and_size_arguments,
)
from ...torch_compat.basics.symbolic import (
    Symbolic,
    expression_of,
    guards_of_run,
    holds_by_intervals,
    number_of_guards,
    python_text,
    symbolic_inputs,
)
from ...torch_compat.basics.tensors import LightDispatchMode, tree_leaves
from ...torch_compat.tracing.dynamo import reasoning_about_sizes
from ..ir.config import TOKENS, DynamicShapes
from ..ir.locations import node_location, short_location, user_line
from ..ir.ops import FakeWrites, tensors_in, written_by
from ..ir.plan import SizeUse
from .examples import Dims

Labels = Mapping[sympy.Symbol, str]

MAX_WAYS = 8
"""Ways through the Python of a model that is not traced, at most; with more it is not padded."""


_HIDING = re.compile(
    r"aten::((clamp|clip|minimum|maximum|fmin|fmax|max|min|amax|amin|argmax|argmin|sort|argsort|topk"
    r"|median|kthvalue|remainder|fmod|floor_divide|floor|ceil|round|trunc|sign|relu|relu6|hardtanh"
    r"|threshold|lt|le|gt|ge|eq|ne|isin|bucketize|searchsorted|bitwise_\w+|logical_\w+)"
    r"(_min|_max)?_?\.\w+|div_?\.\w+_mode)"
)
"""Operators whose result may be the same one for two numbers, by the data."""

_FORMED = re.compile(r"aten::((ones|zeros|full|empty)_like|new_\w+)\.\w+")
"""Those that read of a tensor its form alone."""


class NumberUses(LightDispatchMode):
    """Notes sizes that operators called inside are given as numbers, each with the user's line.

    By the schema of an operator a shape is a SymInt, and a number a Scalar or a Tensor. A Scalar
    that alone gives the result its shape, as the end of `arange`, is a shape as well.

    A number is hidden if it reaches an operator such as a clamp together with data, or a splitting
    op: that two numbers give the same for some inputs says nothing of others. Masks that are made
    of sizes alone hide none: a run sees all of their values.
    """

    sees_inside = True

    def __init__(self, line: Callable[[], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[sympy.Expr, str | None] = {}
        self.hidden: dict[sympy.Expr, str | None] = {}
        self.made: dict[int, tuple[Tensor, frozenset[sympy.Expr], bool]] = {}
        """By identity tensors that are not of data alone: their numbers, and whether of data."""
        self.line = line
        self.is_run = True
        """Whether runs of pieces run what is called, as no splitting op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        numbers, sizes = scalar_and_size_arguments(func, args, kwargs or {})
        read = [*_sizes_of(numbers), *_symbols(sizes)]
        given = frozenset(map(expression_of, _symbolic(numbers)))
        if given and _sizes_of(result) and not read:
            given = frozenset()
        written = written_by(func, args, kwargs or {})
        self._note(func, given, tensors_in((args, kwargs)), [*tensors_in(result), *written])
        return result

    def _note(
        self, op: Any, given: frozenset[Any], tensors: list[Tensor], results: list[Tensor]
    ) -> None:
        name = overload_name(op)
        known = [self.made.get(id(tensor), (tensor, frozenset(), True)) for tensor in tensors]
        of_data = any(each[2] for each in known) and not _FORMED.fullmatch(name)
        of_data = of_data or torch.Tag.nondeterministic_seeded in op.tags
        numbers = given.union(*(each[1] for each in known))
        hidden = numbers if of_data and _HIDING.fullmatch(name) else frozenset[sympy.Expr]()
        hidden |= frozenset() if self.is_run else given
        self._add(self.found, given)
        self._add(self.hidden, hidden)
        for each in results:
            self.made.pop(id(each), None)
            shown = frozenset() if each.dtype == torch.bool and not of_data else numbers
            if shown or not of_data:
                self.made[id(each)] = each, shown, of_data

    def may_use(self, values: Any) -> None:
        """An operator that cannot be run on fakes, such as a launch of a Triton kernel, is given
        `values`: it may use each of their numbers."""
        numbers = {expression_of(each) for each in _symbolic(values)}
        numbers.update(*(self.made[id(t)][1] for t in tensors_in(values) if id(t) in self.made))
        self._add(self.found if self.is_run else self.hidden, numbers)

    def _add(self, notes: dict[Any, str | None], numbers: AbstractSet[Any]) -> None:
        for number in numbers - notes.keys():
            notes[number] = self.line()

    def stated(self, labels: Labels) -> Iterator[SizeUse]:
        found = {each: self.found[each] for each in self.found.keys() - self.hidden.keys()}
        yield from _stated(found, labels)
        yield from _stated(self.hidden, labels, is_hidden=True)


def _symbolic(values: Any) -> list[Any]:
    return [each for each in tree_leaves(values) if isinstance(each, Symbolic)]


def _symbols(values: Any) -> set[Any]:
    return {s for each in _symbolic(values) for s in expression_of(each).free_symbols}


def _sizes_of(values: Any) -> set[Any]:
    """The symbols of the sizes of tensors."""
    return {s for tensor in tensors_in(values) for s in _symbols([*tensor.shape])}


def uses_in_trace(graph: Graph, labels: Labels, splitting: Sequence[str]) -> tuple[SizeUse, ...]:
    """The sizes that operators of a traced graph are given as numbers. Ops of `splitting` run
    between pieces, and no run of a piece shows what they do with them."""

    def value(arg: Node) -> Any:
        if arg.op == "get_attr":  # what an operator of higher order calls
            return attrgetter(str(arg.target))(graph.owning_module)
        return arg.meta.get("example_value")

    uses = NumberUses(lambda: None)
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), value)
        fakes = tensors_in(node.meta.get("example_value"))
        some = fakes or tensors_in((args, kwargs))  # of an op that writes and returns nothing
        made = any(id(tensor) in uses.made for tensor in tensors_in((args, kwargs)))
        if not (some and (made or _symbols((args, kwargs)))):
            continue
        target: Any = node.target
        uses.line = partial(short_location, node_location(node))
        uses.is_run = not (is_op(target) and overload_name(overload_of(node)) in splitting)
        try:
            call = target if callable(target) else getattr(args[0], target)
            mode: Any = some[0].fake_mode  # type: ignore[attr-defined]
            with mode, mode.shape_env.suppress_guards(), torch.no_grad(), uses:
                result = call(*(args if callable(target) else args[1:]), **kwargs)
        except Exception:  # an operator that needs more than a node tells
            uses.is_run &= all(arg.op != "get_attr" for arg in node.all_input_nodes)
            uses.may_use((args, kwargs))
            continue
        for fake, tensor in zip(fakes, tensors_in(result), strict=False):
            if id(tensor) in uses.made:
                uses.made[id(fake)] = fake, *uses.made[id(tensor)][1:]
    return tuple(uses.stated(labels))


def uses_of_forward(
    run: Callable[[list[Tensor]], Any],
    inputs_at: Callable[[int], Sequence[tuple[Tensor, Dims]]],
    limits: Callable[[str], tuple[int, int]],
) -> Iterator[SizeUse]:
    """The uses of a model that is not traced: `run` calls it on fake inputs in the form of those
    that `inputs_at` gives for a number of tokens. Raises what the model does.

    Each run is one way through its Python, for the sizes at which all of its guards hold.
    """
    low, high = limits(TOKENS)
    remaining, narrow, where = [*range(low, high + 1)], 0, None
    seen = set[tuple[Any, ...]]()
    for _ in range(MAX_WAYS):
        if not remaining or narrow == 2:
            break
        size = min(remaining, key=lambda n: abs(n - _EXAMPLE))
        covered = {*remaining}
        for use in _one_way(run, inputs_at(size), limits):
            least, most = limits(use.size)
            values, is_known = use.values(most), use.expression != use.size
            if use.is_choice and is_known and all(values[least:]):
                continue
            if use.is_choice and use.size == TOKENS:
                where = use.where
                covered = {n for n in covered if is_known and values[n]}
            same = (value == values[most] for value in values[least:])
            changes = (use.size, use.is_choice, use.is_hidden, *same)
            if changes not in seen:
                seen.add(changes)
                yield use
        narrow += len(covered) < 2
        remaining = [n for n in remaining if n not in covered and n != size]
    if remaining:
        for label in {label: None for _, dims in inputs_at(high) for label in dims if label}:
            yield SizeUse(expression=label, size=label, where=where, is_choice=True)


_EXAMPLE = 17
"""A size that no model treats specially."""


def _one_way(
    run: Callable[[list[Tensor]], Any],
    inputs: Sequence[tuple[Tensor, Dims]],
    limits: Callable[[str], tuple[int, int]],
) -> list[SizeUse]:
    with (
        reasoning_about_sizes(DynamicShapes.BACKED_SIZE_OBLIVIOUS.value),
        symbolic_inputs(inputs) as (fakes, labels, env),
        FakeWrites(fakes[0].fake_mode),  # type: ignore[attr-defined]
        NumberUses(user_line) as uses,
    ):
        ranges = {symbol: limits(label) for symbol, label in labels.items()}
        equal = number_of_guards(env)
        run(fakes)
        made = guards_of_run(env)[equal:]
        guards = {e: where for e, where in made if not holds_by_intervals(e, ranges)}
        return [*_stated(guards, labels, is_choice=True), *uses.stated(labels)]


def _stated(
    found: Mapping[Any, str | None],
    labels: Labels,
    *,
    is_choice: bool = False,
    is_hidden: bool = False,
) -> Iterator[SizeUse]:
    """For each of its sizes, in the name of that. What depends on several is not known: its value
    is that of no other size."""
    for expression, where in found.items():
        for symbol in sorted(expression.free_symbols & labels.keys(), key=str):
            size = labels[symbol]
            named = expression.xreplace({symbol: sympy.Symbol(size, integer=True)})
            text = python_text(named) if len(expression.free_symbols) == 1 else size
            yield SizeUse(
                expression=text, size=size, where=where, is_choice=is_choice, is_hidden=is_hidden
            )
