"""C++ kernels that are built while other code is generated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.compiling import inductor
from piecegraph.torch_compat.faster.kernels_in_background import kernels_in_background

from .test_inductor import doubled


@pytest.mark.compile
@pytest.mark.parametrize("threads", [1, 2])
def test_code_is_there_before_its_kernels(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor_config
    from torch._inductor import codecache

    x, build = torch.randn(4), codecache._worker_compile_cpp
    begun: list[str] = []

    def compile_cpp(lock: str, builders: object) -> None:
        begun.append(lock)
        build(lock, builders)  # type: ignore[arg-type]

    with (
        inductor.inductor_cache_directory(str(tmp_path)),
        inductor.inductor_options(toolchain_directory("")),
        inductor_config.patch(compile_threads=threads),
    ):
        # where torch waits for a kernel, if it has one thread
        bindings = codecache.CppPythonBindingsCodeCache
        monkeypatch.setattr(bindings, "load_pybinding", lambda *_: pytest.fail("waited"))
        with kernels_in_background() as wait:
            artifact, libraries = inductor.inductor_compile(*doubled(), {})
        wait()
        assert [library.exists() for library in libraries] == [True]
        (result,) = inductor.inductor_callable(artifact)([x])
    assert torch.equal(result, 2 * x)
