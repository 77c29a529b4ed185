"""AOTInductor libraries: compile, load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat import aoti, inductor, settings, tensors

TOOLCHAIN = toolchain_directory("")


@pytest.mark.compile
def test_library_is_compiled_and_loaded(tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, x)),))
    with tensors.fresh_fake_mode():
        fake = torch.empty(8, 2)
    before = settings.changed_settings()
    with inductor.inductor_cache_directory(str(tmp_path)), inductor.inductor_options(TOOLCHAIN):
        made = aoti.aoti_compile(torch.fx.GraphModule({}, graph), [fake], [{0: ("s0", 1, 64)}], {})
        run = aoti.aoti_load(made.path, torch.device("cpu"))
    assert settings.changed_settings() == before  # later models of the process keep their keys
    assert (1, 64) in made.ranges.values()
    for size in (1, 5, 64):
        x = torch.randn(size, 2)
        (result,) = run([x])
        assert torch.equal(result, 2 * x)
