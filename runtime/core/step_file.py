"""The file of steps that `bisect --replay` and `explain --replay` read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...dispatch import Batch

SCHEMA = 1

StepRow = tuple[tuple[Any, ...], Mapping[str, Any], Batch, Any]
"""Positional and named inputs, the batch, and what was kept of the metadata."""


def write_steps(path: Path, steps: Sequence[StepRow], state: Mapping[str, Any] = {}) -> None:
    """Write steps. `state` is what the first one found, by name of the tensor: a dimension, rows
    in it (None: all), and their contents. Raises OSError, and what pickle raises."""
    rows = [
        {"args": args, "kwargs": dict(kwargs), "batch": asdict(batch), "metadata": metadata}
        for args, kwargs, batch, metadata in steps
    ]
    torch.save({"schema": SCHEMA, "steps": rows, "state": dict(state)}, path)


def restore_state(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the state in a file, which is unpickled, into the tensors of the same names and sizes.

    A file that a StepRecorder wrote has none.
    """
    state = torch.load(path, map_location="cpu", weights_only=False).get("state", {})
    for name, (dim, rows, content) in state.items():
        tensor = tensors.get(name)
        if tensor is None or (rows is None and tensor.shape != content.shape):
            continue
        if rows is None:
            tensor.copy_(content)
        else:
            bits, place = tensor.view(content.dtype), tensor.device
            bits.index_copy_(dim, rows.to(place), content.to(place))
