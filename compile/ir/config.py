"""Settings of tracing and compiling: as a user states them, and as compiling reads them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from functools import reduce
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator
from torch.fx import Graph, Node

from ...cache.keys.factors import plain
from ...errors import InvalidFactor, InvalidSetting
from ...settings import Settings, nearest
from ...torch_compat.basics.settings import inductor_option_names

TOKENS = "num_tokens"
"""The symbol of the token dimension."""


class DynamicShapes(StrEnum):
    """How Dynamo treats a dynamic dimension; see torch's `mark_dynamic` and `mark_unbacked`."""

    BACKED = "backed"
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"
    UNBACKED = "unbacked"


class GuardPolicy(StrEnum):
    """What happens to a shape guard: proved at prepare, by one trace or by one for each interval of
    token counts, checked at each step, or dropped."""

    PROVE = "prove"
    SPLIT = "split"
    CHECK = "check"
    DROP = "drop"


class Partition(StrEnum):
    """What is split at the splitting ops: the graph, before its pieces are compiled, or the code
    that Inductor generates from the whole graph."""

    GRAPH = "graph"
    INDUCTOR = "inductor"


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
            dtypes = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
            near = get_close_matches(name, dtypes, 1)
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


Inputs = Mapping[str, str | None]
"""The arguments of one call form: tensors as `InputSpec` writes them, or None."""


def call_forms(inputs: Inputs | tuple[Inputs, ...]) -> tuple[Inputs, ...]:
    """The arguments of each call form."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def input_specs(inputs: Inputs) -> dict[str, InputSpec]:
    """The tensors among `inputs`, parsed."""
    return {name: InputSpec.parse(text) for name, text in inputs.items() if text is not None}


class Tracing(Settings):
    """The sizes that a trace holds for, and what happens to conditions on them."""

    _path: ClassVar[str] = "tracing"

    min_num_tokens: int = Field(default=1, ge=1)
    """Smaller batches are padded to this number of tokens, in all modes. You state that the model
    computes the same for real rows then: nothing looks whether it does."""

    symbol_limits: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """`{name: (low, high)}`, inclusive, for dynamic sizes other than `num_tokens`."""

    dynamic_shapes: DynamicShapes = DynamicShapes.BACKED_SIZE_OBLIVIOUS
    """How Dynamo treats a dynamic size: `"backed"`, `"backed_size_oblivious"` or `"unbacked"`."""

    guards: GuardPolicy = GuardPolicy.PROVE
    """What happens to a condition on sizes that the trace relies on: it is proved at prepare
    (`"prove"`), or there is one trace for each of at most 8 intervals of token counts on which it
    holds (`"split"`), or it is checked at each step, where sizes that break it raise GuardBroken
    (`"check"`), or dropped (`"drop"`, which allows wrong results)."""

    @field_validator("symbol_limits")
    @classmethod
    def _check_limits(cls, limits: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        if TOKENS in limits:
            raise ValueError(f"the range of {TOKENS} is min_num_tokens to max_num_tokens")
        for symbol, (low, high) in limits.items():
            if not 0 <= low <= high:
                raise ValueError(f"{symbol} cannot range from {low} to {high}")
        return limits


class Codegen(Settings):
    """How code is generated from the pieces of a trace."""

    _path: ClassVar[str] = "codegen"

    ranges: tuple[int, ...] = ()
    """Token counts at which a range ends. Each range is compiled separately, for any size in it."""

    sizes: tuple[int, ...] = ()
    """Token counts that get their own static code; `level=3` autotunes it on a GPU."""

    partition: Partition = Partition.GRAPH
    """What is split at the splitting ops: the traced graph, of which each unique piece is compiled
    once (`"graph"`), or the code that Inductor generates from the whole graph (`"inductor"`), which
    shares values across splitting ops and takes longer to compile; see docs/partitions.md."""

    inductor_options: dict[str, Any] = Field(default_factory=dict)
    """Inductor options by name, as in `torch._inductor.config`. Values are plain data, which can be
    in a key; a pass over a graph goes into `passes`."""

    passes: dict[str, Any] = Field(default_factory=dict)
    """Passes over the graph of a piece by name, in order. `True` or `False` turns a pass on or
    off: `functionalization`, `unfused_add`, an entry point of the group
    `piecegraph.passes`, in which an engine declares its own, and `dedupe`, which compiles equal
    pieces once. Any other value is a pass to run after those: a `GraphPass`, a function of a graph,
    or the name of one, as `"module:function"` or an entry point."""

    dump_dir: Path | None = None
    """A directory for readable graphs and generated code. Edits of that code take effect; see
    docs/debugging.md."""

    @field_validator("inductor_options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        names = inductor_option_names() if options else ()
        for name, value in options.items():
            setting = f"codegen.inductor_options[{name!r}]"
            if name not in names:
                near = nearest(name, names)
                guess = f" (did you mean {near!r}?)" if near else ""
                raise InvalidSetting(
                    name=setting,
                    value=value,
                    reason=f"Inductor has no such option{guess}",
                    expected="an option of torch._inductor.config",
                )
            try:
                plain(setting, value)
            except InvalidFactor as error:
                raise InvalidSetting(
                    name=setting,
                    value=value,
                    reason=f"{error.facts['reason']}, so that it cannot be in a key",
                    expected="plain data, and codegen.passes for a pass over a graph",
                ) from None
        return options

    @field_serializer("passes", when_used="json")
    def _named(self, passes: dict[str, Any]) -> dict[str, Any]:
        return {name: shown(value) for name, value in passes.items()}


def shown(value: Any) -> Any:
    """A name for people of what a setting refers to; keys hold its source."""
    return value if isinstance(value, bool | str) else str(getattr(value, "__qualname__", value))


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A named rewrite. `apply` changes a graph and returns the number of rewrites."""

    name: str
    apply: Callable[[Graph], int | None]
    max_num_tokens: int | None = None
    """Enabled only for ranges that end here or below; None for all ranges."""
    before_grad: bool = False
    """Whether it runs on the graph as traced, before decomposition, not on the post-grad one."""
    uuid: str | None = None
    """Stands for its code in keys, for a pass whose code does not say what it does; so does what
    `uuid()` of an Inductor's `CustomGraphPass` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """What the compiler of a piece reads of the settings: all of it is in each codegen key."""

    compiler: str = "inductor"
    dynamic_shapes: DynamicShapes = DynamicShapes.BACKED_SIZE_OBLIVIOUS
    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    cut_at: tuple[str, ...] = ()
    """The ops at which Inductor partitions its code, once they are known."""
    autotune: bool = False
    """Whether code for `sizes` is autotuned, on a device that supports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """What tracing, splitting and compiling read of the settings: all of it is in the trace key.

    Locations, and what only decides when code is compiled, are not among it.
    """

    compile: bool = True
    inputs: Inputs | tuple[Inputs, ...] = field(default_factory=dict)
    """Of one call form, or of several."""
    min_num_tokens: int = 1
    max_num_tokens: int = 2048
    symbol_limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    guards: GuardPolicy = GuardPolicy.PROVE
    splitting_ops: tuple[str, ...] = ()
    """Names, and patterns of names."""
    splitting_functions: tuple[Callable[[Node], bool], ...] = ()
    partition: Partition = Partition.GRAPH
    dedupe: bool = True
    """Whether equal pieces are compiled once."""
    ranges: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    passes: tuple[GraphPass, ...] = ()
    """The enabled ones, in order."""
    code: CodeConfig = field(default_factory=CodeConfig)

    def input_specs(self) -> dict[str, InputSpec]:
        """The tensors of the only call form."""
        (form,) = call_forms(self.inputs)
        return input_specs(form)

    def limits(self, symbol: str) -> tuple[int, int]:
        """Inclusive range of a symbol: its own, or that of `num_tokens`."""
        low = self.min_num_tokens if symbol == TOKENS else 1
        return self.symbol_limits.get(symbol, (low, self.max_num_tokens))


def named_object(name: str, group: str, setting: str) -> Any:
    """The object `name` refers to: `module:attribute`, or an entry point of `group`.

    Raises InvalidSetting for `setting` if there is none.
    """
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return reduce(getattr, attribute.split("."), importlib.import_module(module))
        (point,) = entry_points(group=group, name=name)
        return point.load()
    except (ImportError, AttributeError, ValueError) as error:
        reason = str(error) if colon else f"the group {group} has no such entry point"
        raise InvalidSetting(
            name=setting,
            value=name,
            reason=reason,
            expected=f"module:attribute, or an entry point of the group {group}",
        ) from error
