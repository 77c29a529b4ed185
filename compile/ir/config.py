"""Settings for tracing and compiling a model."""

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
    """How shape guards are treated: proved at prepare time, checked at each step, or dropped."""

    PROVE = "prove"
    CHECK = "check"
    DROP = "drop"


class BundleUse(StrEnum):
    """Whether a start without a usable bundle compiles the model or is an error."""

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


LOCATION = exempt("a location, not content: moving the cache must not change a key")
SOURCE = exempt(
    "the source of the named object is a factor of its own; see compile/bundle/key_factors.py"
)
LEVEL = exempt("it only sets defaults: the compiler and the passes it selects are factors")
RANGES = Feeds(("trace",), "an artifact does not depend on the other compile ranges")
TRACED = Feeds(("trace",), "it changes the graph, which the content hash of a piece covers")


class CompileConfig(BaseModel):
    """Settings of the compile layer. A field is part of every key unless it is annotated."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    splitting_ops: Annotated[tuple[str, ...], TRACED] = ()
    """Custom ops at which the graph is split: `ns::op` or `ns::op.overload`."""

    splitting_patterns: Annotated[tuple[str, ...], TRACED] = ()
    """Custom ops at which the graph is split, as patterns such as `vllm::*attention*`."""

    splitting_predicate: Annotated[Any, SOURCE] = None
    """A function of a graph node that returns whether to split there; or its name, as
    `module:function` or an entry point of the group `piecegraph.splitters`."""

    use_inductor_graph_partition: bool = False
    """True compiles the graph as a whole; Inductor partitions its code at the splitting ops."""

    inputs: Annotated[dict[str, str], TRACED] = Field(default_factory=dict)
    """Tensor inputs by parameter name, such as `int64[num_tokens]`; used to build examples."""

    max_num_tokens: Annotated[int, TRACED, Field(ge=1)] = 2048
    """Largest number of tokens in a step. Guards are proved over [1, max_num_tokens]."""

    symbol_limits: Annotated[dict[str, tuple[int, int]], TRACED] = Field(default_factory=dict)
    """Ranges (inclusive) of symbols other than `num_tokens`."""

    dynamic_shapes: DynamicShapes = DynamicShapes.BACKED_SIZE_OBLIVIOUS
    guards: Annotated[GuardPolicy, TRACED] = GuardPolicy.PROVE

    level: Annotated[int, LEVEL, Field(ge=0, le=3)] = 2
    """O0 to O3: defaults for settings that are not given; see docs/config.md."""

    compiler: str = "inductor"
    """`inductor`, `eager`, a registered torch backend, or an entry point `piecegraph.compilers`."""

    compile_ranges: Annotated[tuple[int, ...], RANGES] = ()
    """Token counts at which a range ends; each range is compiled with a symbolic size."""

    compile_sizes: Annotated[tuple[int, ...], RANGES] = ()
    """Token counts that are compiled static, and autotuned on a GPU."""

    inductor_options: dict[str, Any] = Field(default_factory=dict)

    pass_switches: Annotated[dict[str, bool], SOURCE] = Field(default_factory=dict)
    """Passes to enable or disable by name; the others keep their default."""

    user_passes: Annotated[tuple[Any, ...], SOURCE] = ()
    """Passes to run after the built-in ones: a `GraphPass`, a function of a graph, or the name of
    one, as `module:function` or an entry point of the group `piecegraph.passes`."""

    compile: Annotated[bool, TRACED] = True
    """False calls the model's own forward without a trace. Graphs are captured only if a mode is
    configured; PIECEWISE graphs break at `break_graph` functions and at splitting ops."""

    dedupe: Annotated[bool, TRACED] = True
    """False compiles every piece, even if it equals another."""

    dump_dir: Annotated[Path | None, LOCATION] = None
    """Directory for graphs and generated code, to read and edit; edited code is used."""

    bundle: Annotated[BundleUse, exempt("behavior without a bundle, not its content")] = (
        BundleUse.USE
    )
    """`force` never compiles: a start without a usable bundle raises BundleMissing."""

    cache: Annotated[bool, LOCATION] = True
    """False turns off all caches: ours, and torch's during our compiles."""

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
        """Only symbols that are a size of an input can have a range."""
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
        """Only Inductor with its Python wrapper can partition code."""
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
        """Whether the settings name anything to split at."""
        named = self.splitting_ops or self.splitting_patterns
        return bool(named) or self.splitting_predicate is not None

    def input_specs(self) -> dict[str, InputSpec]:
        """`inputs`, parsed."""
        return {name: InputSpec.parse(text) for name, text in self.inputs.items()}

    def limits(self, symbol: str) -> tuple[int, int]:
        """Inclusive range of a symbol: its own, or that of `num_tokens`."""
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
