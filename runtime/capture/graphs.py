"""The graphs of one prepared model: the dummy batches, the graphs there are, what captures them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...cache import Cache
from ...compile.ir.locations import first_line
from ...config import Config, compile_config, named_ops
from ...dispatch import Dispatcher
from ...errors import AllCapturesFailed, DummyStepFailed
from ..backends.protocol import GraphBackend
from ..core.code import ModelCode
from ..core.records import CaptureFailure, CaptureRecord, MemoryUse, Records
from ..core.static_inputs import StaticInputs
from ..forward_context import ForwardContext
from ..parts.ranks.ranks import Exchange
from ..parts.regions.regions import Regions
from ..parts.strategies.capturer import Capturer
from .dummy_batch import DummyBatches
from .graph_set import GraphSet


class Graphs:
    """Holds the parts. `counts` and `on_complete` are those of `Capturer`."""

    def __init__(
        self,
        code: ModelCode,
        inputs: StaticInputs,
        dispatcher: Dispatcher,
        config: Config,
        backend: GraphBackend,
        context: ForwardContext,
        records: Records,
        exchange: Exchange,
        counts: Callable[[int], Sequence[int]],
        on_complete: Callable[[], None],
        device: torch.device,
        cache: Cache,
    ) -> None:
        self.regions = Regions(code.compiled, compile_config(config).code, device, cache, records)
        self.dummies = DummyBatches(dispatcher.plan, code, inputs, context, self.regions)
        self.present = GraphSet(
            code,
            self.dummies,
            dispatcher,
            records,
            named_ops(config.splitting_ops),
            backend,
        )
        self._records = records
        self._backend = backend
        self._new_capturer = partial(
            Capturer,
            config.strategy,
            config.steps.memory_limit,
            dispatcher,
            backend,
            records,
            self.present,
            exchange,
            counts=counts,
            on_complete=on_complete,
        )
        self.capturer = self._new_capturer()

    def startup(self, progress: Callable[[CaptureRecord], None] | None) -> None:
        """Capture the startup set. Raises AllCapturesFailed if there is no graph after it."""
        records, before = self._records, len(self._records.of(CaptureFailure))
        with records.events.span("capture", level=logging.INFO):
            self.capturer.startup(progress)
        self.regions.store()
        failures = records.of(CaptureFailure)[before:]
        present = self.present.recordings()
        if failures and not present:
            raise AllCapturesFailed(count=len(failures), reason=failures[0].reason)
        now = self._backend.memory()
        records.add(MemoryUse(sum(each.bytes for _, each in present), now.used, now.free))

    def largest_step(self) -> int:
        """Bytes that the largest step takes while it runs without a graph."""
        try:
            return self._backend.working_memory(partial(self.dummies.run, self.dummies.limits))
        except (DummyStepFailed, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as of a capture: ops may lack metadata
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._records.events.emit("memory.unknown_step", level=logging.WARNING, reason=reason)
            return 0

    def release(self) -> None:
        """Free all graphs and start over."""
        for graph_index, _ in self.present.recordings():
            self.present.remove(graph_index)
        self.capturer.captures.release_pool()
        self.capturer = self._new_capturer()

    def close(self) -> None:
        """Forget the code. All graphs were released."""
        self.present.close()
        self.dummies.metadata_for = None
