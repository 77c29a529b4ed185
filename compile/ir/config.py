"""What a user states about tracing and compiling a model."""

from __future__ import annotations

import importlib
import re
from enum import StrEnum
from functools import reduce
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from ...cache.keys.annotations import Feeds, exempt
from ...errors import InvalidSetting

TOKENS = "num_tokens"
"""The symbol of the token dimension."""


class DynamicShapes(StrEnum):
    """How Dynamo sees a dynamic dimension; see torch's `mark_dynamic` and `mark_unbacked`."""

    BACKED = "backed"
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"
    UNBACKED = "unbacked"


class GuardPolicy(StrEnum):
    """What becomes of a shape guard: proved at prepare time, checked each step, or dropped."""

    PROVE = "prove"
    CHECK = "check"
    DROP = "drop"


class BundleUse(StrEnum):
    """What becomes of a start without a bundle: the model is compiled, or that is an error."""

    USE = "use"
    FORCE = "force"


class InputSpec(BaseModel):
    """One tensor input: dtype name and shape, each dimension a size or a symbol's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read `int64[num_tokens]` or `float32[3, num_tokens, 64]`."""
        match = re.fullmatch(r"\s*(\w+)\s*\[([^\]]*)\]\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not of the form dtype[dim, dim, …]")
        dims = [dim.strip() for dim in match[2].split(",") if dim.strip()]
        bad = [dim for dim in dims if not (dim.isdigit() or dim.isidentifier())]
        if bad:
            raise ValueError(f"{bad[0]!r} is neither a size nor a symbol's name")
        return cls(dtype=match[1], shape=tuple(int(dim) if dim.isdigit() else dim for dim in dims))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


LOCATION = exempt("a place, not content: moving the cache must not change a key")
SOURCE = exempt(
    "the source of what it names is a factor of its own; see compile/bundle/key_factors.py"
)
LEVEL = exempt("it sets defaults only: the compiler and the passes it chooses are factors")
SPANNED = Feeds(("trace",), "an artifact is the same whatever spans there are beside its own")
TRACED = Feeds(("trace",), "it shapes the graph; a piece's content hash sees what came of it")


class CompileConfig(BaseModel):
    """Settings of the compile room; every field feeds every key unless it says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    splitting_ops: Annotated[tuple[str, ...], TRACED] = ()
    """Custom ops at which the graph is cut: `ns::op` or `ns::op.overload`."""

    splitting_patterns: Annotated[tuple[str, ...], TRACED] = ()
    """Custom ops at which the graph is cut, as patterns such as `vllm::*attention*`."""

    splitting_predicate: Annotated[Any, SOURCE] = None
    """A function of a graph node that says whether to cut there; or its name, as
    `module:function` or an entry point of the group `piecegraph.splitters`."""

    use_inductor_graph_partition: bool = False
    """True leaves the graph whole and lets Inductor cut its code at the splitting ops."""

    inputs: Annotated[dict[str, str], TRACED] = Field(default_factory=dict)
    """Tensor inputs by parameter name, as `int64[num_tokens]`; example inputs are built from it."""

    max_num_tokens: Annotated[int, TRACED, Field(ge=1)] = 2048
    """Largest number of tokens of a step; guards are proved over [1, max_num_tokens]."""

    symbol_limits: Annotated[dict[str, tuple[int, int]], TRACED] = Field(default_factory=dict)
    """Ranges (inclusive) of symbols other than `num_tokens`."""

    dynamic_shapes: DynamicShapes = DynamicShapes.BACKED_SIZE_OBLIVIOUS
    guards: Annotated[GuardPolicy, TRACED] = GuardPolicy.PROVE

    level: Annotated[int, LEVEL, Field(ge=0, le=3)] = 2
    """O0 to O3: defaults for what is not set; see `dispatch.LEVELS` and `passes.graph_pass`."""

    compiler: str = "inductor"
    """`inductor`, `eager`, a registered torch backend, or an entry point `piecegraph.compilers`."""

    compile_ranges: Annotated[tuple[int, ...], SPANNED] = ()
    """Token counts at which a range ends; each range is compiled with a symbolic size."""

    compile_sizes: Annotated[tuple[int, ...], SPANNED] = ()
    """Token counts that get static code of their own, autotuned on a GPU."""

    inductor_options: dict[str, Any] = Field(default_factory=dict)

    pass_switches: Annotated[dict[str, bool], SOURCE] = Field(default_factory=dict)
    """Passes to turn on or off by name; what is not named is as it ships."""

    user_passes: Annotated[tuple[Any, ...], SOURCE] = ()
    """Passes to run after the shipped ones: a `GraphPass`, a function of a graph, or the name of
    one, as `module:function` or an entry point of the group `piecegraph.passes`."""

    compile: Annotated[bool, TRACED] = True
    """False calls the model's own forward: nothing is traced. There are graphs only if a mode is
    asked for; PIECEWISE ones break at `break_graph` functions and at splitting ops."""

    dedupe: Annotated[bool, TRACED] = True
    """False compiles equal pieces each on its own."""

    dump_dir: Annotated[Path | None, LOCATION] = None
    """Where graphs and generated code are written for people; edits of that code are used."""

    bundle: Annotated[BundleUse, exempt("what is done without a bundle, not what is in it")] = (
        BundleUse.USE
    )
    """`force` never compiles: a start without a bundle that fits raises BundleMissing."""

    cache: Annotated[bool, LOCATION] = True
    """False turns off every layer of caching: ours, and torch's in our compiles."""

    cache_dir: Annotated[Path | None, LOCATION] = None

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _first_problem(error) from None

    @field_validator("inputs")
    @classmethod
    def _check_inputs(cls, inputs: dict[str, str]) -> dict[str, str]:
        return {name: str(InputSpec.parse(text)) for name, text in inputs.items()}

    @field_validator("symbol_limits")
    @classmethod
    def _check_limits(cls, limits: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        if TOKENS in limits:
            raise ValueError(f"the range of {TOKENS} is 1 to max_num_tokens")
        for symbol, (low, high) in limits.items():
            if not 0 <= low <= high:
                raise ValueError(f"{symbol} cannot range from {low} to {high}")
        return limits

    @field_serializer("splitting_predicate", "user_passes", when_used="json")
    def _named(self, value: Any) -> Any:
        """Functions by their names: for people, keys hold their source."""
        if isinstance(value, tuple):
            return [self._named(item) for item in value]
        return value if value is None else str(getattr(value, "__qualname__", value))

    @model_validator(mode="after")
    def _check_symbols(self) -> Self:
        """Only a symbol that is a size of some input has a range."""
        known = {dim for spec in self.input_specs().values() for dim in spec.shape}
        unknown = [symbol for symbol in self.symbol_limits if symbol not in known]
        if unknown:
            raise InvalidSetting(
                name="symbol_limits",
                value=self.symbol_limits,
                reason=f"no input in Config.inputs has a dimension {unknown[0]}",
                expected="ranges of symbols that occur in inputs, such as int64[num_reqs]",
            )
        return self

    @model_validator(mode="after")
    def _check_partition(self) -> Self:
        """Only Inductor can cut code, and only the code of its Python wrapper."""
        cpp = self.inductor_options.get("cpp_wrapper")
        if self.use_inductor_graph_partition and (self.compiler != "inductor" or cpp):
            found = "inductor_options['cpp_wrapper']" if cpp else f"compiler={self.compiler!r}"
            raise InvalidSetting(
                name="use_inductor_graph_partition",
                value=True,
                reason=f"{found} cannot partition a graph",
                expected="False, or compiler='inductor' without cpp_wrapper",
            )
        return self

    def cuts(self) -> bool:
        """Whether there is anything to cut the graph at."""
        named = self.splitting_ops or self.splitting_patterns
        return bool(named) or self.splitting_predicate is not None

    def input_specs(self) -> dict[str, InputSpec]:
        """`inputs`, read."""
        return {name: InputSpec.parse(text) for name, text in self.inputs.items()}

    def limits(self, symbol: str) -> tuple[int, int]:
        """Inclusive range of a symbol: its own, or that of the token count."""
        return self.symbol_limits.get(symbol, (1, self.max_num_tokens))


def _first_problem(error: ValidationError) -> InvalidSetting:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"]) or "config"
    reason = problem["msg"].removeprefix("Value error, ")
    return InvalidSetting(
        name=name,
        value=problem.get("input"),
        reason=reason,
        expected="a value as documented in docs/config.md",
    )


def named_object(name: str, group: str) -> Any:
    """The object `name` refers to: `module:attribute`, or an entry point of `group`.

    Raises InvalidSetting if there is none.
    """
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return reduce(getattr, attribute.split("."), importlib.import_module(module))
        (found,) = entry_points(group=group, name=name)
        return found.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidSetting(
            name=group,
            value=name,
            reason=f"nothing is found under that name ({error})",
            expected=f"module:attribute, or an entry point of the group {group}",
        ) from error
