"""Dummy batches: what captures, probes and warm-up runs execute instead of a real step.

A dummy batch has zero real rows. It does execute, so it must leave no trace: every input holds its
padding value, and random generators, buffers of the engine and the model's own buffers that the
code writes to are restored afterwards. Memory that a splitting op reaches by itself, such as a KV
cache in the forward context, is protected by what the padding values point to, e.g. a reserved
cache slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.config import TOKENS
from ...compile.ir.locations import first_line
from ...compile.plan.compiled_model import CompiledModel
from ...dispatch import BatchDescriptor, DispatchPlan, RuntimeMode
from ...errors import LayerMissing, MetadataFailed, OtherRowsWritten
from ...torch_compat.basics.devices import devices_in_use
from ..backends.ownership import error_line
from ..core.code import ModelCode
from ..core.preserved import preserve
from ..core.static_inputs import BoundInputs, StaticInputs
from ..forward_context import ForwardContext, forward_context
from ..tensors_by_path import tensors_by_path

MetadataFor = Callable[[BatchDescriptor, RuntimeMode], Any]
"""Makes the metadata of a dummy batch that fills a descriptor; called before each capture."""


class _Layers(Mapping[str, Any]):
    """Layers that note which name was asked for and is missing."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers
        self.missing: str | None = None

    def __getitem__(self, name: str) -> Any:
        try:
            return self._layers[name]
        except KeyError:
            self.missing = name
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@dataclass(frozen=True)
class DummyBatch:
    """A batch of zero real rows that fills `descriptor`, on static `inputs`.

    `state` are the model's own tensors that the code writes to. `check`: see `preserve`.
    """

    descriptor: BatchDescriptor
    mode: RuntimeMode
    inputs: BoundInputs
    state: Sequence[Tensor]
    check: bool

    @contextmanager
    def in_context(
        self, context: ForwardContext, metadata_for: MetadataFor | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yields the static inputs to run on; `context` is the batch's inside the block.

        Raises MetadataFailed if `metadata_for` raises, LayerMissing for a layer that does not
        exist.
        """
        context.decision = None
        context.num_tokens = self.descriptor.num_tokens
        context.metadata = self._metadata(metadata_for) if metadata_for else None
        layers = context.layers
        context.layers = noting = _Layers(layers)
        inputs = self.inputs
        try:
            with torch.no_grad(), preserve_rng_state(), preserve(inputs.filled):
                inputs.fill_padding()
                written = [*inputs.written_in_place, *self.state]
                with preserve(written, inputs.views, self.check), forward_context(context):
                    yield inputs.views
        except KeyError as error:
            if noting.missing is None or error.args != (noting.missing,):
                raise
            known = ", ".join(map(str, layers)) or "none"
            where = error_line(error)
            raise LayerMissing(where=where, layer=noting.missing, known=known) from error
        finally:
            context.layers = layers

    def _metadata(self, metadata_for: MetadataFor) -> Any:
        try:
            return metadata_for(self.descriptor, self.mode)
        except torch.OutOfMemoryError:
            raise  # not an error of the caller: a smaller batch may fit
        except Exception as error:
            raise MetadataFailed(
                where=error_line(error),
                mode=self.mode.name,
                num_tokens=self.descriptor.num_tokens,
                reason=f"{type(error).__name__}: {first_line(error)}",
            ) from error


class DummyBatches:
    """Makes dummy batches of one model: on its static inputs, in its forward context."""

    def __init__(
        self,
        plan: DispatchPlan,
        code: ModelCode,
        inputs: StaticInputs,
        context: ForwardContext,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """`around` gives what is entered while a batch runs."""
        self.metadata_for: MetadataFor | None = None
        self.context = context
        self._plan = plan
        self._code = code
        self._inputs = inputs
        self._around = around
        self._checked = False  # all sizes run the same code
        self._refused: OtherRowsWritten | None = None

    @contextmanager
    def batch(
        self, descriptor: BatchDescriptor, mode: RuntimeMode, sizes: Mapping[str, int]
    ) -> Iterator[tuple[Tensor, ...]]:
        """The static inputs of `sizes`, with a batch of padding in the forward context."""
        state = model_state(self._code.compiled)
        batch = DummyBatch(descriptor, mode, self._inputs.at(sizes), state, not self._checked)
        if self._refused is not None:  # the same write again changes nothing
            raise self._refused
        try:
            in_context = batch.in_context(self.context, self.metadata_for)
            with self._around(), in_context as views:
                yield views
        except OtherRowsWritten as error:
            self._refused = error
            raise
        self._checked = True

    def run(self, sizes: Mapping[str, int]) -> None:
        """Run the code without a graph on a dummy batch."""
        with self.batch(BatchDescriptor(sizes[TOKENS]), RuntimeMode.NONE, sizes) as views:
            self._code.call(*views)

    def sizes(self, graph_index: int) -> dict[str, int]:
        """A graph's size of each symbol; the largest where its descriptor does not state one."""
        descriptor = self._plan.entries[graph_index].descriptor
        sizes = dict(self._inputs.limits)
        if descriptor.num_reqs is not None and "num_reqs" in sizes:
            sizes["num_reqs"] = descriptor.num_reqs
        if "num_loras" in sizes:
            sizes["num_loras"] = descriptor.lora_case
        stated = {TOKENS: descriptor.num_tokens, **dict(descriptor.axes)}
        return sizes | {n: size for n, size in stated.items() if n in sizes}

    @property
    def limits(self) -> Mapping[str, int]:
        """The largest sizes."""
        return self._inputs.limits

    def inputs(self, graph_index: int) -> BoundInputs:
        """The static inputs of a graph."""
        return self._inputs.at(self.sizes(graph_index))


def model_state(compiled: CompiledModel) -> list[Tensor]:
    """The weights and buffers that compiled code writes to; code that is not traced may write to
    any buffer, and any other tensor that its modules hold but their parameters."""
    if not compiled.traced:
        held = [tensor for module in compiled.model.modules() for tensor in _held(module)]
        return [*compiled.model.buffers(), *held]
    return [compiled.weights[weight.target] for weight in compiled.plan.weights if weight.written]


def _held(module: torch.nn.Module) -> Iterator[Tensor]:
    """Tensors in the attributes of a module, without parameters, buffers and what modules hold."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            for _, tensor in tensors_by_path(name, value):
                if not isinstance(tensor, torch.nn.Parameter):
                    yield tensor


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore torch's random generators at the end; a device's only if it is in use."""
    device_type, devices = devices_in_use()
    with torch.random.fork_rng(devices, device_type=device_type):
        yield
