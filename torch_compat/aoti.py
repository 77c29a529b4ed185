"""AOTInductor: compile and load a library."""

from __future__ import annotations

import os
import shlex
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .inductor_fixes import repaired_lowering
from .patch import replaced


@dataclass(frozen=True)
class AheadCompiled:
    """An AOTInductor library, and the conditions on sizes under which it is valid.

    `link` waits for its C++ compilers and makes the file at the path that it returns.
    """

    link: Callable[[], Path]
    guards: tuple[Any, ...]
    ranges: dict[Any, tuple[int, int]]


def cpp_threads() -> Executor:
    """As many threads as Inductor runs C++ compilers at a time."""
    from torch._inductor.async_compile import get_compile_threads

    return ThreadPoolExecutor(max(1, get_compile_threads()))


def aoti_compile(
    graph: torch.fx.GraphModule,
    inputs: list[Tensor],
    dynamic: list[dict[int, tuple[str, int, int] | None]],
    options: dict[str, Any],
    threads: Executor,
) -> AheadCompiled:
    """Export `graph` and generate one shared library, whose C++ is compiled in `threads`.

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
    with warnings.catch_warnings(), repaired_lowering(), _cpp_in(threads) as build:
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
    return AheadCompiled(lambda: build.link(Path(str(path))), guards, ranges)


class _Build:
    """The commands for one library: its C++ is compiled in threads, it is linked at the end.

    Torch removes the object files after it has linked them, so the link finds them under a name of
    ours. Nine tenths of a library's time is the compiler's.
    """

    def __init__(self, threads: Executor, run: Callable[[str, str], None]) -> None:
        self._threads, self._run = threads, run
        self._objects: list[Future[None]] = []
        self._link = ""

    def command(self, command: str, cwd: str) -> None:
        words = shlex.split(command)
        output = words[words.index("-o") + 1]
        if any(word.endswith((".wrapper.cpp", ".kernel.cpp")) for word in words) and "-c" in words:
            words[words.index("-o") + 1] = _kept(output)
            compiled = self._threads.submit(self._run, shlex.join(words), os.path.dirname(output))
            self._objects.append(compiled)
            Path(output).touch()
        elif output.endswith(".so"):
            for place, word in enumerate(words):
                if word.endswith(".o") and os.path.isfile(word):
                    words[place] = _kept(word)
                    if os.path.getsize(word):
                        os.link(word, words[place])
            self._link = shlex.join(words)
        else:
            self._run(command, cwd)

    def link(self, library: Path) -> Path:
        """Wait for the compilers and make the library."""
        for each in self._objects:
            each.result()
        if library.exists():  # torch appends weights of more than 2 GB to a linked library
            raise RuntimeError(f"torch wrote to {library.name} before it was linked")
        self._run(self._link, str(library.parent))
        return library


def _kept(file: str) -> str:
    return f"{file}.kept.o"


@contextmanager
def _cpp_in(threads: Executor) -> Iterator[_Build]:
    """Leave the C++ of the library that is generated in this context to `threads`."""
    from torch._inductor import cpp_builder

    build = _Build(threads, cpp_builder.run_compile_cmd)
    with replaced(cpp_builder, "run_compile_cmd", build.command):
        yield build


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
