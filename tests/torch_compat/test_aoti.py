"""AOTInductor libraries: compile, load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat import aoti, inductor, settings, tensors
from piecegraph.torch_compat.patch import replaced

TOOLCHAIN = toolchain_directory("")


def applied_to_itself(op: Callable[..., Any]) -> tuple[torch.fx.GraphModule, torch.Tensor]:
    """The graph of `op(x, x)`, and a fake `x`."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(op, (x, x)),))
    with tensors.fresh_fake_mode():
        return torch.fx.GraphModule({}, graph), torch.empty(8, 2)


@pytest.mark.compile
def test_library_is_compiled_and_loaded(tmp_path: Path) -> None:
    module, fake = applied_to_itself(torch.add)
    before = settings.changed_settings()
    with inductor.inductor_cache_directory(str(tmp_path)), inductor.inductor_options(TOOLCHAIN):
        dynamic = [{0: ("s0", 1, 64)}]
        with aoti.cpp_threads() as threads:
            made = aoti.aoti_compile(module, [fake], dynamic, {}, threads)
            run = aoti.aoti_load(str(made.link()), torch.device("cpu"))
    assert settings.changed_settings() == before  # later models of the process keep their keys
    assert (1, 64) in made.ranges.values()
    for size in (1, 5, 64):
        x = torch.randn(size, 2)
        (result,) = run([x])
        assert torch.equal(result, 2 * x)


@pytest.mark.compile
def test_a_compiler_that_fails_in_a_thread_is_an_error_of_link(tmp_path: Path) -> None:
    from torch._inductor import cpp_builder

    module, fake = applied_to_itself(torch.mul)
    original, refused = cpp_builder.run_compile_cmd, []

    def refuse(command: str, cwd: str) -> None:
        if ".wrapper.cpp" not in command:
            return original(command, cwd)
        refused.append(command)
        raise OSError("no space left on device")

    with (
        inductor.inductor_cache_directory(str(tmp_path)),
        inductor.inductor_options(TOOLCHAIN),
        replaced(cpp_builder, "run_compile_cmd", refuse),
        aoti.cpp_threads() as threads,
    ):
        made = aoti.aoti_compile(module, [fake], [{}], {}, threads)
        with pytest.raises(OSError, match="no space left"):
            made.link()
    assert len(refused) == 1
