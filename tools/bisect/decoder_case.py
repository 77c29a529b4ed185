"""The reference decoder as a case: the first steps of a real serving run, recorded eagerly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from ... import BatchDescriptor, Decision
from ..engine.block_manager import BlockManager
from ..engine.engine import to_batch
from ..engine.metadata import AttentionMetadata, MetadataBuffers
from ..engine.scheduler import Request, Schedule
from ..serve.options import RunOptions
from ..serve.run import Service, library_config, start_service
from .case import BisectCase, Step


@dataclass(frozen=True, slots=True)
class ScheduledMetadata:
    """The metadata of one recorded step, rebuilt for each decision in the same buffers."""

    schedule: Schedule
    blocks: BlockManager
    buffers: MetadataBuffers

    def __call__(self, decision: Decision) -> AttentionMetadata:
        return self.buffers.fill(self.schedule, self.blocks, decision.descriptor)


class _StepRecorder:
    """Replaces the engine's buffers and its `run`; `steps` contains the recorded steps."""

    def __init__(self, service: Service) -> None:
        self.steps: list[Step] = []
        self._buffers = service.buffers
        self._run = service.engine.run
        service.engine.buffers = self  # type: ignore[assignment]
        service.engine.run = self.run

    def fill(
        self, schedule: Schedule, blocks: BlockManager, descriptor: BatchDescriptor
    ) -> AttentionMetadata:
        kept = ScheduledMetadata(copy.deepcopy(schedule), copy.deepcopy(blocks), self._buffers)
        self.steps.append(Step((), to_batch(schedule), kept))
        return self._buffers.fill(schedule, blocks, descriptor)

    def run(self, decision: Decision, *inputs: torch.Tensor, metadata: Any) -> Any:
        self.steps[-1] = replace(self.steps[-1], args=inputs)
        return self._run(decision, *inputs, metadata=metadata)


def decoder_case(
    options: RunOptions, requests: Sequence[Request], num_steps: int, console: Console
) -> BisectCase:
    """The first `num_steps` steps of serving `requests`, with an empty KV cache."""
    eager = replace(options, off=("all",), verify="none")
    with start_service(eager, requests, [], console) as service:
        recorder = _StepRecorder(service)
        for _ in service.engine.serve(requests):
            if len(recorder.steps) == num_steps:
                break
    for layer in service.layers.values():
        layer.keys.zero_()
        layer.values.zero_()
    return BisectCase(
        model=service.model,
        config=library_config(options),
        steps=recorder.steps,
        layers=service.layers,
        capture_metadata=service.buffers.padding,
    )
