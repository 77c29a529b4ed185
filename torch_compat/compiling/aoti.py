"""AOTInductor: compile and load a library."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..repairs.inductor_fixes import repaired_lowering


@dataclass(frozen=True)
class AheadCompiled:
    """An AOTInductor library, and the conditions on sizes under which it is valid."""

    library: Path
    guards: tuple[Any, ...]
    ranges: dict[Any, tuple[int, int]]


def aoti_compile(
    graph: torch.fx.GraphModule,
    inputs: list[Tensor],
    dynamic: list[dict[int, tuple[str, int, int] | None]],
    options: dict[str, Any],
) -> AheadCompiled:
    """Export `graph` and build one shared library.

    `inputs` are example tensors of one fake mode. `dynamic` has for each the dimensions that vary:
    (symbol, lowest, highest), or None if the size is computed from others.
    """
    from torch._inductor import aot_compile, config
    from torch.export import Dim, export

    dims: dict[str, Any] = {}

    def dim(spec: tuple[str, int, int] | None) -> Any:
        if spec is None:
            return Dim.DYNAMIC
        name, low, high = spec
        return dims.setdefault(name, Dim(name, min=low, max=high))

    shapes = tuple({index: dim(spec) for index, spec in each.items()} for each in dynamic)
    program = export(graph, tuple(inputs), dynamic_shapes=shapes)
    env = inputs[0].fake_mode.shape_env  # type: ignore[attr-defined]
    # torch 2.11 has no line tables to turn off
    no_lines = hasattr(config.aot_inductor, "enable_line_tables")
    with warnings.catch_warnings(), repaired_lowering(), stated_toolkit():
        warnings.simplefilter("ignore")  # torch warns about its own deprecated pytree classes
        path = aot_compile(
            program.module(check_guards=False),
            tuple(inputs),
            options={
                **({"aot_inductor.enable_line_tables": False} if no_lines else {}),
                # torch writes to this setting, which is a factor of the keys of later starts
                "aot_inductor.metadata": dict(config.aot_inductor.metadata),
                **options,
            },
        )
    ranges = {s: (int(r.lower), int(r.upper)) for s, r in program.range_constraints.items()}
    guards = tuple(guard.expr for guard in env.guards)
    return AheadCompiled(Path(str(path)), guards, ranges)


@contextmanager
def stated_toolkit() -> Iterator[None]:
    """State CUDA_HOME where torch has found a toolkit without it: torch links a library against the
    toolkit's stub of libcuda only if the variable is set."""
    from torch.utils.cpp_extension import CUDA_HOME

    found = {} if CUDA_HOME is None else {"CUDA_HOME": os.environ.get("CUDA_HOME", CUDA_HOME)}
    with patch.dict(os.environ, found):
        yield


def aoti_load(path: str, device: torch.device) -> Callable[[list[Any]], Any]:
    """The `run` of the library at `path`; imports neither Dynamo nor Inductor.

    On CUDA the container runs single-threaded: otherwise it queries an event before each run
    (model_container.h), which a capture does not permit. Calls from several threads take turns.
    """
    if device.type == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1).run
    container: Any = torch._C._aoti.AOTIModelContainerRunnerCuda  # its stub lacks the last argument
    run: Callable[[list[Any]], Any] = container(path, 1, str(device), "", True).run
    one_at_a_time = threading.Lock()

    def run_alone(inputs: list[Any]) -> Any:
        with one_at_a_time:
            return run(inputs)

    return run_alone
