"""Custom ops that tests define."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define(
    library: torch.library.Library,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any] = lambda *_: None,
    key: str = "CompositeExplicitAutograd",
) -> None:
    """Define the op of `schema` with its kernel; `fake` gives the form of its results, if any."""
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, run, key)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
