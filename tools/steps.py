"""Steps of an engine in a file: recorded while it serves, replayed by explain and bisect.

See docs/debugging.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from .. import StepObserver
from ..dispatch import Batch, BatchDescriptor, Decision, Reason, RuntimeMode
from ..errors import InvalidSetting
from ..runtime.core.step_file import SCHEMA, write_steps
from ..runtime.prepared_model import PreparedModel
from ..torch_compat.basics.tensors import tree_map_only
from .report.output import Output

_MOST_AHEAD = 1024
"""Dispatches whose step may still come, at most."""

Rebuild = Callable[[Any, Decision], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the real inputs, the batch's facts, and metadata or a function of the decision."""

    args: tuple[Any, ...]
    batch: Batch
    metadata: Any = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def metadata_for(self, decision: Decision) -> Any:
        return self.metadata(decision) if callable(self.metadata) else self.metadata

    def without_graph(self) -> Decision:
        """The decision for a run of only the real rows."""
        descriptor = BatchDescriptor(self.batch.num_tokens)
        return Decision(RuntimeMode.NONE, descriptor, -1, Reason.EXCLUDED)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Metadata of a step, made of what was recorded for the decision at hand."""

    rebuild: Rebuild
    recorded: Any

    def __call__(self, decision: Decision) -> Any:
        return self.rebuild(self.recorded, decision)


def _as_it_is(metadata: Any, decision: Decision) -> Any:
    return copy.deepcopy(metadata)


class StepRecorder(StepObserver):
    """Records the next `limit` steps of a prepared model and writes them to `path`.

        with StepRecorder(prepared, "steps.pt", metadata=unpadded):
            engine.serve()

    Inputs are copied. `metadata(metadata, decision)` gives what to keep of the metadata of a step,
    which is padded for its decision: a value that pickle takes and from which `load_steps` can
    build it for another decision. By default it is copied as it is. The file is written after
    `limit` steps, or by `close`. With None for `path` they are only in `steps`.
    """

    tells_steps_apart = True

    def __init__(
        self,
        prepared: PreparedModel,
        path: str | Path | None,
        *,
        limit: int = 1000,
        metadata: Rebuild = _as_it_is,
    ) -> None:
        self.steps: list[Step] = []
        self._output = None if path is None else Output(Path(path))
        self._prepared = prepared
        self._limit = limit
        self._keep = metadata
        self._dispatched: dict[int, tuple[Batch, Decision]] = {}
        """Of the last dispatches, by the identity of the decision."""
        self._open = True
        prepared.parts.log.observe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording and write the file. Idempotent. Raises OutputNotWritten."""
        if not self._open:
            return
        self._open = False
        self._prepared.parts.log.unobserve(self)
        if self._output is not None:
            rows = [(step.args, step.kwargs, step.batch, step.metadata) for step in self.steps]
            with self._output.writing() as path:
                write_steps(path, rows)

    def dispatched(self, batch: Batch, decision: Decision) -> None:
        if len(self._dispatched) >= _MOST_AHEAD:
            del self._dispatched[next(iter(self._dispatched))]
        self._dispatched[id(decision)] = copy.copy(batch), decision

    def began(self, decision: Decision, args: Any, kwargs: Any, metadata: Any) -> None:
        dispatched = self._dispatched.get(id(decision))
        if dispatched is None or not self._open:
            return  # a decision of another rank, or after the limit
        args, kwargs = tree_map_only(torch.Tensor, _copied, (tuple(args), dict(kwargs)))
        kept = self._keep(metadata, decision)
        self.steps.append(Step(args, dispatched[0], kept, kwargs))

    def ended(self, decision: Decision, num_tokens: int, error: BaseException | None) -> None:
        if len(self.steps) >= self._limit:
            self.close()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def load_steps(
    path: str | Path, *, metadata: Rebuild | None = None, device: str | torch.device | None = None
) -> list[Step]:
    """The steps in a file that a StepRecorder wrote, on `device` if it is given.

    `metadata(recorded, decision)` builds the metadata of a step for a decision from what was
    recorded; without it the recorded value is the metadata. The file is unpickled: load only files
    that you created yourself. Raises InvalidSetting for any other file.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=False)
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}")
        steps = [
            Step(row["args"], Batch(**row["batch"]), row["metadata"], row["kwargs"])
            for row in content["steps"]
        ]
    except Exception as error:
        raise InvalidSetting(
            name="steps file",
            value=str(path),
            reason=" ".join(str(error).split()) or type(error).__name__,
            expected="a file that a StepRecorder wrote",
        ) from error
    return steps if metadata is None else with_metadata(steps, metadata)


def with_metadata(steps: Sequence[Step], rebuild: Rebuild) -> list[Step]:
    """The steps with their recorded metadata rebuilt for each decision."""
    return [
        Step(step.args, step.batch, Rebuilt(rebuild, step.metadata), step.kwargs) for step in steps
    ]


def replay_step(prepared: PreparedModel, step: Step) -> Any:
    """Dispatch and run one step; returns its results."""
    decision = prepared.dispatch(step.batch)
    metadata = step.metadata_for(decision)
    return prepared.run(decision, *step.args, metadata=metadata, **step.kwargs)
