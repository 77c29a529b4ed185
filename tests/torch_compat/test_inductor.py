"""Standalone artifacts: compile, store, load; options and passes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.basics import patch, tensors
from piecegraph.torch_compat.compiling import inductor

TOOLCHAIN = toolchain_directory("")

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def directories() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.parametrize("before", [None, "/before"])
def test_w29_cache_directories_are_put_back_also_after_an_error(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)

    def fail_inside() -> None:
        with inductor.inductor_cache_directory(str(tmp_path)):
            from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

            assert cache_dir() == str(tmp_path)
            assert triton_cache_dir(0).startswith(str(tmp_path))
            os.environ["TRITON_CACHE_DIR"] = "/set by torch"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert directories() == [before, before]


def test_w29_threads_of_ours_never_see_each_others_directory(tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    seen: list[bool] = []

    def use(number: int) -> None:
        path = str(tmp_path / str(number))
        for _ in range(20):
            with inductor.inductor_cache_directory(path):
                seen.append(cache_dir() == path)
            with patch.preserve_cache_variables():
                seen.append(os.environ.get(NAMES[0]) == before)

    before = os.environ.get(NAMES[0])
    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 160
    assert all(seen)
    assert os.environ.get(NAMES[0]) == before


def doubled() -> tuple[torch.fx.GraphModule, list[Any]]:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, x)),))
    return torch.fx.GraphModule({}, graph), [tensors.fresh_fake_mode().from_tensor(torch.zeros(4))]


@pytest.mark.compile
def test_artifact_survives_storing_and_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor_config
    from torch._inductor import codecache
    from torch._inductor.codecache import CacheBase, CppPythonBindingsCodeCache

    x, keys = torch.randn(4), CacheBase.get_system
    with inductor.inductor_cache_directory(str(tmp_path)), inductor.inductor_options(TOOLCHAIN):
        with inductor_config.patch(compile_threads=1), monkeypatch.context() as within:
            # where torch waits for a kernel, if it has one thread
            within.setattr(CppPythonBindingsCodeCache, "load_pybinding", None)
            # what reads all sources of torch and Triton
            within.setattr(codecache, "torch_key", None)
            within.setattr(CacheBase, "get_system", None)
            artifact, libraries = inductor.inductor_compile(*doubled(), {})
        assert all(path.exists() for path in libraries())
        data = inductor.inductor_serialize(artifact)
        assert data is not None
        assert CacheBase.get_system is keys
        loaded = inductor.inductor_deserialize(data)
        for each in (artifact, loaded):
            (result,) = inductor.inductor_callable(each)([x])
            assert torch.equal(result, 2 * x)


@pytest.mark.compile
def test_artifact_cannot_be_stored_with_caches_off() -> None:
    artifact, libraries = inductor.inductor_compile(*doubled(), {"force_disable_caches": True})
    list(libraries())
    assert inductor.inductor_serialize(artifact) is None


@pytest.mark.compile
def test_code_in_a_folder_is_loaded_from_there(tmp_path: Path) -> None:
    folder = str(tmp_path / "code")
    with (
        inductor.inductor_cache_directory(str(tmp_path / "scratch")),
        inductor.inductor_options(TOOLCHAIN),
    ):
        inductor.inductor_compile_to(*doubled(), {}, folder)
    x = torch.randn(4)
    (result,) = inductor.inductor_load_from(folder)([x])
    assert torch.equal(result, 2 * x)


def test_pass_has_the_form_that_inductor_takes() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen: list[Any] = []
    made = inductor.post_grad_pass(seen.append, ["key"])
    assert isinstance(made, CustomGraphPass)
    graph = torch.fx.Graph()
    made(graph)
    assert seen == [graph]
    assert made.uuid() == ["key"]


def test_options_hold_only_inside() -> None:
    import torch._inductor.config as inductor_config
    from torch._inductor.cpu_vec_isa import VecISA

    before = (inductor_config.cpp.vec_isa_ok, VecISA.check_build)
    with inductor.inductor_options(TOOLCHAIN):
        assert inductor_config.cpp.vec_isa_ok is True
        assert VecISA.check_build is not before[1]
    assert (inductor_config.cpp.vec_isa_ok, VecISA.check_build) == before


def test_forget_threads_gives_a_fork_its_own_pool_and_lock_of_progress_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._inductor.config as inductor_config
    import tqdm
    from torch._inductor.async_compile import AsyncCompile

    lock = tqdm.tqdm.get_lock()
    monkeypatch.setattr(tqdm.tqdm, "_lock", lock)
    with inductor_config.patch(compile_threads=2):  # also on one core
        before = AsyncCompile.pool()
        inductor.forget_threads()
        assert AsyncCompile.pool() is not before
    assert tqdm.tqdm.get_lock() is not lock


@pytest.mark.slow
def test_what_tracing_and_compiling_need_can_be_imported_before() -> None:
    program = (
        "import sys; from piecegraph.torch_compat.compiling import inductor\n"
        "from piecegraph.torch_compat.tracing import dynamo\n"
        "def imported(name, function):\n"
        "    assert name not in sys.modules; function(); assert name in sys.modules\n"
        "imported('torch._dynamo.convert_frame', dynamo.import_dynamo)\n"
        "imported('torch._inductor.graph', inductor.import_inductor)\n"
        "import copy\n"
        "from torch._inductor.kernel.mm import mm_template\n"
        "assert type(copy.copy(mm_template.template)).__module__ == inductor.__name__\n"
        "assert mm_template.template and 'indent_except_first' in "
        "mm_template.template.environment.filters"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("body", "wrapped"),
    [
        (lambda x: x * 2, [1, 0, 1]),
        (lambda x: (x * 2).view(2, 2).split(1), [1, 0, 1]),
        (lambda x: (x.add_(1), x * 2)[1], [1, 1, 1]),
        (lambda x: x.view(2, 2), [1, 1, 1]),
    ],
)
def test_a_wrapper_with_nothing_to_do_runs_once_and_with_gradients(
    body: Any, wrapped: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functorch.compile import make_boxed_func
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._functorch.aot_autograd import aot_function

    original = runtime_wrappers._create_runtime_wrapper
    calls: list[None] = []

    def create(*args: Any, **kwargs: Any) -> Any:
        run = original(*args, **kwargs)

        def counted(args: list[Any]) -> Any:
            calls.append(None)
            return run(args)

        return counted

    monkeypatch.setattr(runtime_wrappers, "_create_runtime_wrapper", create)
    counts = []
    with inductor.inductor_options(tmp_path):
        compiled = aot_function(
            body,
            lambda graph, _: make_boxed_func(graph.forward),
            keep_inference_input_mutations=True,
        )
        for with_gradients in (False, False, True):
            calls.clear()
            with torch.set_grad_enabled(with_gradients):
                results = compiled(torch.arange(4.0))
            counts.append(len(calls))
            torch.testing.assert_close(results, body(torch.arange(4.0)))
    assert counts == wrapped
