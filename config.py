"""`Config`: all settings of a prepared model, and the part of them that each layer is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AllowInfNan, Field, field_serializer, field_validator, model_validator

from .cache.settings import CacheSettings
from .compile.ir.config import (
    TOKENS,
    CodeConfig,
    Codegen,
    CompileConfig,
    Inputs,
    InputSpec,
    Partition,
    Tracing,
    call_forms,
    input_specs,
    named_object,
    shown,
)
from .dispatch import (
    DENSE_END,
    FORM,
    AttentionSupport,
    Axis,
    CaptureStrategy,
    DispatchPlan,
    GraphMode,
    ResolvedMode,
    align_sizes,
    bucket_plan,
    decode_tiers,
    default_capture_sizes,
    lora_cases,
    make_plan,
    resolve_mode,
    user_capture_sizes,
)
from .dispatch.resolve import UNDECLARED, UNSPLIT
from .dispatch.settings import Attention, Sizes, Variants
from .errors import InvalidSetting
from .settings import Settings, nearest

SPLITTERS = "piecegraph.splitters"
"""The entry points that `splitting_ops` may name."""


class BundleUse(StrEnum):
    """What a start without a usable bundle does: it compiles first, serves uncompiled and compiles
    in a thread, does this and then builds libraries for the next start, or is an error."""

    USE = "use"
    SERVE = "serve"
    SERVE_AHEAD = "serve_ahead"
    FORCE = "force"


class Padding(StrEnum):
    """What a step writes into the padding of an input. KEEP leaves the memory as it is: zeros at
    first, later the values of an earlier step."""

    ZERO = "zero"
    SENTINEL = "sentinel"
    REPEAT = "repeat"
    KEEP = "keep"


class AfterSeal(StrEnum):
    """What happens when something compiles or captures after `seal()`, outside the strategy."""

    COUNT = "count"
    LOG = "log"
    RAISE = "raise"
    RAISE_ALL = "raise_all"


class Eager(Settings):
    """All graphs are captured at startup."""

    _path: ClassVar[str] = "strategy"
    kind: ClassVar[CaptureStrategy] = CaptureStrategy.EAGER
    captures_per_step: ClassVar[int] = 1
    """Between two steps, after a model has switched to compiled code (`bundle="serve"`)."""


class Delayed(Settings):
    """The largest graph of each mode is captured at startup, the others between steps."""

    _path: ClassVar[str] = "strategy"
    kind: ClassVar[CaptureStrategy] = CaptureStrategy.DELAYED

    captures_per_step: int = Field(default=1, ge=1)
    """The most captures between two steps."""


class Lazy(Settings):
    """The largest graph of each mode is captured at startup, the others on first use."""

    _path: ClassVar[str] = "strategy"
    kind: ClassVar[CaptureStrategy] = CaptureStrategy.LAZY

    captures_per_step: int = Field(default=1, ge=1)
    """The most captures between two steps."""

    max_bytes: int | None = Field(default=None, ge=0)
    """Bytes of graphs that are captured after startup; above them the graphs that save least per
    byte are evicted."""


Strategy = Eager | Delayed | Lazy

STRATEGIES = {each.kind.value: each for each in (Eager, Delayed, Lazy)}


class Steps(Settings):
    """What steps write into padding, and the limits that hold while a model serves."""

    _path: ClassVar[str] = "steps"

    padding: dict[str, Padding | int | Annotated[float, AllowInfNan()]] = Field(
        default_factory=dict
    )
    """What padding contains, by input: `"zero"` (the default), `"repeat"` (the last real row),
    `"keep"` (the previous contents), or a number, such as the cache slot reserved for padding."""

    after_seal: AfterSeal = AfterSeal.LOG
    """What happens when something compiles or captures after `seal()`, outside the strategy: it is
    counted (`"count"`), logged too (`"log"`), or an error if it is in a step or on the model's
    backend (`"raise"`), or wherever it is in the engine's thread (`"raise_all"`)."""

    memory_limit: int | float | None = Field(default=None, ge=0)
    """The most memory for graphs: an integer is bytes, a float is a fraction of the device memory
    that is free at planning. Graphs that would exceed it are not captured."""


class Shadow(Settings):
    """Steps are proved while the model serves: some run again uncompiled, and are compared."""

    _path: ClassVar[str] = "shadow"

    every: int = Field(default=1000, ge=1)
    """One step in so many is proved, once each graph is."""

    share: float = Field(default=0.01, gt=0, le=1)
    """The most time that proofs may take, as a share of all time. Steps beyond it are skipped,
    except the tenth one of a graph without a proof."""


def check_choice(choices: Collection[str], setting: str, name: str, reason: str) -> None:
    """Raise InvalidSetting, with the valid names, if `name` is not one of `choices`."""
    if name not in choices:
        expected = "one of " + ", ".join(choices)
        raise InvalidSetting(name=setting, value=name, reason=reason, expected=expected)


def without_tokens(inputs: Inputs | tuple[Inputs, ...]) -> InvalidSetting:
    """The error for a model without an input that has the token dimension."""
    return InvalidSetting(
        name="inputs",
        value=inputs,
        reason=f"no input that the model reads has a dimension {TOKENS}",
        expected=f"that name for the token dimension, as in input_ids='int64[{TOKENS}]'",
    )


def _check_forms(forms: Sequence[Inputs]) -> None:
    """Raise InvalidSetting for call forms that no call could tell apart."""
    tensors = [frozenset(input_specs(form)) for form in forms]
    for number, names in enumerate(tensors):
        if (first := tensors.index(names)) != number:
            raise InvalidSetting(
                name="inputs",
                value=[dict(forms[first]), dict(forms[number])],
                reason="two call forms have the same tensors",
                expected="forms that differ in which tensors there are",
            )


class Config(Settings):
    """Settings of a model to serve. Choices may be names and objects dicts:
    `tracing={"guards": "check"}`. See docs/config.md and `help(piecegraph.Tracing)`.
    """

    _brief: ClassVar[bool] = True

    inputs: dict[str, str | None] | tuple[dict[str, str | None], ...] = Field(default_factory=dict)
    """Tensors by parameter, as `"int64[num_tokens]"`.
    Examples are built from them. A tensor inside a dict, a list or `**kwargs` has a dotted name:
    `"states.hidden"`, `"aux.0"`; None is an argument that is None. Several such dicts are call
    forms of one model, as with `input_ids` and with `inputs_embeds`; see docs/dispatch.md."""

    max_num_tokens: int = Field(default=2048, ge=1)
    """The most tokens of a step.
    Guards are proved from `tracing.min_num_tokens` to this."""

    max_num_reqs: int = Field(default=256, ge=1)
    """The most requests of a step."""

    splitting_ops: tuple[Any, ...] = ()
    """Ops at which the graph is split: `"ns::op"`.
    Also `"ns::op.overload"`, a pattern such as `"vllm::*attention*"`, or a function of a graph node
    that returns whether to split there, itself or by name: `"module:function"` or an entry point of
    the group `piecegraph.splitters`. A model need not have all ops, but one."""

    graph_mode: GraphMode | None = None
    """`"PIECEWISE"`, `"FULL"`, ...; None: by level.
    `"NONE"`, `"PIECEWISE"`, `"FULL"`, `"FULL_DECODE_ONLY"` or `"FULL_AND_PIECEWISE"`. The report
    says which mode is used, and why."""

    capture_sizes: tuple[int, ...] | None = None
    """Sizes in tokens that get graphs, ascending.
    `None` uses `default_capture_sizes`."""

    strategy: Strategy = "eager"  # type: ignore[assignment]
    """When graphs are captured.
    All at startup (`"eager"`), the largest of each mode at startup and the rest between steps
    (`"delayed"`), or the rest on first use (`"lazy"`); or an object with the strategy's own
    settings: `Delayed(captures_per_step=2)`."""

    compile: bool = True
    """False runs the model's forward untraced.
    Then there are graphs only if `graph_mode` is set; PIECEWISE ones break at `break_graph`
    functions and at splitting ops."""

    compiler: str = "inductor"
    """`"inductor"` or `"eager"` (node by node).
    Or a registered torch backend, or an entry point of the group `piecegraph.compilers`."""

    level: int = Field(default=2, ge=0, le=3)
    """Optimization level 0 to 3: sets defaults.
    0 neither compiles nor captures graphs, 1 has PIECEWISE graphs, 2 and 3 have FULL_AND_PIECEWISE.
    3 also autotunes `codegen.sizes`."""

    cache: CacheSettings | Literal[False] = True  # type: ignore[assignment]
    """False turns off the cache, torch's too.
    A `CacheSettings` states shared layers and the size of the private directory."""

    cache_dir: Path | None = None
    """The private cache directory.
    `None` uses `PIECEGRAPH_CACHE_DIR`, else the user's cache directory."""

    bundle: BundleUse = BundleUse.USE
    """A start without a bundle: `"use"` compiles.
    At a cold start, one without a usable bundle, the model is compiled first (`"use"`), or served
    uncompiled at once until a thread has compiled it (`"serve"`, see docs/starts.md), with
    libraries for the next start after that (`"serve_ahead"`), or BundleMissing is raised
    (`"force"`)."""

    tracing: Tracing = Tracing()
    """Range of sizes, and guards on them."""

    codegen: Codegen = Codegen()
    """Ranges, passes and options of the compiler."""

    sizes: Sizes = Sizes()
    """Alignment, padding limit, buckets."""

    variants: Variants = Variants()
    """Query lengths, LoRA, further axes."""

    attention: Attention = Attention()
    """What can run inside a FULL graph."""

    steps: Steps = Steps()
    """Padding, memory, what happens after seal."""

    shadow: Shadow | None = None
    """Prove one step in N while serving.
    `Shadow(every=1000)` runs it again uncompiled and compares. See docs/reference.md."""

    @field_validator("inputs")
    @classmethod
    def _check_inputs(cls, inputs: Any) -> Any:
        forms = [
            {name: text and str(InputSpec.parse(text)) for name, text in form.items()}
            for form in call_forms(inputs)
        ]
        _check_forms(forms)
        return tuple(forms) if len(forms) > 1 else dict(*forms)

    @field_validator("splitting_ops", mode="after")
    @classmethod
    def _check_splitting_ops(cls, rules: tuple[Any, ...]) -> tuple[Any, ...]:
        for rule in rules:
            if not _is_op(rule) and not callable(_splitting_function(rule)):
                raise InvalidSetting(
                    name="splitting_ops",
                    value=rule,
                    reason="it is neither a name nor a function",
                    expected='"ns::op", a pattern such as "ns::*attn*", or a function of a node',
                )
        return rules

    @field_validator("strategy", mode="before")
    @classmethod
    def _named_strategy(cls, strategy: Any) -> Any:
        """A strategy's name, or a dict with its name as `kind`, as its object."""
        if isinstance(strategy, Strategy):
            return strategy
        settings = dict(strategy) if isinstance(strategy, dict) else {"kind": strategy}
        kind = settings.pop("kind", None)
        if not isinstance(kind, str) or kind not in STRATEGIES:
            near = nearest(str(kind), STRATEGIES)
            raise InvalidSetting(
                name="strategy",
                value=kind,
                reason=f"unknown choice (did you mean {near!r}?)" if near else "unknown choice",
                expected="'eager', 'delayed', 'lazy', or one of Eager, Delayed and Lazy",
            )
        return STRATEGIES[kind](**settings)

    @field_validator("cache", mode="before")
    @classmethod
    def _cache_object(cls, cache: Any) -> Any:
        return CacheSettings() if cache is True else cache

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        """Sizes are those of inputs, and within the served range."""
        symbols = set[int | str]()
        for form in call_forms(self.inputs):
            dims = {dim for spec in input_specs(form).values() for dim in spec.shape}
            if form and TOKENS not in dims:
                raise without_tokens(form)
            symbols |= dims
        for symbol in self.tracing.symbol_limits:
            if symbol not in symbols:
                raise InvalidSetting(
                    name="tracing.symbol_limits",
                    value=self.tracing.symbol_limits,
                    reason=f"no input in Config.inputs has a dimension {symbol}",
                    expected="ranges of symbols that occur in inputs, such as int64[num_reqs]",
                )
        self._check_within("tracing.min_num_tokens", self.tracing.min_num_tokens)
        self._check_within("codegen.ranges", *self.codegen.ranges)
        self._check_within("codegen.sizes", *self.codegen.sizes)
        return self

    @model_validator(mode="after")
    def _check_dispatch(self) -> Self:
        """There is a graph mode, and a plan of graphs for it."""
        forms = range(len(call_forms(self.inputs)))
        if len(forms) > 1 and self.sizes.buckets:
            raise InvalidSetting(
                name="sizes.buckets",
                value=f"{len(self.sizes.buckets)} buckets",
                reason="graphs of buckets are of one call form",
                expected="one dict of inputs, or no buckets",
            )
        for axis in self.variants.axes:
            if axis.name == FORM and (axis.rounds_up or not {*axis.values} <= {*forms}):
                raise InvalidSetting(
                    name="variants.axes",
                    value=axis,
                    reason=f"{FORM!r} is the number of a call form in inputs",
                    expected=f"values from 0 to {forms[-1]}, and no rounds_up",
                )
        if self.capture_sizes is not None:
            user_capture_sizes(self.capture_sizes, max_num_tokens=self.max_num_tokens)
        dispatch_plan(resolve_graph_mode(self).mode, self)
        return self

    def _check_within(self, name: str, *values: int) -> None:
        for value in values:
            if not 1 <= value <= self.max_num_tokens:
                raise InvalidSetting(
                    name=name,
                    value=value,
                    reason="it is outside the served range",
                    expected=f"1 to {self.max_num_tokens} (max_num_tokens)",
                )

    @model_validator(mode="after")
    def _check_compiler(self) -> Self:
        """Named passes exist, and only Inductor's Python code can be partitioned."""
        if self.codegen.passes:
            _enabled_passes(self)
        partition, cpp = self.codegen.partition, self.codegen.inductor_options.get("cpp_wrapper")
        if partition is Partition.INDUCTOR and (self.compiler != "inductor" or cpp):
            raise InvalidSetting(
                name="codegen.partition",
                value=partition.value,
                reason=f"{'cpp_wrapper' if cpp else self.compiler} cannot partition code",
                expected="'graph', or compiler='inductor' without the option cpp_wrapper",
            )
        return self

    @field_serializer("splitting_ops", when_used="json")
    def _named_ops(self, rules: tuple[Any, ...]) -> list[Any]:
        return [shown(rule) for rule in rules]

    @field_serializer("strategy", when_used="json")
    def _strategy_with_name(self, strategy: Strategy) -> dict[str, Any]:
        return {"kind": strategy.kind.value, **strategy.model_dump()}


def compile_config(config: Config) -> CompileConfig:
    """What compiling is given of the settings, with the objects that names refer to."""
    tracing, codegen = config.tracing, config.codegen
    ops = [rule for rule in config.splitting_ops if _is_op(rule)]
    return CompileConfig(
        compile=config.compile,
        inputs=config.inputs,
        min_num_tokens=tracing.min_num_tokens,
        max_num_tokens=config.max_num_tokens,
        symbol_limits=tracing.symbol_limits,
        guards=tracing.guards,
        splitting_ops=tuple(ops),
        splitting_functions=tuple(
            _splitting_function(rule) for rule in config.splitting_ops if rule not in ops
        ),
        partition=codegen.partition,
        dedupe=codegen.passes.get("dedupe", True),
        ranges=codegen.ranges,
        sizes=codegen.sizes,
        passes=_enabled_passes(config),
        code=CodeConfig(
            compiler=config.compiler,
            dynamic_shapes=tracing.dynamic_shapes,
            inductor_options=codegen.inductor_options,
            autotune=config.level >= 3 and bool(codegen.sizes),
        ),
    )


def resolve_graph_mode(config: Config) -> ResolvedMode:
    """The graph mode in use, with the reasons; raises FullModeUnsupported."""
    return resolve_mode(
        config.graph_mode,
        support=attention_support(config),
        pieces=bool(config.splitting_ops) or not config.compile,
        level=config.level,
        query_len=max(config.variants.all_query_lens()),
        varlen_decode=config.attention.varlen_decode,
        eager=not config.compile and config.graph_mode is None,
    )


def dispatch_plan(mode: GraphMode, config: Config) -> DispatchPlan:
    """The graphs to capture for `mode`; none for mode NONE."""
    variants, forms = config.variants, len(call_forms(config.inputs))
    if config.sizes.buckets and mode is not GraphMode.NONE:
        sizes = config.sizes
        return bucket_plan(sizes.buckets, config.max_num_reqs, sizes.bucket_memory)
    axes = variants.axes
    if forms > 1 and all(axis.name != FORM for axis in axes):
        axes = (*axes, Axis(FORM, tuple(range(forms))))
    return make_plan(
        mode,
        capture_sizes(mode, config),
        max_num_reqs=config.max_num_reqs,
        query_lens=variants.all_query_lens(),
        varlen_decode=config.attention.varlen_decode,
        lora_cases=lora_cases(variants.max_loras, variants.lora_graphs),
        axes=axes,
        padding=config.sizes.padding_limit,
        mixed_end=DENSE_END if config.capture_sizes is None else None,
    )


def capture_sizes(mode: GraphMode, config: Config) -> tuple[int, ...]:
    """The sizes of `config`, or the default sizes; none for mode NONE and with buckets."""
    alignment, schedule = config.sizes.alignment, config.variants.speculation_schedule
    if config.sizes.buckets or mode is GraphMode.NONE:
        return ()
    if config.capture_sizes is not None:
        sizes = user_capture_sizes(config.capture_sizes, max_num_tokens=config.max_num_tokens)
        return align_sizes(sizes, alignment, limit=config.max_num_tokens)
    return default_capture_sizes(
        config.max_num_reqs,
        config.max_num_tokens,
        query_len=max(config.variants.all_query_lens()),
        tiers=decode_tiers(schedule) if schedule else (),
        alignment=alignment,
    )


def attention_support(config: Config) -> dict[str, AttentionSupport]:
    """Attention capability by group. Ops for which nothing is declared support nothing."""
    support = config.attention.support
    if support is None:
        if config.splitting_ops or not config.compile:
            return {UNDECLARED if config.splitting_ops else UNSPLIT: AttentionSupport.NEVER}
        return {}
    return {"attention": support} if isinstance(support, AttentionSupport) else dict(support)


def _enabled_passes(config: Config) -> tuple[Any, ...]:
    from .compile.passes.graph_pass import enabled_passes

    return enabled_passes(config.level, config.codegen.passes)


def _is_op(rule: Any) -> bool:
    """Whether a rule for where to split names ops; else it is a function, or the name of one."""
    return isinstance(rule, str) and ("::" in rule or any(mark in rule for mark in "*?["))


def named_ops(rules: tuple[Any, ...]) -> tuple[str, ...]:
    """The ops among the rules for where to split that are named in full."""
    marks = frozenset("*?[")
    return tuple(rule for rule in rules if _is_op(rule) and marks.isdisjoint(rule))


def _splitting_function(rule: Any) -> Callable[[Any], bool]:
    function: Callable[[Any], bool] = (
        named_object(rule, SPLITTERS, "splitting_ops") if isinstance(rule, str) else rule
    )
    return function
