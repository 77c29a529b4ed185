"""Names a model that was prepared and is not used: its engine goes around it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ... import PreparedModel

LOOK_AFTER = 10
"""Steps of the engine after which the prepared model must have run one."""

log = logging.getLogger("piecegraph")


def warn_if_unused(
    model: torch.nn.Module,
    prepared: PreparedModel,
    is_step: Callable[[Mapping[str, Any]], bool] = lambda arguments: True,
) -> None:
    """Warn if ten calls of `model`, which the engine calls, bring no step of `prepared`.

    `is_step` says of a call's named arguments whether a prepared step should run in it.
    """
    steps, before = itertools.count(1), _steps_of(prepared)

    def look(_: Any, args: Any, arguments: Mapping[str, Any]) -> None:
        if is_step(arguments) and next(steps) > LOOK_AFTER:
            if _steps_of(prepared) == before:
                name = type(model).__name__
                log.warning("%d steps went around the prepared model: %s", LOOK_AFTER, name)
            hook.remove()

    hook = model.register_forward_pre_hook(look, with_kwargs=True)


def _steps_of(prepared: PreparedModel) -> int:
    return sum(row["count"] for row in prepared.report()["dispatch"])
