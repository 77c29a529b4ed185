"""Settings of tracing and compiling."""

from __future__ import annotations

import importlib
import re
from difflib import get_close_matches
from enum import StrEnum
from functools import reduce
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from ...cache.keys.factors import Feeds, exempt
from ...errors import InvalidSetting
from .settings import Settings

TOKENS = "num_tokens"
"""The symbol of the token dimension."""


class DynamicShapes(StrEnum):
    """How Dynamo treats a dynamic dimension; see torch's `mark_dynamic` and `mark_unbacked`."""

    BACKED = "backed"
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"
    UNBACKED = "unbacked"


class GuardPolicy(StrEnum):
    """What happens to a shape guard: proved at prepare, checked at each step, or dropped."""

    PROVE = "prove"
    CHECK = "check"
    DROP = "drop"


class BundleUse(StrEnum):
    """What happens at a start without a usable bundle: the model is compiled, or it is an error."""

    USE = "use"
    FORCE = "force"


class InputSpec(BaseModel):
    """One tensor input: dtype name and shape, each dimension a size or a symbol's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int | str, ...]

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, name: str) -> str:
        """The dtype's own name: torch.float is float32."""
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            known = [each for each in dir(torch) if isinstance(getattr(torch, each), torch.dtype)]
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name!r} is not a dtype of torch{hint}")
        return str(dtype).removeprefix("torch.")

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
LEVEL = exempt("it only sets defaults; the compiler and the passes that it selects are key factors")
RANGES = Feeds(("trace",), "an artifact does not depend on the other ranges")
TRACED = Feeds(("trace",), "it changes the graph, and the content hash of a piece covers the graph")


class CompileConfig(Settings):
    """What to trace and how to compile it. Each field is in every key unless it says otherwise."""

    inputs: Annotated[dict[str, str], TRACED] = Field(default_factory=dict)
    """Tensor inputs by parameter name, as `"int64[num_tokens]"`. Examples are built from it. A
    tensor inside a dict, a list or `**kwargs` has a dotted name: `"states.hidden"`, `"aux.0"`."""

    max_num_tokens: Annotated[int, TRACED, Field(ge=1)] = 2048
    """Largest number of tokens in a step; guards are proved from min_num_tokens to this."""

    min_num_tokens: Annotated[int, TRACED, Field(ge=1)] = 1
    """Smaller batches are padded to this number of tokens, in all modes. It is raised to the first
    size from which all guards hold, if the model computes the same for a padded batch."""

    symbol_limits: Annotated[dict[str, tuple[int, int]], TRACED] = Field(default_factory=dict)
    """`{name: (low, high)}`, inclusive, for dynamic sizes other than `num_tokens`."""

    splitting_ops: Annotated[tuple[str, ...], TRACED] = ()
    """Custom ops at which the graph is split: `"ns::op"` or `"ns::op.overload"`. A model need not
    have all of them, but one."""

    splitting_patterns: Annotated[tuple[str, ...], TRACED] = ()
    """Custom ops at which the graph is split, as patterns such as `"vllm::*attention*"`."""

    splitting_predicate: Annotated[Any, SOURCE] = None
    """A function of a graph node that returns whether to split there, or its name, as
    `"module:function"` or an entry point of the group `piecegraph.splitters`."""

    level: Annotated[int, LEVEL, Field(ge=0, le=3)] = 2
    """Optimization level 0 to 3: the defaults of settings that are not set. 0 neither compiles nor
    captures graphs, 1 has PIECEWISE graphs, 2 and 3 have FULL_AND_PIECEWISE. 3 also autotunes
    `compile_sizes`."""

    compile: Annotated[bool, TRACED] = True
    """`False` runs the model's own forward without tracing it. Then there are graphs only if
    `graph_mode` is set; PIECEWISE ones break at `break_graph` functions and at splitting ops."""

    compiler: str = "inductor"
    """`"inductor"`, `"eager"` (node by node), a registered torch backend, or an entry point of the
    group `piecegraph.compilers`."""

    dynamic_shapes: DynamicShapes = DynamicShapes.BACKED_SIZE_OBLIVIOUS
    """How Dynamo treats a dynamic size: `"backed"`, `"backed_size_oblivious"` or `"unbacked"`."""

    guards: Annotated[GuardPolicy, TRACED] = GuardPolicy.PROVE
    """What happens to a condition on sizes that the trace relies on: it is proved at prepare
    (`"prove"`), checked at each step (`"check"`), or dropped (`"drop"`, which allows wrong
    results)."""

    compile_ranges: Annotated[tuple[int, ...], RANGES] = ()
    """Token counts at which a range ends. Each range is compiled separately, for any size in it."""

    compile_sizes: Annotated[tuple[int, ...], RANGES] = ()
    """Token counts that get their own static code; `level=3` autotunes it on a GPU."""

    dedupe: Annotated[bool, TRACED] = True
    """`False` compiles equal pieces separately."""

    use_inductor_graph_partition: bool = False
    """`True` compiles the whole graph and lets Inductor split its code at the splitting ops; see
    docs/models.md."""

    inductor_options: dict[str, Any] = Field(default_factory=dict)
    """Inductor options by name, as in `torch._inductor.config`."""

    pass_switches: Annotated[dict[str, bool], SOURCE] = Field(default_factory=dict)
    """`{name: on}` for the graph passes of the library. Others keep their default."""

    user_passes: Annotated[tuple[Any, ...], SOURCE] = ()
    """Passes to run after those of the library: a `GraphPass`, a function of a graph, or the name
    of one, as `"module:function"` or an entry point of the group `piecegraph.passes`."""

    dump_dir: Annotated[Path | None, LOCATION] = None
    """A directory for readable graphs and generated code. Edits of that code take effect; see
    docs/debugging.md."""

    bundle: Annotated[BundleUse, exempt("behavior without a bundle, not its content")] = (
        BundleUse.USE
    )
    """What happens at a start without a usable bundle: the model is compiled (`"use"`), or
    BundleMissing is raised (`"force"`)."""

    cache: Annotated[bool, LOCATION] = True
    """`False` turns off every cache layer: ours, and torch's for our compiles."""

    cache_dir: Annotated[Path | None, LOCATION] = None
    """The private cache directory; `None` uses `PIECEGRAPH_CACHE_DIR`, else the user's cache
    directory."""

    @field_validator("inputs")
    @classmethod
    def _check_inputs(cls, inputs: dict[str, str]) -> dict[str, str]:
        return {name: str(InputSpec.parse(text)) for name, text in inputs.items()}

    @field_validator("symbol_limits")
    @classmethod
    def _check_limits(cls, limits: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        if TOKENS in limits:
            raise ValueError(f"the range of {TOKENS} is min_num_tokens to max_num_tokens")
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
    def _check_compile_sizes(self) -> Self:
        """Ranges and sizes are within the served range."""
        for name in ("compile_ranges", "compile_sizes"):
            for value in getattr(self, name):
                if not 1 <= value <= self.max_num_tokens:
                    raise InvalidSetting(
                        name=name,
                        value=value,
                        reason="it is outside the served range",
                        expected=f"1 to {self.max_num_tokens} (max_num_tokens)",
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

    @model_validator(mode="after")
    def _check_token_range(self) -> Self:
        if self.min_num_tokens > self.max_num_tokens:
            raise InvalidSetting(
                name="min_num_tokens",
                value=self.min_num_tokens,
                reason="it is above max_num_tokens",
                expected=f"1 to {self.max_num_tokens}",
            )
        return self

    def autotunes(self) -> bool:
        """Whether code for `compile_sizes` is autotuned, on a device that supports it."""
        return self.level >= 3 and bool(self.compile_sizes)

    def cuts(self) -> bool:
        """Whether the settings name anything to split at."""
        named = self.splitting_ops or self.splitting_patterns
        return bool(named) or self.splitting_predicate is not None

    def input_specs(self) -> dict[str, InputSpec]:
        """`inputs`, parsed."""
        return {name: InputSpec.parse(text) for name, text in self.inputs.items()}

    def limits(self, symbol: str) -> tuple[int, int]:
        """Inclusive range of a symbol: its own, or that of `num_tokens`."""
        low = self.min_num_tokens if symbol == TOKENS else 1
        return self.symbol_limits.get(symbol, (low, self.max_num_tokens))


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
