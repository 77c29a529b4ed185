"""Is the key of a capture complete? Each descriptor is captured again with one fact changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ... import BatchDescriptor, RuntimeMode
from ...errors import PiecegraphError, StaleContext
from ...runtime.capture.recorder import ACTIVE
from ...torch_compat.basics.ops import overload_name
from ...torch_compat.basics.tensors import LightDispatchMode, tree_leaves
from ..steps import replay_step
from .case import BisectCase, first_wrong
from .observe import copies
from .stages import FULL, MetadataFor, Stage, prepared_for
from .state import ModelState


@dataclass(frozen=True, slots=True)
class MissingFromKey:
    """A fact that a graph depends on, though its key, the descriptor, does not hold it."""

    mode: str
    num_tokens: int
    fact: str
    how: str

    def line(self) -> str:
        return f"{self.mode} {self.num_tokens} depends on {self.fact}: {self.how}"


def check_keys(
    case: BisectCase,
    *,
    fields: Collection[str] | None = None,
    variants: Mapping[str, MetadataFor] | None = None,
) -> tuple[list[MissingFromKey], list[str]]:
    """Capture each descriptor again with one fact of the metadata changed, and compare.

    Compared are the segments of the recordings, the operations that were captured with their host
    arguments as far as Python sees them, and the results of the steps of `case` in both. By default
    each field of what `capture_metadata` returns is changed in turn, or those named `fields`: leave
    out what the runtime mode determines. `variants` are other `capture_metadata` by name instead.
    The second result names what was changed. A capture that fails without a change raises.
    """
    if case.capture_metadata is None:
        return [], []
    state = ModelState(case.model, case.layers)
    case = dataclasses.replace(case, config=case.config.changed(cache=False))
    changes = variants if variants is not None else _variants(case, fields)
    missing: list[MissingFromKey] = []
    base = _captured(case, case.capture_metadata, state)
    for name, metadata_for in changes.items():
        state.restore()
        try:
            other = _captured(case, metadata_for, state)
        except PiecegraphError as error:
            how = f"the capture fails: {' '.join(str(error).split())}"
            missing.append(MissingFromKey("all", 0, name, how))
            continue
        for place, mine in base.items():
            difference = mine.differs(other.get(place), case.tolerance)
            if difference is not None:
                missing.append(MissingFromKey(*place, name, difference))
    state.restore()
    return missing, list(changes)


@dataclass(slots=True)
class _Graph:
    """One recording: its segments, what was captured, and the results of the steps that used it.

    A step that a graph refuses, since Python read another value of the step, has no results.
    """

    segments: list[tuple[str, int]]
    operations: list[str]
    results: dict[int, list[Tensor]]
    refused: dict[int, str]

    def differs(self, other: _Graph | None, tolerance: float | None) -> str | None:
        if other is None:
            return "there is no graph"
        if self.segments != other.segments:
            return f"segments {self.segments} and {other.segments}"
        for one, two in zip_longest(self.operations, other.operations, fillvalue="nothing more"):
            if one != two:
                return f"it captures {one} and {two}"
        for number in self.refused.keys() ^ other.refused.keys():
            return f"step {number} is refused: {(self.refused | other.refused)[number]}"
        for number, results in self.results.items():
            wrong = first_wrong(results, other.results.get(number, []), tolerance)
            if wrong is not None:
                return f"step {number} gives {wrong.expected:.6g} and {wrong.got:.6g}"
        return None


def _captured(
    case: BisectCase, metadata_for: MetadataFor | None, state: ModelState
) -> dict[tuple[str, int], _Graph]:
    """The graphs captured with some metadata, by mode and size."""
    seen: dict[tuple[str, int], list[str]] = {}

    def noted(descriptor: BatchDescriptor, mode: RuntimeMode) -> Any:
        assert metadata_for is not None
        watching.operations = []  # what makes the metadata is no part of a capture
        padding = metadata_for(descriptor, mode)
        watching.operations = seen[mode.name, descriptor.num_tokens] = []
        return padding

    with _Watching() as watching, prepared_for(case, Stage(FULL, {}), noted) as prepared:
        entries = prepared.dispatcher.plan.entries
        graphs = {}
        for index, recording in prepared.recordings():
            place = entries[index].mode.name, entries[index].descriptor.num_tokens
            segments = [(each.kind.value, each.operations) for each in recording.segments]
            graphs[place] = _Graph(segments, list(seen.get(place, ())), {}, {})
        watching.operations = []
        for number, step in enumerate(case.steps):
            state.restore()
            decision = prepared.dispatcher.dispatch(step.batch)
            place = decision.mode.name, decision.descriptor.num_tokens
            if place in graphs:
                try:
                    graphs[place].results[number] = copies(replay_step(prepared, step))
                except StaleContext as error:
                    graphs[place].refused[number] = " ".join(str(error).split())
    return graphs


class _Watching(LightDispatchMode):
    """Notes each operation with its host arguments and the shapes of its tensors, but not those of
    splitting ops that run between graphs."""

    sees_inside = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = ACTIVE.get()
        if recorder is not None and not recorder.in_op:  # in a capture
            shown = [_host_value(each) for each in tree_leaves((args, kwargs or {}))]
            self.operations.append(f"{overload_name(func)}({', '.join(shown)})")
        return func(*args, **(kwargs or {}))


def _host_value(value: Any) -> str:
    """A plain value as it is, a tensor by its form, anything else by its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__


def _variants(case: BisectCase, fields: Collection[str] | None) -> dict[str, MetadataFor]:
    """Capture metadata with one field changed, by the name of the field."""
    assert case.capture_metadata is not None
    metadata_for = case.capture_metadata
    config = case.config
    sample = metadata_for(BatchDescriptor(min(config.capture_sizes or (1,))), RuntimeMode.FULL)
    variants: dict[str, MetadataFor] = {}
    for name, value in _fields(sample):
        if (fields is None or name in fields) and _other(value) is not None:

            def changed(descriptor: Any, mode: Any, name: str = name) -> Any:
                metadata = metadata_for(descriptor, mode)
                return _with(metadata, name, _other(dict(_fields(metadata))[name]))

            variants[f"metadata.{name}" if name else "the contents of metadata"] = changed
    return variants


def _fields(metadata: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(metadata, Tensor):
        yield "", metadata
    elif isinstance(metadata, Mapping):
        yield from metadata.items()
    elif dataclasses.is_dataclass(metadata):
        yield from (
            (each.name, getattr(metadata, each.name)) for each in dataclasses.fields(metadata)
        )


def _with(metadata: Any, name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        with torch.no_grad():
            old = metadata if isinstance(metadata, Tensor) else dict(_fields(metadata))[name]
            old.copy_(value)  # at its address
        return metadata
    if isinstance(metadata, Mapping):
        return {**metadata, name: value}
    return dataclasses.replace(metadata, **{name: value})


def _other(value: Any) -> Any:
    """Another value of the same type; None for what has none that is surely valid.

    Whole numbers in tensors are indices: only smaller ones are valid everywhere.
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (*value, value[-1]) if value else (1,)
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return value + 1
    if isinstance(value, Tensor) and value.any():
        return torch.zeros_like(value)
    return None
