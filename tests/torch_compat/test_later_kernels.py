"""C++ kernels of a piece are built together, while the code of the next piece is generated."""

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from piecegraph.compile.backends.inductor import (
    compile_piece,
    compiling,
    load_pieces,
    toolchain_directory,
)
from piecegraph.compile.ir.compilation import KERNEL
from piecegraph.torch_compat.basics.tensors import fresh_fake_mode
from piecegraph.torch_compat.compiling import inductor
from piecegraph.torch_compat.faster import later_kernels

from .test_inductor import DOUBLED, applied_to_itself

pytestmark = pytest.mark.compile

X = torch.linspace(-1, 1, 64).view(8, 8)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.heavy)])
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
        with later_kernels.later_kernels() as wait_for_kernels:
            artifact, _ = inductor.inductor_compile(*applied_to_itself(*DOUBLED), {})
        assert AsyncCompile.wait is wait
        assert not loaded
        wait_for_kernels()
        assert len(loaded) == 1
        x = torch.arange(4.0)
        (result,) = inductor.inductor_callable(artifact)([x])
    assert torch.equal(result, 2 * x)


def two_kernels(x):
    return [((x.relu().sum(1, keepdim=True) + x) @ x).softmax(0)]


@pytest.fixture(scope="module")
def built():
    """Libraries of this file's tests, by their source: each is built once."""
    return {}


@pytest.fixture
def commands(monkeypatch, built):
    """The calls of the compiler that built libraries."""
    from torch._inductor import cpp_builder

    calls = []
    original = cpp_builder.run_compile_cmd

    def run(command, cwd):
        words = command.split()
        library = Path(words[words.index("-o") + 1])
        source = "".join(Path(cwd, each).read_text() for each in words if each.endswith(".cpp"))
        calls.extend([command] * ("-shared" in words))
        if source in built:
            library.write_bytes(built[source])
        else:
            original(command, cwd)
        if "-shared" in words:
            built[source] = library.read_bytes()

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", run)
    return calls


def libraries_of_right_code():
    """How many kernels were built, and how many libraries for them; they are right, also loaded."""
    graph = make_fx(two_kernels)(X)
    with fresh_fake_mode() as mode, compiling():
        built, blobs = compile_piece(graph, [mode.from_tensor(X)], {})()
    for code in (built, *load_pieces([blobs])):
        torch.testing.assert_close(code([X]), two_kernels(X))
    libraries = [content for name, content in blobs.items() if name.startswith(KERNEL)]
    return len(libraries), len(set(libraries))


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_kernels_of_a_piece_are_built_by_one_call_of_the_compiler(threads, commands, monkeypatch):
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    assert libraries_of_right_code() == (2, 1)
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("name", "value", "calls"),
    [("Path", None, 2), ("UNIT_BYTES", 1, 2), ("_ENTRY", "what is this", 3)],
    ids=["submitted in another form", "too much text", "cannot be built together"],
)
def test_what_is_not_built_together_is_built_apart(commands, monkeypatch, name, value, calls):
    monkeypatch.setattr(later_kernels, name, value)
    assert libraries_of_right_code() == (2, 2)
    assert len(commands) == calls
