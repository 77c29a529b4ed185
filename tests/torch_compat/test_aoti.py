"""AOTInductor libraries: compile, load."""

import os

import pytest
import torch
import torch.utils.cpp_extension

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.basics import settings
from piecegraph.torch_compat.compiling import aoti, inductor

from .test_inductor import applied_to_itself

TOOLCHAIN = toolchain_directory("")
CPU = torch.device("cpu")


@pytest.mark.heavy
def test_libraries_are_compiled_and_loaded(tmp_path):
    """One library is compiled ahead and loaded in each run: tests/mission/test_torch_compile.py."""
    before = settings.changed_settings()
    made = {}
    with inductor.inductor_cache_directory(str(tmp_path)), inductor.inductor_options(TOOLCHAIN):
        for op in (torch.add, torch.mul):
            module, fakes = applied_to_itself(op, 8, 2)
            made[op] = aoti.aoti_compile(module, fakes, [{0: ("s0", 1, 64)}], {})
        runs = {op: aoti.aoti_load(str(m.library), CPU) for op, m in made.items()}
    assert settings.changed_settings() == before  # later models of the process keep their keys
    for op, run in runs.items():
        assert (1, 64) in made[op].ranges.values()
        for size in (1, 5, 64):
            x = torch.randn(size, 2)
            (result,) = run([x])
            assert torch.equal(result, op(x, x))


def test_the_toolkit_that_torch_found_is_stated_for_the_link(monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for found, own, stated in (("/toolkit", None, "/toolkit"), ("/toolkit", "/own", "/own"),
                               (None, None, None)):  # fmt: skip
        monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", found)
        if own is not None:
            monkeypatch.setenv("CUDA_HOME", own)
        with aoti.stated_toolkit():
            assert os.environ.get("CUDA_HOME") == stated
        assert os.environ.get("CUDA_HOME") == own
        monkeypatch.delenv("CUDA_HOME", raising=False)
