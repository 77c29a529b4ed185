"""The plan: what is needed, besides artifacts and weights, to run a compiled model.

A plan is data. It names values (`i` user inputs, `w` weights, `s` symbols, `t` intermediates) and
lists the steps of one forward; `build_step` turns it into a function. It survives a round trip
through JSON, so a warm start needs no graph, no trace and no pickle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .config import TOKENS


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class UserInput(Frozen):
    """A tensor that the caller passes: where it is found and what it must be."""

    name: str
    path: tuple[str | int, ...]
    """Parameter name, then keys or positions into nested containers."""
    dtype: str
    device: str
    shape: tuple[int | str, ...]
    """Sizes; a string is an expression over the plan's symbols."""
    written: bool = False
    """Whether the model writes to it."""


class Constant(Frozen):
    """A number or string argument that the trace took as fixed; other values are refused."""

    path: tuple[str | int, ...]
    value: Any


class Weight(Frozen):
    """A parameter or buffer, by qualified name in the model."""

    name: str
    target: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    written: bool = False
    """Whether the model writes to it."""


class Symbol(Frozen):
    """A dynamic size, read from dimension `dim` of user input `source`."""

    name: str
    label: str
    """The user's name for it, such as `num_tokens`."""
    source: str
    dim: int
    low: int
    high: int


class PieceStep(Frozen):
    """Call of a unique piece with named values; it returns one value per name in `outs`."""

    kind: Literal["piece"] = "piece"
    piece: int
    args: tuple[str, ...]
    outs: tuple[str, ...]


class CallStep(Frozen):
    """Call of a splitting op; `args` and `kwargs` are in the form of `literal.encode`."""

    kind: Literal["call"] = "call"
    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    outs: tuple[str | None, ...]
    """Names of the elements of the result that are used; one name for a single tensor."""
    unpack: bool
    """Whether the result is a tuple whose elements `outs` names."""


class PlanPiece(Frozen):
    """A piece that is compiled once however often it is used."""

    digest: str
    """Content hash; see `fingerprint`."""
    nodes: int
    sizes: tuple[int, ...]
    """Positions of sizes among its arguments; the others are tensors."""
    text: str = ""
    """Its graph as annotated source, for people."""


class CompiledRange(Frozen):
    """Token counts from `low` to `high`, and the artifact of each unique piece that serves them."""

    low: int
    high: int
    artifacts: tuple[int, ...]
    partitions: int = 0
    """Into how many partitions Inductor cut the code, if Inductor partitions it."""


class Check(Frozen):
    """A guard that was not proved: `expression` must hold at every step."""

    expression: str
    where: str | None


class GuardRecord(Frozen):
    """A guard as it was found and proved when the model was traced, for people."""

    expression: str
    where: str | None
    origin: str
    proved: bool | None
    method: str
    failing: tuple[dict[str, int], ...] = ()
    """The first sizes for which it does not hold."""


class Result(Frozen):
    """One tensor (or size) that the stitched function returns."""

    name: str
    """A value's name, or for a size an expression over the symbols."""
    dtype: str | None
    shape: tuple[int | str, ...]


class Plan(Frozen):
    inputs: tuple[UserInput, ...]
    constants: tuple[Constant, ...]
    weights: tuple[Weight, ...]
    symbols: tuple[Symbol, ...]
    pieces: tuple[PlanPiece, ...]
    ranges: tuple[CompiledRange, ...]
    steps: tuple[PieceStep | CallStep, ...]
    results: tuple[Result, ...]
    structure: Any
    """What the caller gets, in the form of `literal.encode`: `o<n>` is the n-th result, `L.<label>`
    an argument that is passed through."""
    checks: tuple[Check, ...] = ()
    parameters: tuple[str, ...]
    """Parameter names of the model's forward, in order."""
    partition_ops: tuple[str, ...] = ()
    """Ops inside the one piece at which Inductor cut its code; they are the breaks."""
    shapes: dict[str, str] = {}
    """Dtype and shape of each intermediate value, as text for people."""
    guards: tuple[GuardRecord, ...] = ()

    def broken(self, sizes: Mapping[str, int]) -> Check | None:
        """The first check that fails at `sizes`, by label; a captured size must break none."""
        names = {"math": math, **sizes}
        return next((check for check in self.checks if not eval(check.expression, names)), None)

    def piece_uses(self) -> list[int]:
        """Unique piece of each piece step, in order of execution."""
        return [step.piece for step in self.steps if isinstance(step, PieceStep)]

    def calls(self) -> list[CallStep]:
        return [step for step in self.steps if isinstance(step, CallStep)]

    def segments(self) -> int:
        """Segments of a PIECEWISE recording: pieces, and runs of splitting calls between them.

        Of code that Inductor cut these are its partitions and the calls between two of them.
        """
        if self.partition_ops:
            return 2 * self.partitions() - 1
        kinds = [step.kind for step in self.steps]
        runs = [b for a, b in zip([None, *kinds], kinds, strict=False) if b == "piece" or a != b]
        return len(runs)

    def partitions(self) -> int:
        """Partitions of the code of the range that has the most; 0 unless Inductor cut it."""
        return max((interval.partitions for interval in self.ranges), default=0)

    def sizes_of_artifacts(self) -> dict[int, tuple[int, ...]]:
        """For each artifact the positions of sizes among its arguments."""
        return {
            artifact: piece.sizes
            for interval in self.ranges
            for artifact, piece in zip(interval.artifacts, self.pieces, strict=True)
        }

    def token_source(self) -> tuple[int, int]:
        """Position among the inputs, and dimension, where the token count is read."""
        symbol = next(symbol for symbol in self.symbols if symbol.label == TOKENS)
        return int(symbol.source[1:]), symbol.dim
