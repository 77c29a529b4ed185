"""vLLM runs its model through piecegraph: one option, `--worker-cls`.

    vllm serve MODEL --worker-cls piecegraph.tools.integrations.vllm.Worker
    LLM(MODEL, worker_cls="piecegraph.tools.integrations.vllm.Worker")

Settings of `Config` are in vLLM's `additional_config`, under the name `piecegraph`. Scheduler, KV
cache, attention and sampler are vLLM's: the module that vLLM would give to torch.compile is
prepared instead, and split at vLLM's attention ops, which find their metadata in vLLM's forward
context. A model that cannot be prepared runs as in vLLM alone, after one warning with the reason.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import vllm.ir.op
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import get_tp_group, graph_capture
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.utils.import_utils import resolve_obj_by_qualname

from ... import (
    Batch,
    BatchDescriptor,
    Config,
    Decision,
    Events,
    GraphPass,
    PaddingLimit,
    PiecegraphError,
    PreparedModel,
    Ranks,
    RuntimeMode,
    Shadow,
    prepare,
)
from ...compile.ir.ops import is_registered
from ...errors import (
    ArgumentFixed,
    BundleMissing,
    BundleStale,
    CallFormUnknown,
    InputMismatch,
    SizeOutOfRange,
)
from ...runtime.core.allowed_work import allow_compilation
from ...runtime.tensors_by_path import tensors_by_path
from ..explain import explain
from .prometheus import MultiprocessMetrics, metrics_text
from .unused import warn_if_unused

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

log = logging.getLogger("piecegraph")

# between pipeline stages, and what a vision tower adds to the first layers
torch.export.register_dataclass(IntermediateTensors)


def capture_context(device: torch.device) -> AbstractContextManager[Any]:
    """What vLLM captures in: at its end custom all-reduce registers the memory of graphs."""
    return graph_capture(device) if device.type == "cuda" else nullcontext()


VERIFY_S = 120.0
"""How long a start waits for the verification of a model that reads vLLM's forward context."""

ATTENTION_OPS = (
    "vllm::unified_attention_with_output", "vllm::unified_kv_cache_update",
    "vllm::unified_mla_attention_with_output", "vllm::unified_mla_kv_cache_update",
    "vllm::mamba_mixer", "vllm::mamba_mixer2", "vllm::short_conv", "vllm::linear_attention",
    "vllm::qwen_gdn_attention_core", "vllm::cpu_gdn_attention_core",
    "vllm::olmo_hybrid_gdn_full_forward",
    "vllm::sparse_attn_indexer",
)  # fmt: skip
"""Splitting ops where vLLM's `splitting_ops` is empty, as it is on a CPU."""


class Worker(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker for this platform, with a prepared model."""

    prepared: PreparedModel | None = None
    """The prepared model; None before the first run, and for a model that could not be prepared."""

    refusal: str | None = None
    """Why the model was not prepared."""

    _metrics: MultiprocessMetrics | None = None

    _tried_captures = False

    _left = 0
    """Bytes by which `prepare` made this process larger."""

    def load_model(self, **options: Any) -> None:
        """Load the model; its first run, with vLLM's dummy inputs, prepares it."""
        config_for(self.vllm_config, {})  # raises InvalidSetting for a wrong setting
        super().load_model(**options)
        _log_as_vllm_does()
        if self.model_config.enforce_eager:
            self._refuse("enforce_eager is set")
            return
        if self.lora_config is not None and current_platform.is_cpu():
            self._refuse("vLLM's LoRA on a CPU branches in Python on the adapters of a batch")
            return
        module: Any = compiled_module(self.model_runner.get_model())
        if module is None:
            self._refuse("vLLM compiles no module of this model, or several")
            return
        take_over(module, partial(self._prepare_and_run, module))
        for name, after in (
            ("capture_model", self._captured), ("profile_cudagraph_memory", self._profiled)
        ):  # fmt: skip
            if own := getattr(self.model_runner, name, None):
                setattr(self.model_runner, name, partial(after, own))

    def determine_available_memory(self) -> int:
        """vLLM's profile, of a model that is prepared before: what compiling takes is no activation
        memory. On a CPU vLLM subtracts the memory of the process; what `prepare` has left in it,
        which is more if it compiled, is not subtracted."""
        self._prepare_early()
        explicit = self.cache_config.kv_cache_memory_bytes is not None
        available = int(super().determine_available_memory())
        return available if explicit or not current_platform.is_cpu() else available + self._left

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up, with our captures after its own. From here on nothing is compiled."""
        self._prepare_early()
        times = super().compile_or_warm_up_model()
        if self.prepared is not None:
            if not self._tried_captures:  # a runner without captures
                self._capture(self.prepared)
            self._allow_logprobs()
            self.prepared.seal()
            warn_if_unused(self.model_runner.get_model(), self.prepared)
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                self._metrics = MultiprocessMetrics(self.prepared)
                self._metrics.update()
        return times

    def _prepare_early(self) -> None:
        if self.prepared is None and self.refusal is None:
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.profile_run()

    def _profiled(self, estimate: Callable[[], int]) -> int:
        """vLLM's estimate of what graphs will take, and ours, before the KV cache is made."""
        own = 0
        if self.prepared is not None and self._has_graphs(self.prepared):
            with capture_context(self.device), set_forward_context(None, self.vllm_config):
                own = self.prepared.memory_plan(metadata_for=_no_requests).graphs
        return estimate() + own

    def _captured(self, capture: Callable[..., int], *profile: Any, **only: Any) -> int:
        """vLLM's captures, then ours, once: before its monitors, and in its count of bytes."""
        taken = capture(*profile, **only)
        if self.prepared is None or profile or only or self._tried_captures:
            return taken
        self._capture(self.prepared)
        return taken + sum(each.bytes for _, each in self.prepared.recordings())

    def _has_graphs(self, prepared: PreparedModel) -> bool:
        """Whether there are graphs to capture, and vLLM has not given them up since `prepare`."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        return bool(prepared.dispatcher.plan.entries) and (
            current_platform.is_cpu() or mode.has_piecewise_cudagraphs()
        )

    def _capture(self, prepared: PreparedModel) -> None:
        self._tried_captures = True
        self._watch_caches(prepared)
        if self._has_graphs(prepared):
            try:
                with capture_context(self.device), set_forward_context(None, self.vllm_config):
                    prepared.capture(_no_requests)
            except PiecegraphError as error:
                log.warning("vLLM serves without graphs: %s", error)

    def sleep(self, level: int = 1) -> None:
        """vLLM's sleep, without our graphs. After it they return between steps."""
        if self.prepared is not None:
            self.prepared.release(keep="plan")
        super().sleep(level)

    def _dispatch(self, batch: Batch) -> Decision:
        """How to run a batch. Graphs that return are captured without the metadata of the step."""
        prepared = self.prepared
        assert prepared is not None
        if not prepared.parts.strategies.between_steps:
            return prepared.dispatch(batch)
        with capture_context(self.device), set_forward_context(None, self.vllm_config):
            return prepared.dispatch(batch)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's step; then its metrics have ours beside them."""
        output = super().execute_model(*args, **kwargs)
        if self._metrics is not None:
            self._metrics.update()
        return output

    def _watch_caches(self, prepared: PreparedModel) -> None:
        """State that attention writes: shadow steps restore it, and it must not move.

        A step is proved at once, while vLLM's forward context is open, and not when vLLM is idle.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
        for name, tensor in tensors_by_path("KV cache", caches):
            prepared.watch(name, tensor)

    def _allow_logprobs(self) -> None:
        """vLLM counts ranks of logprobs in a function that the first such request compiles."""
        sampler: Any = getattr(self.model_runner, "sampler", None)
        if gather := getattr(sampler, "gather_logprobs", None):

            def allowed(*args: Any, **kwargs: Any) -> Any:
                with allow_compilation():
                    return gather(*args, **kwargs)

            sampler.gather_logprobs = allowed

    def _prepare_and_run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The first call of the module: prepare it for calls of this form, and run it."""
        del module.forward
        before = psutil.Process().memory_info().rss
        try:
            # a shallow copy keeps its own forward: what serves uncompiled, and a proof, calls it
            self.prepared, inputs = self._prepare(copy(module), args, kwargs)
            self.prepared.prove_where(_has_metadata)
            gc.collect()
            self._left = psutil.Process().memory_info().rss - before
            pieces, larger = len(self.prepared.compiled.pieces), self._left >> 20
            log.info("prepared: %d pieces; this process is %d MiB larger", pieces, larger)
            module.forward = steps_through(self.prepared, module, inputs, self._dispatch)
            return module(*args, **kwargs)
        except (BundleMissing, BundleStale):
            raise  # `bundle="force"` forbids that anything compiles, also vLLM
        except Exception as error:  # whatever it is, vLLM can still serve
            module.__dict__.pop("forward", None)
            module.aot_compiled_fn = None
            if self.prepared is not None:
                self.prepared.close()
                self.prepared = None
            named = isinstance(error, PiecegraphError)
            self._refuse(str(error) if named else f"{type(error).__name__}: {error}")
        return module(*args, **kwargs)

    def _prepare(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[PreparedModel, dict[str, InputForm]]:
        """The module prepared for calls of this form, and its tensors by name."""
        names = inspect.signature(module.forward).parameters
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors, group = tensors_in(arguments), get_tp_group()
        num_tokens = tensors[positions_among(tensors)].shape[-1]
        inputs = {name: InputForm(value, num_tokens) for name, value in tensors.items()}
        events = Events()
        # a context without a step: the model may find its layers in it
        with (
            set_forward_context(None, self.vllm_config),
            pass_context(Range(1, self.scheduler_config.max_num_batched_tokens)),
        ):
            config = config_for(self.vllm_config, {n: each.spec for n, each in inputs.items()})
            passes = {**passes_of(self.vllm_config), **config.codegen.passes}
            example = with_tensors(arguments, {n: e.example for n, e in inputs.items()})
            prepared = prepare(
                module,
                config.changed(**{"codegen.passes": passes}),
                # several call forms, which the user lists, are built from them
                examples=None if isinstance(config.inputs, tuple) else ((), example),
                events=events,
                ranks=Ranks(group.cpu_group) if group.world_size > 1 else None,
            )
            # vLLM measures the compiled model, then makes its KV cache, then captures
            prepared.parts.starts.wait_until_compiled()
            if prepared.compiled.relies_on(get_forward_context.__module__):
                prepared.wait_until_verified(VERIFY_S)  # beside a step it would read another one
        return prepared, inputs

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        log.warning("vLLM runs this model without piecegraph: %s", reason)

    def piecegraph_report(self) -> dict[str, Any]:
        """The report of the prepared model, and why there is none. For `collective_rpc`."""
        report = {} if self.prepared is None else self.prepared.report()
        return {"refusal": self.refusal, **report}

    def piecegraph_explain(self, format: str = "html") -> str:
        """The page of `explain`, or why there is none. For `collective_rpc`."""
        return str(self.refusal) if self.prepared is None else explain(self.prepared, format)

    def piecegraph_metrics(self) -> str:
        """Metrics in Prometheus' text format. For `collective_rpc`."""
        return "" if self.prepared is None else metrics_text(self.prepared)


def compiled_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """The one module of `model` that vLLM gives to torch.compile, encoders apart."""
    compiled: list[torch.nn.Module] = []
    for module in model.modules():
        compiles = hasattr(module, "do_not_compile") and not getattr(module, "_is_encoder", False)
        if compiles and not any(module in {*outer.modules()} for outer in compiled):
            compiled.append(module)
    return compiled[0] if len(compiled) == 1 else None


def take_over(module: Any, forward: Callable[..., Any]) -> None:
    """Let vLLM call `forward`. For vLLM the module stays one that is compiled, by which its runners
    decide which graphs there can be."""
    module.aot_compiled_fn = lambda module, *args, **kwargs: module.forward(*args, **kwargs)
    module.forward = forward


def config_for(vllm_config: VllmConfig, inputs: Mapping[str, str]) -> Config:
    """`Config` for a vLLM engine: its limits and capture sizes, then what the user has set."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    piecewise = (
        compilation.cudagraph_mode.has_piecewise_cudagraphs()
        and not current_platform.is_cpu()
        and vllm_config.lora_config is None  # its ops decide on the host whether there are adapters
    )
    additional = vllm_config.additional_config
    splitting_ops = tuple(compilation.splitting_ops or ATTENTION_OPS)
    options = {
        name: value
        for name, value in compilation.inductor_compile_config.items()
        if name not in (current_platform.pass_key, "enable_auto_functionalized_v2")
    }
    kinds = (bool, int, float, str, list, tuple, dict, type(None))
    left_out = [name for name, value in options.items() if not isinstance(value, kinds)]
    if left_out and inputs:  # once: without inputs it is only tried whether the settings are valid
        log.warning("options of Inductor that are left out: %s", ", ".join(left_out))
    config = Config(
        inputs=inputs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_reqs=scheduler.max_num_seqs,
        splitting_ops=tuple(name for name in splitting_ops if is_registered(name)),
        attention={"support": "NEVER"},
        sizes={"padding_limit": PaddingLimit(tokens=0)} if piecewise else {},
        graph_mode="PIECEWISE" if piecewise else "NONE",
        capture_sizes=tuple(compilation.cudagraph_capture_sizes) if piecewise else None,
        codegen={"inductor_options": {n: v for n, v in options.items() if n not in left_out}},
        shadow=Shadow(),
    )
    return config.changed(
        **(additional.get("piecegraph", {}) if isinstance(additional, dict) else {})
    )


def passes_of(vllm_config: VllmConfig) -> dict[str, GraphPass]:
    """What vLLM's own backend runs over each graph. Where its ops are not wrapped, as on a CPU, its
    passes have nothing to do, and worker processes compile."""
    compilation = vllm_config.compilation_config
    if not getattr(vllm.ir.op, "_ENABLE_TORCH_WRAP", True):
        return {}
    first = VllmIRInplaceFunctionalizationPass(vllm_config)
    manager = resolve_obj_by_qualname(current_platform.get_pass_manager_cls())()
    manager.configure(vllm_config)
    if added := compilation.inductor_compile_config.get(current_platform.pass_key):
        manager.add(added)
    if len(compilation.get_compile_ranges()) > 1:
        log.warning("vLLM's passes for a part of the sizes are left out: one range is compiled")
    return {
        "vllm functionalization": GraphPass("", first, before_grad=True, uuid=first.uuid()),
        "vllm passes": GraphPass("", manager, uuid=manager.uuid()),
    }


def positions_among(names: Collection[str]) -> str:
    """The argument that each call has: the second where transformers has the model."""
    return next(name for name in ("positions", "position_ids") if name in names)


def forms_by_tensors(config: Config) -> dict[frozenset[str], int]:
    """The number of each call form by the tensors that it has; none if there is only one."""
    forms = config.inputs if isinstance(config.inputs, tuple) else ()
    return {
        frozenset(name for name, spec in form.items() if spec): number
        for number, form in enumerate(forms)
    }


class InputForm:
    """One tensor argument: its spec, and an example with a number of tokens nothing depends on."""

    def __init__(self, value: torch.Tensor, num_tokens: int) -> None:
        shape: list[int | str] = list(value.shape)
        self.axis = axis = shape.index(num_tokens)
        """Of tokens."""
        shape[axis] = "num_tokens"
        self.spec = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
        self.example = value.narrow(axis, 0, min(17, value.shape[axis])).clone()


def tensors_in(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors by dotted name, also those from the pipeline stage before this one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, IntermediateTensors):
            tensors |= {f"{name}.tensors.{key}": tensor for key, tensor in value.items()}
    return tensors


def with_tensors(
    arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """`arguments` with other tensors, by dotted name."""

    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, IntermediateTensors):
            return IntermediateTensors(
                {k: tensors[f"{name}.tensors.{k}"] for k, _ in value.items()}
            )
        return tensors.get(name, value)

    return {name: replaced(name, value) for name, value in arguments.items()}


def steps_through(
    prepared: PreparedModel,
    module: torch.nn.Module,
    inputs: Mapping[str, InputForm],
    dispatch: Callable[[Batch], Decision],
) -> Callable[..., Any]:
    """A forward that runs steps of the prepared forms, and others as `module` alone would."""
    forward, most_reqs = module.forward, prepared.config.max_num_reqs
    names = tuple(inspect.signature(forward).parameters)
    counted = positions_among(inputs)
    place, axis = names.index(counted), inputs[counted].axis
    forms = forms_by_tensors(prepared.config)
    warned = set[str]()
    on_device = current_platform.is_cuda_alike()
    capturing = torch.cuda.is_current_stream_capturing if on_device else bool

    def step(*args: Any, **kwargs: Any) -> Any:
        if get_forward_context().skip_compiled:
            return forward(*args, **kwargs)
        tokens = args[place] if place < len(args) else kwargs[counted]
        num_tokens = tokens.shape[axis]
        axes = None
        if forms:
            tensors = tensors_in({**dict(zip(names, args, strict=False)), **kwargs})
            axes = {"form": forms.get(frozenset(tensors), 0)}
        batch = Batch(num_tokens, min(num_tokens, most_reqs), axes=axes)
        try:
            if capturing():  # by vLLM: nothing is captured between steps
                decision = prepared.dispatcher.dispatch(batch, NO_GRAPHS)
            else:
                decision = dispatch(batch)
            return prepared.run(decision, *args, **kwargs)
        except (InputMismatch, ArgumentFixed, CallFormUnknown, SizeOutOfRange) as error:
            if type(error).__name__ not in warned:
                log.warning("a step is not as it was prepared, and runs uncompiled: %s", error)
                warned.add(type(error).__name__)
            return forward(*args, **kwargs)

    return step


def _has_metadata() -> bool:
    """Whether it is no dummy run of vLLM: in these, attention leaves its output as it was."""
    return get_forward_context().attn_metadata is not None


NO_GRAPHS = (RuntimeMode.NONE,)
"""The modes allowed while vLLM captures a whole step itself."""


def _no_requests(descriptor: BatchDescriptor, mode: RuntimeMode) -> None:
    """Metadata of a dummy batch: vLLM's attention finds none and writes nothing to its cache."""


def _log_as_vllm_does() -> None:
    """Startup phases and warnings go where vLLM's own log goes, unless the user decides it."""
    vllm_log = logging.getLogger("vllm")
    if not log.handlers and vllm_log.handlers:
        log.handlers = list(vllm_log.handlers)
        log.setLevel(vllm_log.level)
        log.propagate = False
