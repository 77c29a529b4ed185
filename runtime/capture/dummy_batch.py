"""Dummy batches: what captures, probes and warm-up runs execute instead of a real step.

A dummy batch has zero real rows. It does execute, so it must leave no trace: every input holds its
padding value, and random generators, buffers of the engine, the model's own buffers that the code
writes to, and what `metadata_for` writes are restored afterwards. Memory that a splitting op
reaches by itself, such as a KV cache in the forward context, is protected by what the padding
values point to, e.g. a reserved cache slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from ...compile.held_values import HeldValues
from ...compile.ir.config import TOKENS
from ...compile.ir.locations import error_line, first_line
from ...compile.ir.ops import written_by
from ...compile.plan.compiled_model import CompiledModel
from ...compile.plan.result_forms import CheckedOps, foreign_ops
from ...dispatch import FORM, BatchDescriptor, DispatchPlan, RuntimeMode
from ...errors import (
    DummyStepFailed,
    LayerMissing,
    MetadataFailed,
    OtherRowsWritten,
    SetUpOnFirstUse,
)
from ...torch_compat.basics.devices import devices_in_use
from ...torch_compat.basics.ops import is_mutable
from ...torch_compat.basics.tensors import LightDispatchMode, has_plain_memory, storage_id
from ..backends.ownership import memory_of
from ..core.code import ModelCode
from ..core.exchange import CaptureAgreement, Exchange
from ..core.preserved import SavedMemory, preserve
from ..core.static_inputs import BoundInputs
from ..forward_context import ForwardContext, forward_context
from ..tensors_by_path import tensors_by_path
from .first_use import STAYS, Places, run_twice
from .session import agreeing

MetadataFor = Callable[[BatchDescriptor, RuntimeMode], Any]
"""Makes the metadata of a dummy batch that fills a descriptor; called before the first run of each
capture, and before the capture itself: what ops keep by its identity is then in the graph."""


def _is_missing(error: KeyError, layers: Mapping[str, Any]) -> bool:
    """Whether the error is of a layer that does not exist: raised where `layers` is read."""
    (*_, (frame, _)) = walk_tb(error.__traceback__)
    reads = "layers" in frame.f_code.co_names or any(v is layers for v in frame.f_locals.values())
    return reads and len(error.args) == 1 and error.args[0] not in layers


class DummyBatches:
    """Makes dummy batches of one model: on its static inputs, in its forward context."""

    def __init__(
        self,
        plan: DispatchPlan,
        codes: Sequence[ModelCode],
        context: ForwardContext,
        around: Callable[[], AbstractContextManager[Any]],
        emit: Callable[..., None],
        exchange: Exchange,
    ) -> None:
        """`codes` are those of the call forms. `around` gives what is entered while a batch runs.
        `emit` emits an event."""
        self.metadata_for: MetadataFor | None = None
        self.context = context
        self._plan = plan
        self._codes = codes
        self._around = around
        self._emit = emit
        self._exchange = exchange
        self._checked = set[tuple[ModelCode, RuntimeMode, bool]]()
        """Code and modes, and whether of decode batches: all sizes run the same code."""
        self._changed_by_each_run: dict[ModelCode, Callable[[], AbstractContextManager[None]]] = {}
        """Restores at its end what no form of state tells."""
        self._refused: DummyStepFailed | None = None
        self._undo: list[Callable[[], None]] = []
        """What restores the metadata of the engine, in the reverse order."""

    @contextmanager
    def batch(
        self,
        descriptor: BatchDescriptor,
        mode: RuntimeMode,
        sizes: Mapping[str, int],
        agreement: CaptureAgreement,
    ) -> Iterator[tuple[Tensor, ...]]:
        """The static inputs of `sizes`, with a batch of padding in the forward context.

        What only the first batch of a kind does is done once it was done on all ranks.
        """
        code = self.code_of(descriptor)
        kind = code, mode, descriptor.for_decode
        state, is_first = model_state(code.compiled), kind not in self._checked
        inputs = code.inputs.at(sizes)
        if self._refused is not None:  # a second try would not see it
            raise self._refused
        try:
            in_context = self._in_context(descriptor, mode, inputs, state.values(), is_first)
            with self._metadata_kept(), self._around(), in_context as views:
                if is_first:
                    with agreeing(agreement):
                        self._run_twice(code, views, state)
                with self._changed_by_each_run.get(code, nullcontext)():
                    yield views
            if is_first:
                agreement.before("the end of its first batch")
        except OtherRowsWritten as error:
            self._refused = error
            raise
        except SetUpOnFirstUse as error:
            if error.facts["left"] == STAYS:
                self._refused = error
            raise
        self._checked.add(kind)

    @contextmanager
    def _in_context(
        self,
        descriptor: BatchDescriptor,
        mode: RuntimeMode,
        inputs: BoundInputs,
        state: Iterable[Tensor],
        check: bool,
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yields static `inputs` of zero real rows; the context is the batch's inside the block.

        `state` are the model's own tensors that the code writes to. `check`: see `preserve`.
        Raises MetadataFailed if `metadata_for` raises, LayerMissing for a layer that does not
        exist.
        """
        self.context.decision = None
        self.context.num_tokens = descriptor.num_tokens
        self.renew_metadata(descriptor, mode)
        layers = self.context.layers
        try:
            with torch.no_grad(), preserve_rng_state(), preserve(inputs.filled):
                inputs.fill_padding()
                written = [*inputs.written_in_place, *state]
                with preserve(written, inputs.views, check), forward_context(self.context):
                    yield inputs.views
        except KeyError as error:
            if not _is_missing(error, layers):
                raise
            known = ", ".join(map(str, layers)) or "none"
            raise LayerMissing(where=error_line(error), layer=error.args[0], known=known) from error

    @contextmanager
    def _metadata_kept(self) -> Iterator[None]:
        """What `metadata_for` writes is as before at the end: it may be that of the next step, in a
        capture between the two. That is what objects and tensors of the last metadata hold, and
        other memory to which operators write."""
        last = self.context.metadata
        tensors = [each for _, each in tensors_by_path("metadata", last) if has_plain_memory(each)]
        self._undo = [
            HeldValues({"metadata": last}, depth=3).restore,
            SavedMemory(tensors, ()).restore,
        ]
        try:
            yield
        finally:
            while self._undo:
                self._undo.pop()()

    def renew_metadata(self, descriptor: BatchDescriptor, mode: RuntimeMode) -> None:
        """Give the context other metadata of a batch; None without a function that makes it.

        Raises MetadataFailed.
        """
        make = self.metadata_for
        try:
            with _Undoing(self._undo):
                self.context.metadata = make(descriptor, mode) if make else None
        except torch.OutOfMemoryError:
            raise  # not an error of the caller: a smaller batch may fit
        except Exception as error:
            raise MetadataFailed(
                where=error_line(error),
                mode=mode.name,
                num_tokens=descriptor.num_tokens,
                reason=f"{type(error).__name__}: {first_line(error)}",
            ) from error

    def _run_twice(
        self, code: ModelCode, views: tuple[Tensor, ...], state: Mapping[str, Tensor]
    ) -> None:
        """Raises SetUpOnFirstUse, StateChanged and ResultNotAsTraced."""
        metadata = HeldValues({"metadata": self.context.metadata}, depth=3)
        layers = {f"layers[{name!r}]": each for name, each in self.context.layers.items()}

        model, plan = code.compiled.model, code.compiled.plan

        def run() -> None:
            code.call(*views)
            metadata.restore()  # each step has its own

        held: dict[str, Tensor] = {}
        for path, layer in layers.items():
            held |= tensors_by_path(path, layer)
        parameters = {} if code.compiled.traced else dict(model.named_parameters())
        own = {**_held_by_modules(model), **dict(model.named_buffers()), **parameters}
        held |= own
        objects = dict(model.named_modules()) | layers
        names = (f"input {each.label}" for each in plan.inputs)
        places = Places({**code.compiled.weights, **own, **dict(zip(names, views, strict=False))})
        call = partial(places.observe, run)
        tensors, attributes = run_twice(call, objects, state, held, views, self._emit)
        places.check()
        written = [each for name, each in parameters.items() if name in tensors]
        if written or attributes:
            self._changed_by_each_run[code] = partial(_as_before, objects, attributes, written)
        if code.compiled.traced:  # not one of the two: below a mode torch counts no writes
            with self._changed_by_each_run.get(code, nullcontext)(), CheckedOps(foreign_ops(plan)):
                run()

    def run(self, sizes: Mapping[str, int] = {}) -> None:
        """Run the code of each form without a graph on a dummy batch, by default the largest."""
        for form, code in enumerate(self._codes):
            all_sizes = {**code.inputs.limits, **sizes}
            descriptor = BatchDescriptor(all_sizes[TOKENS], axes=((FORM, form),))
            agreement = CaptureAgreement(self._exchange, f"warm-up of {all_sizes}")
            try:
                batch = self.batch(descriptor, RuntimeMode.NONE, all_sizes, agreement)
                with batch as views, agreeing(agreement):
                    code.call(*views)
            except Exception as error:
                agreement.raised(str(error))
                raise
            agreement.outcome(0.0, 0, "")

    def code_of(self, descriptor: BatchDescriptor) -> ModelCode:
        """The code of a descriptor's call form."""
        return self._codes[descriptor.form]

    def sizes(self, graph_index: int) -> dict[str, int]:
        """A graph's size of each symbol; the largest where its descriptor does not state one."""
        descriptor = self._plan.entries[graph_index].descriptor
        sizes = dict(self.code_of(descriptor).inputs.limits)
        if descriptor.num_reqs is not None and "num_reqs" in sizes:
            sizes["num_reqs"] = descriptor.num_reqs
        if "num_loras" in sizes:
            sizes["num_loras"] = descriptor.lora_case
        stated = {TOKENS: descriptor.num_tokens, **dict(descriptor.axes)}
        return sizes | {n: size for n, size in stated.items() if n in sizes}

    def inputs(self, graph_index: int) -> BoundInputs:
        """The static inputs of a graph."""
        code = self.code_of(self._plan.entries[graph_index].descriptor)
        return code.inputs.at(self.sizes(graph_index))


class _Undoing(LightDispatchMode):
    """Adds to `undo` what restores the memory that an operator writes, except what was made inside.
    Of a tensor above 16 MiB nothing is kept."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._undo = undo
        self._made = dict[int, Tensor]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Regions that the engine compiles run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        written = memory_of(list(written_by(func, args, given))) if is_mutable(func) else []
        if written := [each for each in written if storage_id(each) not in self._made]:
            self._undo.append(SavedMemory(written, ()).restore)
        result = func(*args, **given)
        read = set(map(storage_id, memory_of((args, given))))
        made = {storage_id(each): each for each in memory_of(result)}
        self._made |= {place: each for place, each in made.items() if place not in read}
        return result


def model_state(compiled: CompiledModel) -> dict[str, Tensor]:
    """The weights and buffers that compiled code writes to, by name; code that is not traced may
    write to any buffer, and any other tensor that its modules hold but their parameters."""
    if not compiled.traced:
        return {**dict(compiled.model.named_buffers()), **_held_by_modules(compiled.model)}
    written = [weight.target for weight in compiled.plan.weights if weight.written]
    return {name: compiled.weights[name] for name in written}


def constant_storages(compiled: CompiledModel) -> set[int]:
    """The memory of the weights that compiled code does not write to."""
    weights = compiled.plan.weights if compiled.traced else ()
    read = [compiled.weights[weight.target] for weight in weights if not weight.written]
    return {storage_id(tensor) for tensor in memory_of(read)}


def _held_by_modules(model: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors in the attributes of modules, without parameters and buffers."""
    return {
        path: tensor
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        for path, tensor in tensors_by_path(f"{prefix}.{name}", value)
        if not isinstance(tensor, torch.nn.Parameter)
    }


@contextmanager
def _as_before(
    objects: Mapping[str, Any], attributes: set[str], tensors: Sequence[Tensor]
) -> Iterator[None]:
    """Restore at the end `tensors` and, of those of `objects`, the attributes that are named."""
    before = HeldValues(objects)
    try:
        with preserve(tensors):
            yield
    finally:
        before.restore(attributes)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore torch's random generators at the end; a device's only if it is in use."""
    device_type, devices = devices_in_use()
    with torch.random.fork_rng(devices, device_type=device_type):
        yield
