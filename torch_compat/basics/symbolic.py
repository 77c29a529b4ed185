"""Symbolic sizes: their expressions, the guards a shape environment holds, interval proofs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import sympy

Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool

UNBOUNDED = sys.maxsize - 1
"""The upper end of the range of a size that nothing limits. No tensor is as large."""


def expression_of(value: Symbolic) -> sympy.Expr:
    """The expression of a symbolic value, over the symbols that remain after all equalities."""
    return value.node.expr


def original_symbol(size: Symbolic) -> sympy.Symbol:
    """The symbol that a dimension was given first, before it was found equal to another or to a
    number; of any other value the expression that it was made with."""
    return size.node._expr


def traced_size(size: int | torch.SymInt) -> int:
    """The number that a size had when it was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def with_numbers(
    size: int | torch.SymInt, numbers: Mapping[sympy.Symbol, int]
) -> int | torch.SymInt:
    """A size in which some symbols are numbers."""
    if isinstance(size, int):
        return size
    expression = expression_of(size).subs(numbers)
    if expression.is_number:
        return int(expression)
    mixed: int | torch.SymInt = size.node.shape_env.create_symintnode(
        expression, hint=traced_size(size)
    )
    return mixed


def state_equal(one: int | torch.SymInt, other: int | torch.SymInt) -> None:
    """State that two sizes are always equal: their symbols become one."""
    torch._check(one == other)  # type: ignore[no-untyped-call]


def statically_true(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold for all of them; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def fx_nodes_of(expression: sympy.Expr, proxies: Mapping[sympy.Symbol, torch.fx.Proxy]) -> Any:
    """Write the arithmetic of `expression` over `proxies` into their graph; the result's proxy."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, dict(proxies), expression)


def python_text(expression: sympy.Basic) -> str:
    """The expression as Python source over the names of its symbols."""
    from torch.utils._sympy.printers import PythonPrinter

    text: str = PythonPrinter().doprint(expression)
    return text


def is_of_integers(number: Symbolic) -> bool:
    """Whether a number is an integer that is computed from integers alone."""
    import sympy

    return isinstance(number, torch.SymInt) and all(
        part.is_Boolean or part.is_integer
        for part in sympy.preorder_traversal(expression_of(number))
    )


def holds_by_intervals(
    condition: sympy.Basic, ranges: Mapping[sympy.Symbol, tuple[int, int]]
) -> bool:
    """Whether interval arithmetic proves `condition` over `ranges` (inclusive)."""
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    bounds = {symbol: ValueRanges(low, high) for symbol, (low, high) in ranges.items()}
    try:
        decided = bound_sympy(condition, bounds)
    except Exception:  # an operator without interval semantics
        return False
    return decided.is_singleton() and decided.lower is sympy.true


@contextmanager
def symbolic_inputs(
    inputs: Sequence[tuple[Any, Sequence[str | None]]],
) -> Iterator[tuple[list[torch.Tensor], dict[sympy.Symbol, str], Any]]:
    """Fake tensors in the form of `inputs`, each with the label of its dynamic sizes, in their fake
    mode; the symbols of the labels; and the shape environment, which has the guards.

    A size may be 0 or 1, and no layout decision of torch is a guard.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as Environment

    from .tensors import FakeTensorMode

    env = Environment(specialize_zero_one=False, duck_shape=False)
    mode, sizes = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), dict[str, Any]()
    fakes = list[torch.Tensor]()
    try:
        with mode:
            for tensor, labels in inputs:
                kinds = [DimDynamic.DYNAMIC if label else DimDynamic.STATIC for label in labels]
                context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
                fakes.append(mode.from_tensor(tensor, symbolic_context=context))
                for label, size in zip(labels, fakes[-1].shape, strict=True):
                    if label:
                        state_equal(size, sizes.setdefault(label, size))
            yield fakes, {expression_of(size): label for label, size in sizes.items()}, env
    finally:
        release_shape_environments()


# A shape environment: what tracing assumed about sizes.

Located = tuple["sympy.Basic", str | None]
"""A condition on sizes, and file:line of the user's code that caused it."""


def shape_guards(env: Any, start: int = 0) -> list[Located]:
    """Guards in the order in which they were added, from the one numbered `start`."""
    return [(guard.expr, user_line(guard.sloc)) for guard in env.guards[start:]]


def sizes_by_source(env: Any) -> Iterator[tuple[str, torch.SymInt]]:
    """All backed sizes, each with the expression that reads it."""
    for symbol, sources in env.var_to_sources.items():
        for source in sources if symbol in env.backed_var_to_val else ():
            number = traced_value(env, symbol)
            yield str(source.name), env.create_symintnode(symbol, hint=number, source=source)


def guards_of_run(env: Any) -> list[Located]:
    """Guards of a run without a trace, each with the line that asked for the size."""
    frames = [(guard.expr, getattr(guard.sloc, "framework_loc", None)) for guard in env.guards]
    return [(e, f"{frame.filename}:{frame.lineno}" if frame else None) for e, frame in frames]


def number_of_guards(env: Any) -> int:
    return len(env.guards)


def narrowed_range(env: Any, symbol: sympy.Symbol) -> Iterator[Located]:
    """Bounds that tracing put on an unbacked size."""
    import sympy

    bounds = env.var_to_range.get(symbol)
    if bounds is not None:
        lines = env.var_to_range_sloc[symbol]
        yield sympy.Ge(symbol, bounds.lower), user_line(lines.lower)
        if bounds.upper.is_Integer:
            yield sympy.Le(symbol, bounds.upper), user_line(lines.upper)


def size_range(env: Any, symbol: sympy.Symbol) -> tuple[int, int]:
    """The range of a size or a number, inclusive; up to `UNBOUNDED`, and down to `-UNBOUNDED`, if
    nothing limits it."""
    bounds = env.var_to_range[symbol]
    low, high = (
        int(end) if end.is_Integer else other
        for end, other in ((bounds.lower, -UNBOUNDED), (bounds.upper, UNBOUNDED))
    )
    return max(low, -UNBOUNDED), min(high, UNBOUNDED)


def traced_value(env: Any, symbol: sympy.Symbol) -> int:
    """The number that a symbol of a backed size stood for in the trace."""
    return int(env.backed_var_to_val[symbol])


def forget_assumptions(env: Any, symbol: sympy.Symbol, low: int, high: int) -> None:
    """Make a shape environment as it was before tracing learned something of a backed size, whose
    range includes `low` to `high`. Code that is compiled then adds the guards that it needs."""
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges

    for learned in (env.guards, env.axioms, env.divisible):
        learned.clear()
    if (bounds := env.var_to_range.get(symbol)) is not None:
        least, most = sympy.Min(bounds.lower, low), sympy.Max(bounds.upper, high)
        env.var_to_range[symbol] = ValueRanges(least, most)
    release_shape_environments()  # they hold what followed from the guards


def release_shape_environments() -> None:
    """Clear the caches of methods of shape environments, which hold each environment forever."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def deferred_asserts(env: Any) -> list[sympy.Basic]:
    """Conditions that torch wanted to check at run time."""
    items = [item for deferred in env.deferred_runtime_asserts.values() for item in deferred]
    return [env.replace(item.expr) for item in items]


def replaced_symbols(env: Any) -> dict[sympy.Symbol, Located]:
    """Symbols that tracing replaced: by what, and the line that caused it."""
    lines = env.replacements_slocs
    return {s: (value, user_line(lines.get(s))) for s, value in env.replacements.items()}


def user_line(sloc: Any) -> str | None:
    """`file.py:8 in fn` of the user's code, from torch's `code  # file.py:8 in fn`."""
    text = getattr(sloc, "maybe_user_loc", None)
    return text.rpartition("#")[2].strip() if text else None
