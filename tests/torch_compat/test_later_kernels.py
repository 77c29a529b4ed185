"""C++ kernels are built while the code of the next piece is generated."""

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.compiling import inductor
from piecegraph.torch_compat.faster.later_kernels import later_kernels

from .test_inductor import doubled

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_code_is_generated_without_waiting_for_its_kernels(tmp_path, monkeypatch, threads):
    from torch._inductor import codecache
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    loaded = []
    load, wait = codecache.CppPythonBindingsCodeCache._load_library, AsyncCompile.wait

    def noted(path, key):
        loaded.append(path)
        return load.__func__(codecache.CppPythonBindingsCodeCache, path, key)

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "_load_library", noted)
    with (
        inductor.inductor_cache_directory(str(tmp_path)),
        inductor.inductor_options(toolchain_directory("")),
    ):
        with later_kernels() as wait_for_kernels:
            artifact, _ = inductor.inductor_compile(*doubled(), {})
        assert AsyncCompile.wait is wait
        assert len(loaded) == (threads == 1)
        wait_for_kernels()
        assert len(loaded) == 1
        x = torch.arange(4.0)
        (result,) = inductor.inductor_callable(artifact)([x])
    assert torch.equal(result, 2 * x)
