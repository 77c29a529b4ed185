"""AOTInductor libraries, loaded; a warm start needs no more than this (see `aoti` for the rest)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...torch_compat.aoti import aoti_load
from ..ir.artifact import PieceFn


def load_library(path: Path, sizes: tuple[int, ...], device: torch.device) -> PieceFn:
    """The library in file `path` as a piece; `sizes` are the positions of sizes in its inputs."""
    run: PieceFn = aoti_load(str(path), device)
    if not sizes:
        return run

    def run_with_sizes(args: list[Any]) -> Any:
        for position in sizes:
            args[position] = torch.empty((args[position], 0))
        return run(args)

    return run_with_sizes
