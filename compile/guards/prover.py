"""Shape guards: each one is proved over the served range, checked at run time, or an error.

Dynamo and Inductor put guards on sizes while they trace and compile. An engine that drops them is
silently wrong at sizes where one fails. Here a guard is a predicate over the declared symbols. It
is proved by intervals (torch's `bound_sympy`) or, where intervals do not decide, by trying every
size in the range. A guard that fails is reported with the user's line and the failing sizes.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.fx import GraphModule

from ...errors import CompileError, GuardUnproved, ShapesDiffer, Specialized, UnboundSymbol
from ...events import Events
from ...torch_compat.basics.symbolic import (
    Located,
    deferred_asserts,
    forget_assumptions,
    holds_by_intervals,
    narrowed_range,
    python_text,
    replaced_symbols,
    shape_guards,
)
from ..ir.config import TOKENS, CompileConfig, DynamicShapes, GuardPolicy
from ..ir.locations import short_location
from ..ir.plan import GuardRecord, function_of
from ..trace.size_asserts import SizeAssert
from ..trace.symbols import Sizes
from .range_check import ShapeDifference, corners, difference_at

EXHAUSTIVE = 1 << 20
"""The most combinations of sizes that are tried one by one; above it only intervals prove."""

Ranges = dict[sympy.Symbol, tuple[int, int]]

Run = Callable[[Sizes], str | None]
"""Runs compiled code at the given sizes; None if the result is right, else what is wrong."""


@dataclass(frozen=True)
class Guard:
    """A condition on sizes under which the trace, or a compiled piece, is right."""

    expression: sympy.Basic
    where: str | None


@dataclass(frozen=True)
class GuardProof:
    """`holds` is None if intervals and trial do not decide.

    `failures` is how many sizes fail; None if not all were tried.
    """

    holds: bool | None
    method: str
    failing: tuple[dict[str, int], ...] = ()
    failures: int | None = 0
    ran_wrongly: bool = False
    """Whether the code gives wrong results at a size for which the guard fails."""


def prove(expression: sympy.Basic, ranges: Ranges) -> GuardProof:
    """Decide whether `expression` holds for all sizes in `ranges` (inclusive)."""
    if expression in (sympy.true, sympy.false):
        return GuardProof(expression is sympy.true, "constant")
    if holds_by_intervals(expression, ranges):
        return GuardProof(True, "intervals")
    return _tried(expression, ranges)


def _tried(expression: sympy.Basic, ranges: Ranges) -> GuardProof:
    symbols = sorted(expression.free_symbols, key=str)
    unknown = [symbol for symbol in symbols if symbol not in ranges]
    if unknown:
        return GuardProof(None, f"unbounded {unknown[0]}")
    holds = _predicate(expression, symbols)
    spans = [range(ranges[s][0], ranges[s][1] + 1) for s in symbols]
    exhaustive = math.prod(span[-1] - span[0] + 1 for span in spans) <= EXHAUSTIVE
    points = itertools.product(*spans if exhaustive else map(_landmarks, spans))
    failing: list[tuple[int, ...]] = []
    failures = 0
    for point in points:
        if not holds(*point):
            failures += 1
            if len(failing) < 3:
                failing.append(point)
    if failures:
        named = tuple({str(s): n for s, n in zip(symbols, p, strict=True)} for p in failing)
        return GuardProof(False, "trial", named, failures if exhaustive else None)
    return GuardProof(True, "trial") if exhaustive else GuardProof(None, "too many sizes to try")


def first_from_which_it_holds(expression: sympy.Basic, ranges: Ranges) -> int | None:
    """The least size of the only symbol from which `expression` always holds; None if none does."""
    symbols = sorted(expression.free_symbols, key=str)
    if len(symbols) != 1 or symbols[0] not in ranges:
        return None
    holds, (low, high) = _predicate(expression, symbols), ranges[symbols[0]]
    if high - low > EXHAUSTIVE:
        return None
    last_failing = next((size for size in range(high, low - 1, -1) if not holds(size)), low - 1)
    return last_failing + 1 if low <= last_failing < high else None


def interval_around(
    size: int, conditions: Sequence[sympy.Basic], limits: tuple[int, int]
) -> tuple[int, int]:
    """The sizes around `size`, at which conditions on `num_tokens` hold, up to where one fails."""
    symbol = [sympy.Symbol(TOKENS, integer=True)]
    tests = [_predicate(condition, symbol) for condition in conditions]
    below = itertools.takewhile(lambda n: all(t(n) for t in tests), range(size, limits[0] - 1, -1))
    above = itertools.takewhile(lambda n: all(t(n) for t in tests), range(size, limits[1] + 1))
    return min(below, default=size), max(above, default=size)


def _landmarks(span: range) -> list[int]:
    """Sizes at which guards often fail: both ends, powers of two and their neighbors."""
    powers = [sign * 2**k + d for sign in (1, -1) for k in range(21) for d in (-1, 0, 1)]
    return sorted({span[0], span[-1], *(p for p in powers if p in span)})


def _predicate(expression: sympy.Basic, symbols: list[sympy.Symbol]) -> Any:
    holds = function_of([str(symbol) for symbol in symbols], python_text(expression))

    def holds_at(*sizes: int) -> bool:
        try:
            return bool(holds(*sizes))
        except ZeroDivisionError:  # an undefined guard does not hold
            return False

    return holds_at


class GuardProver:
    """Proves the guards of one shape environment as they are added.

    `unproved` are those to check at run time; `records` lists every guard with its proof.
    """

    def __init__(
        self, shape_env: Any, labels: dict[sympy.Symbol, str], config: CompileConfig, events: Events
    ) -> None:
        self._env = shape_env
        self._labels = {s: sympy.Symbol(name, integer=True) for s, name in labels.items()}
        self._config = config
        self._events = events
        self._read = 0
        self._asserted: set[sympy.Basic] = set()
        self.unproved: list[Guard] = []
        self.records: list[GuardRecord] = []

    def prove_new(
        self,
        origin: str,
        asserts: Sequence[SizeAssert] = (),
        run: Run | None = None,
        added: Sequence[Located] = (),
    ) -> bool:
        """Prove all guards added since the last call, or apply the policy to those that fail.

        `asserts` are assertions that were taken out of a graph; `added` are guards that a compiler
        put on sizes in another process. A compiler's guard that fails only
        at a few sizes counts as proved if `run` gives right results at these. Returns whether all
        are proved; raises GuardUnproved under the policy `prove`.
        """
        before = len(self.unproved)
        guards = shape_guards(self._env, self._read)
        self._read += len(guards)
        for expression, where in guards:
            self._prove_one(expression, where, origin, run)
        assumed = [*added]
        if self._config.code.dynamic_shapes is DynamicShapes.UNBACKED:
            # bounds that tracing put on unbacked sizes, of which torch keeps the line of each
            bounds = (narrowed_range(self._env, symbol) for symbol in self._labels)
            deferred = (
                (expression, None)
                for expression in deferred_asserts(self._env)
                if expression.free_symbols <= set(self._labels)
            )
            assumed += [*itertools.chain(*bounds), *asserts, *deferred]
        for expression, where in assumed:
            if expression not in self._asserted:
                self._asserted.add(expression)
                self._prove_one(expression, where, origin, run)
        return len(self.unproved) == before

    def check_ends(self, piece: GraphModule, origin: str) -> None:
        """Compare the shapes of a piece at the ends of the range with those of the trace.

        Raises ShapesDiffer under the policy `prove`.
        """
        for sizes in corners(self.limits(), self._env):
            if difference := difference_at(piece, sizes):
                self._differs(difference, {self._labels[s]: n for s, n in sizes.items()}, origin)

    def serve(self, low: int, high: int) -> None:
        """Prove guards for these token counts from now on."""
        self._config = replace(self._config, min_num_tokens=low, max_num_tokens=high)

    def forget_assumptions(self, low: int, high: int) -> None:
        """Forget the guards that were proved: pieces are compiled for tokens from `low` to `high`,
        and need not hold for the sizes of the trace only."""
        for symbol in (s for s, name in self._labels.items() if str(name) == TOKENS):
            forget_assumptions(self._env, symbol, low, high)
        self._read = 0

    def limits(self) -> Ranges:
        """The served range of each symbol, without those that equal another symbol."""
        base = [symbol for symbol in self._labels if self._env.replace(symbol) == symbol]
        return {symbol: self._config.limits(str(self._labels[symbol])) for symbol in base}

    def label(self, symbol: sympy.Symbol) -> sympy.Symbol:
        """The declared name of a symbol of the trace; raises UnboundSymbol for one without."""
        if symbol not in self._labels:
            raise UnboundSymbol(expression=symbol)
        return self._labels[symbol]

    def _differs(
        self, difference: ShapeDifference, sizes: dict[sympy.Symbol, int], origin: str
    ) -> None:
        error = ShapesDiffer(
            where=difference.where,
            sizes=", ".join(f"{symbol} = {size}" for symbol, size in sizes.items()),
            actual=difference.actual,
            expected=difference.expected,
        )
        self._events.emit("shapes_differ", origin=origin, what=str(error))
        other = sympy.Or(*(sympy.Ne(symbol, size) for symbol, size in sizes.items()))
        self._apply_policy(Guard(other, difference.where), error, str(error))

    def check_symbols(self) -> None:
        """Raise Specialized if tracing turned a declared symbol into a number."""
        fixed = {
            symbol: (value, where)
            for symbol, (value, where) in replaced_symbols(self._env).items()
            if value.is_Integer
            and symbol in self._labels
            and self._config.limits(str(self._labels[symbol])) != (value, value)
        }
        for symbol, (value, where) in fixed.items():
            # sizes that are equal become numbers together: the guard has the line that caused it
            causes = [
                line
                for expression, line in shape_guards(self._env)
                if isinstance(expression, sympy.Eq)
                and len(expression.free_symbols) == 1
                and expression.free_symbols <= fixed.keys()
            ]
            where = next(filter(None, causes), where)
            raise Specialized(where=where, symbol=self._labels[symbol], value=int(value))

    def _ranges(self, expression: sympy.Basic) -> Ranges:
        named = set(self._labels.values())
        return {s: self._config.limits(str(s)) for s in expression.free_symbols if s in named}

    def _prove_one(
        self, expression: sympy.Basic, where: str | None, origin: str, run: Run | None
    ) -> None:
        guard = Guard(expression.xreplace(self._labels), where)
        proof = prove(guard.expression, self._ranges(guard.expression))
        if run is not None:
            proof = self._run_where_it_fails(proof, run)
        record = GuardRecord(
            expression=str(guard.expression),
            where=short_location(guard.where),
            origin=origin,
            proved=proof.holds,
            method=proof.method,
            failing=proof.failing,
        )
        self.records.append(record)
        self._events.emit("guard", **record.model_dump())
        if not proof.holds:
            self._apply_policy(guard, self._error(guard, proof), str(guard.expression))

    def _apply_policy(self, unproved: Guard, error: CompileError, text: str) -> None:
        """Raise, check at run time or drop a guard that is not proved."""
        match self._config.guards:
            case GuardPolicy.PROVE | GuardPolicy.SPLIT:
                raise error
            case GuardPolicy.CHECK:
                self.unproved.append(unproved)
            case GuardPolicy.DROP:
                self._events.emit("guard.dropped", level=logging.WARNING, expression=text)

    def _run_where_it_fails(self, proof: GuardProof, run: Run) -> GuardProof:
        """`proof`, decided by running the code at the sizes for which the guard fails, if few."""
        if proof.holds is not False or proof.failures != len(proof.failing):
            return proof
        least = {symbol: low for symbol, (low, _) in self.limits().items()}
        symbols = {str(self._labels[symbol]): symbol for symbol in least}
        points = ({symbols[name]: size for name, size in f.items()} for f in proof.failing)
        wrong = next(filter(None, (run({**least, **point}) for point in points)), None)
        how = "run at the sizes it fails for" + (f": {wrong}" if wrong else "")
        return replace(proof, holds=wrong is None, method=how, ran_wrongly=wrong is not None)

    def _error(self, guard: Guard, proof: GuardProof) -> GuardUnproved:
        symbols = sorted(map(str, guard.expression.free_symbols))
        holds_from = first_from_which_it_holds(guard.expression, self._ranges(guard.expression))
        sizes = ", ".join(
            str(tuple(f.values()) if len(f) > 1 else next(iter(f.values()))) for f in proof.failing
        )
        count = str(proof.failures or "more")
        refuted = f"; {proof.method}" if proof.ran_wrongly else ""
        return GuardUnproved(
            where=guard.where,
            expression=guard.expression,
            symbol=", ".join(symbols),
            sizes=f"{sizes} ({count} in all{refuted})" if sizes else proof.method,
            holds_from=holds_from,
            remedy=self._remedy(symbols, proof, holds_from),
        )

    def _remedy(self, symbols: list[str], proof: GuardProof, holds_from: int | None) -> str:
        """The settings that serve a range in which the guard holds, as the middle of a sentence."""
        if len(symbols) != 1 or not proof.failing:
            return ""
        (symbol,), first = symbols, proof.failing[0][symbols[0]]
        low, high = self._config.limits(symbol)
        if symbol == TOKENS:
            if holds_from is not None:
                return f"set tracing.min_num_tokens={holds_from} to pad smaller batches, "
            return f"set max_num_tokens={first - 1}, " if first > low else ""
        low, high = (low, first - 1) if holds_from is None else (holds_from, high)
        limits = {symbol: (low, high)}
        return f"set tracing.symbol_limits={limits}, " if low <= high else ""
