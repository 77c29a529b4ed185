"""The plan: what is needed, besides artifacts and weights, to run a compiled model.

A plan is data. It names values (`i` user inputs, `w` weights, `s` symbols, `t` intermediates) and
lists the steps of one forward; `build_step` turns it into a function. It survives a round trip
through JSON, so a warm start needs no graph, no trace and no pickle.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from .config import TOKENS


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def names_printed() -> dict[str, Any]:
    """What expressions over sizes, as torch prints them, refer to besides the sizes."""
    return {"math": math, "operator": operator, "torch": torch}


def evaluated(expression: int | str, values: Mapping[str, int]) -> Any:
    """The value of a size or of a check, an expression over `values`."""
    if isinstance(expression, int):
        return expression
    return eval(expression, {**names_printed(), **values})


def function_of(names: Sequence[str], expression: str) -> Callable[..., Any]:
    """An expression as a function of the sizes called `names`."""
    function: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {expression}", names_printed())
    return function


NUMBER = -1
"""The dimension of a size that is an input itself."""

Path = tuple[str | int, ...]
"""Parameter name, then keys or positions into nested containers."""


def dotted(path: Path) -> str:
    """A place among the arguments as users write it, such as `states.aux.0`."""
    return ".".join(map(str, path))


class UserInput(Frozen):
    """A tensor that the caller passes: its place among the arguments, and its form."""

    name: str
    path: Path
    dtype: str
    device: str
    shape: tuple[int | str, ...]
    """Sizes; a string is an expression over the plan's symbols."""
    written: bool = False
    """Whether the model writes to it in place."""
    stride: tuple[int, ...] = ()
    """Strides that compiled code relies on; empty for a contiguous tensor."""

    @property
    def label(self) -> str:
        return dotted(self.path)


class Constant(Frozen):
    """An argument that the trace fixed; other values are errors."""

    path: Path
    value: Any
    is_default: bool = False
    """Whether it is the parameter's default, an object that is compared by identity."""


_TENSORS = [(kind.__module__, kind.__qualname__) for kind in (torch.Tensor, torch.nn.Parameter)]


class Container(Frozen):
    """A dict, list or other object among the arguments that holds inputs and constants."""

    path: Path
    kind: tuple[str, str]
    """Module and qualified name of its class."""
    keys: tuple[str | int, ...] | int | None
    """The keys of a mapping in order, the length of a sequence, None where the class has fields. Of
    a tensor that nothing reads its dtype and sizes, with names of those that are dynamic."""

    @classmethod
    def of(cls, path: Path, value: Any) -> Container:
        """That of `value`, whatever its keys are."""
        kind = type(value).__module__, type(value).__qualname__
        keys: Any = None
        if isinstance(value, Mapping):
            keys = tuple(value)
        elif kind in _TENSORS:
            keys = str(value.dtype).removeprefix("torch."), *value.shape
        elif isinstance(value, Sequence) and not hasattr(value, "_fields"):
            keys = len(value)
        return cls.model_construct(path=path, kind=kind, keys=keys)

    @property
    def is_tensor(self) -> bool:
        return self.kind in _TENSORS

    @property
    def form(self) -> str:
        """As a reader would say it, such as `a dict with 'hidden', 'extra'`."""
        name = f"a {self.kind[1]}"
        if self.keys is None:
            return name
        if self.is_tensor and isinstance(self.keys, tuple):
            return f"a {self.keys[0]}[{', '.join(map(str, self.keys[1:]))}]"
        holds = f"{self.keys} items" if isinstance(self.keys, int) else repr(list(self.keys))[1:-1]
        return f"{name} with {holds or 'nothing in it'}"


class Weight(Frozen):
    """A parameter or buffer by qualified name in the model, or another tensor by its place."""

    name: str
    target: str
    """The qualified name; for another tensor its place as a person would write it."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    written: bool = False
    """Whether the model writes to it."""
    place: tuple[str, list[Any]] | None = None
    """Root and steps to a tensor that is no parameter or buffer; see `conditions.places`."""


class Symbol(Frozen):
    """A dynamic size, read from dimension `dim` of user input `source`, or that input itself."""

    name: str
    label: str
    """The user's name for it, such as `num_tokens`."""
    source: str
    dim: int
    low: int
    high: int


class PieceStep(Frozen):
    """Call of a unique piece with named values; returns one value for each name in `outs`."""

    kind: Literal["piece"] = "piece"
    piece: int
    args: tuple[str, ...]
    outs: tuple[str, ...]


class Form(Frozen):
    """Of a tensor; sizes and strides are numbers, or expressions over the plan's symbols."""

    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]


class CallStep(Frozen):
    """Call of a splitting op; `args` and `kwargs` are encoded by `serialization.encode`."""

    kind: Literal["call"] = "call"
    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    outs: tuple[str | None, ...]
    """Names of the used elements of the result, None for others; one name for a single tensor."""
    unpack: bool
    """Whether the result is a tuple whose elements `outs` names."""
    forms: tuple[Form | None, ...] = ()
    """For each of `outs` what the op's fake kernel said; None for what is unused or no tensor, or
    depends on data."""
    autocast: Any = None
    """Arguments of the autocast region around the call, encoded; None outside of any."""


class PlanPiece(Frozen):
    """A unique piece: compiled once, used by any number of steps."""

    digest: str
    """Content hash; see `fingerprint`."""
    nodes: int
    sizes: tuple[int, ...]
    """Positions of its size arguments; the others are tensors."""
    unwritten: tuple[int, ...] = ()
    """Positions of results that it only allocates, for a splitting op to write into."""
    text: str = ""
    """Its graph as annotated source, to read."""


class CompiledRange(Frozen):
    """Token counts from `low` to `high`, and the artifact of each unique piece that serves them."""

    low: int
    high: int
    artifacts: tuple[int, ...]


class GuardCheck(Frozen):
    """A guard that is checked at every step, because it was not proved."""

    expression: str
    where: str | None


class SizeUse(Frozen):
    """A value of a size that is no shape: a number that an operator is given, or a choice of
    Python. Rows may be other ones in a batch padded to a size with another value."""

    expression: str
    """Over `size`. What depends on other sizes, too, is the size itself: it has no value twice."""
    size: str = TOKENS
    where: str | None
    is_choice: bool
    """Whether it decides what runs; no run of a piece then shows that padding reaches no row."""
    is_hidden: bool = False
    """Whether it is a number that an operator hides for some data, as a clamp: no run decides."""

    def values(self, largest: int) -> list[Any]:
        """The value at each size up to `largest`; where it has none the size itself."""
        value = function_of([self.size], self.expression)
        values: list[Any] = []
        for size in range(largest + 1):
            try:
                values.append(value(size))
            except (ArithmeticError, ValueError):
                values.append(f"at {size}")
        return values


class GuardRecord(Frozen):
    """A guard and its proof, to read."""

    expression: str
    where: str | None
    origin: str
    proved: bool | None
    method: str
    failing: tuple[dict[str, int], ...] = ()
    """The first sizes at which it does not hold."""


class Result(Frozen):
    """One tensor (or number) that the stitched function returns."""

    name: str
    """A value's name, or for a number an expression over the symbols."""
    dtype: str | None
    """None for a number, empty for a result whose form is not known."""
    shape: tuple[int | str, ...]


class Plan(Frozen):
    inputs: tuple[UserInput, ...]
    constants: tuple[Constant, ...]
    containers: tuple[Container, ...] = ()
    """What holds inputs and constants, outer ones first, and tensors that the model does not read.
    Every other `*args` and `**kwargs` of the forward was empty."""
    weights: tuple[Weight, ...]
    symbols: tuple[Symbol, ...]
    pieces: tuple[PlanPiece, ...]
    ranges: tuple[CompiledRange, ...]
    steps: tuple[PieceStep | CallStep, ...]
    results: tuple[Result, ...]
    structure: Any
    """The returned object, encoded by `serialization.encode`: `o<n>` is the n-th result,
    `L.<label>` an argument that is returned unchanged."""
    checks: tuple[GuardCheck, ...] = ()
    parameters: tuple[str, ...]
    """Parameter names of the model's forward, in order."""
    shapes: dict[str, str] = {}
    """Dtype and shape of each intermediate value, as text."""
    guards: tuple[GuardRecord, ...] = ()
    cut_at: tuple[str, ...] = ()
    """Ops at which Inductor partitioned the code of the only piece, which calls them."""
    size_uses: tuple[SizeUse, ...] = ()
    others: tuple[Plan, ...] = ()
    """Plans for token counts that the steps of this one do not serve, from traces of their own."""
    forms: tuple[Plan, ...] = ()
    """Plans of the model's other call forms. `weights` are those of all forms."""

    def traces(self) -> list[Plan]:
        """The plans of all traces: form by form, by the token counts that they serve, ascending."""
        return [plan for form in (self, *self.forms) for plan in form.intervals()]

    def tensors(self) -> list[str]:
        """The names of the tensors that a call has, also of those that the model does not read."""
        unread = [each.path for each in self.containers if each.kind == ("torch", "Tensor")]
        return [*(item.label for item in self.inputs), *map(dotted, unread)]

    def intervals(self) -> list[Plan]:
        """The plans of this form's traces, by the token counts that they serve, ascending."""
        plans = [self, *self.others]
        return sorted(plans, key=lambda plan: plan.ranges[0].high) if self.others else plans

    def at(self, num_tokens: int) -> Plan:
        """The plan whose steps serve a number of tokens."""
        plans = self.intervals()
        return next((p for p in plans if num_tokens <= p.ranges[-1].high), plans[-1])

    def form_is_unknown(self) -> bool:
        """Whether the form of the result is not known: the model is not traced, and was not run."""
        return any(result.dtype == "" for result in self.results)

    def unstated(self, outputs: Sequence[Any], sizes: Mapping[str, int]) -> str:
        """What of a run's flat results has sizes that `results` does not state; empty if nothing.
        Rows are cut from them by what it states."""
        names = {symbol.name: sizes[symbol.label] for symbol in self.symbols}
        for output, result in zip(outputs, self.results, strict=True):
            stated = tuple(evaluated(size, names) for size in result.shape)
            if isinstance(output, torch.Tensor) and output.shape != stated:
                return f"a result has the sizes {tuple(output.shape)} instead of {stated}"
        return ""

    def broken(self, sizes: Mapping[str, int]) -> GuardCheck | None:
        """The first check that fails or has no value at `sizes`, given by label."""
        for check in self.checks:
            try:
                holds = evaluated(check.expression, sizes)
            except ArithmeticError:
                holds = False
            if not holds:
                return check
        return None

    def piece_uses(self) -> list[int]:
        """Unique piece of each piece step, in order of execution."""
        return [step.piece for step in self.steps if isinstance(step, PieceStep)]

    def cuts(self) -> list[str]:
        """`cut_at` of all traces."""
        return sorted({op for plan in self.traces() for op in plan.cut_at})

    def calls(self) -> list[CallStep]:
        return [step for step in self.steps if isinstance(step, CallStep)]

    def segments(self) -> int:
        """Segments of a PIECEWISE recording: pieces, and runs of splitting calls between them."""
        kinds = [step.kind for step in self.steps]
        runs = [b for a, b in zip([None, *kinds], kinds, strict=False) if b == "piece" or a != b]
        return len(runs)

    def places_of_artifacts(self) -> dict[int, tuple[int, int, int]]:
        """For each artifact a piece, and the token counts that it serves."""
        return {
            artifact: (piece, interval.low, interval.high)
            for plan in self.traces()
            for interval in plan.ranges
            for piece, artifact in enumerate(interval.artifacts)
        }

    def sizes_of_artifacts(self) -> dict[int, tuple[int, ...]]:
        """For each artifact the positions of its size arguments."""
        return {
            artifact: piece.sizes
            for plan in self.traces()
            for interval in plan.ranges
            for artifact, piece in zip(interval.artifacts, plan.pieces, strict=True)
        }

    def token_source(self) -> tuple[int, int]:
        """The input (by position) and dimension from which the token count is read."""
        symbol = next(symbol for symbol in self.symbols if symbol.label == TOKENS)
        return int(symbol.source[1:]), symbol.dim
