"""Standalone artifacts: compile, store, load; options and passes."""

import os
import subprocess
import sys

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.basics import patch, tensors
from piecegraph.torch_compat.compiling import inductor
from tests.processes import at_once

TOOLCHAIN = toolchain_directory("")

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def directories():
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.parametrize("before", [None, "/before"])
def test_w29_cache_directories_are_put_back_also_after_an_error(before, tmp_path, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)

    def fail_inside():
        with inductor.inductor_cache_directory(str(tmp_path)):
            from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

            assert cache_dir() == str(tmp_path)
            assert triton_cache_dir(0).startswith(str(tmp_path))
            os.environ["TRITON_CACHE_DIR"] = "/set by torch"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert directories() == [before, before]


def test_w29_threads_of_ours_never_see_each_others_directory(tmp_path):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    seen = []

    def use(number):
        path = str(tmp_path / str(number))
        for _ in range(20):
            with inductor.inductor_cache_directory(path):
                seen.append(cache_dir() == path)
            with patch.preserve_cache_variables():
                seen.append(os.environ.get(NAMES[0]) == before)

    before = os.environ.get(NAMES[0])
    at_once(use, range(4))
    assert len(seen) == 160
    assert all(seen)
    assert os.environ.get(NAMES[0]) == before


def applied_to_itself(op, *shape):
    """The graph of `op(x, x)`, and a fake `x`. Of a product alone Inductor compiles no C++."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(op, (x, x)),))
    fake = tensors.fresh_fake_mode().from_tensor(torch.zeros(shape))
    return torch.fx.GraphModule({}, graph), [fake]


DOUBLED, SQUARED = (torch.add, 4), (torch.mm, 4, 4)


@pytest.mark.compile
@pytest.mark.heavy  # tests/compile/test_inductor.py loads what it has compiled
def test_artifact_survives_storing_and_loading(tmp_path):
    x = torch.randn(4)
    with inductor.inductor_cache_directory(str(tmp_path)), inductor.inductor_options(TOOLCHAIN):
        artifact, libraries = inductor.inductor_compile(*applied_to_itself(*DOUBLED), {})
        assert [path.exists() for path in libraries] == [True]
        data = inductor.inductor_serialize(artifact)
        assert data is not None
        loaded = inductor.inductor_deserialize(data)
        for each in (artifact, loaded):
            (result,) = inductor.inductor_callable(each)([x])
            assert torch.equal(result, 2 * x)


@pytest.mark.compile
def test_artifact_cannot_be_stored_with_caches_off():
    artifact, _ = inductor.inductor_compile(
        *applied_to_itself(*SQUARED), {"force_disable_caches": True}
    )
    assert inductor.inductor_serialize(artifact) is None


@pytest.mark.compile
def test_code_in_a_folder_is_loaded_from_there(tmp_path):
    folder = str(tmp_path / "code")
    with (
        inductor.inductor_cache_directory(str(tmp_path / "scratch")),
        inductor.inductor_options(TOOLCHAIN),
    ):
        inductor.inductor_compile_to(*applied_to_itself(*SQUARED), {}, folder)
    x = torch.randn(4, 4)
    (result,) = inductor.inductor_load_from(folder)([x])
    torch.testing.assert_close(result, x @ x)


def test_pass_has_the_form_that_inductor_takes():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen = []
    made = inductor.graph_pass(seen.append, ["key"])
    assert isinstance(made, CustomGraphPass)
    graph = torch.fx.Graph()
    made(graph)
    assert seen == [graph]
    assert made.uuid() == ["key"]


def test_options_hold_only_inside():
    import torch._inductor.config as inductor_config
    from torch._inductor.cpu_vec_isa import VecISA

    before = (inductor_config.cpp.vec_isa_ok, VecISA.check_build)
    with inductor.inductor_options(TOOLCHAIN):
        assert inductor_config.cpp.vec_isa_ok is True
        assert inductor_config.autotune_local_cache is False
        assert VecISA.check_build is not before[1]
    assert (inductor_config.cpp.vec_isa_ok, VecISA.check_build) == before


def test_what_compiling_needs_is_imported():
    """Before it is used, in a process of its own: tests/torch_compat/test_first_imports.py."""
    inductor.import_inductor()
    assert "torch._inductor.graph" in sys.modules


def test_triton_is_told_a_folder_which_torchs_pool_keeps_otherwise(tmp_path, monkeypatch):
    """Its processes take over variables that are set, and keep others of an earlier compile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    for name in ("first", "second"):
        with inductor.inductor_cache_directory(str(tmp_path / name)):
            assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / name / "triton")
    assert os.environ["TRITON_CACHE_DIR"] == "before"


SHOWN = f"import os; print(*map(os.environ.get, {NAMES}), os.environ['OF_A_THREAD'])"


@pytest.mark.parametrize("before", [None, "/before"])
@pytest.mark.parametrize("given", ["nothing", "all", "a copy", "what is listed"])
def test_no_process_that_is_started_meanwhile_gets_the_directory(
    before, given, tmp_path, monkeypatch
):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
    monkeypatch.delenv("OF_A_THREAD", raising=False)
    with inductor.inductor_cache_directory(str(tmp_path)):
        os.environ["OF_A_THREAD"] = "kept"
        env = {
            "nothing": None,
            "all": os.environ,
            "a copy": os.environ.copy(),
            "what is listed": {**os.environ},
        }
        shown = subprocess.run(
            [sys.executable, "-c", SHOWN],
            env=env[given],
            close_fds=given != "all",  # else by posix_spawn, which counts them first
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert len(os.environ) == len([*os.environ])
        assert os.environ[NAMES[0]] == os.getenv(NAMES[0]) == str(tmp_path)
    assert os.environ.pop("OF_A_THREAD") == shown.pop() == "kept"
    assert str(tmp_path) not in " ".join(shown)
    assert shown == [str(before if given == "nothing" else None)] * 2
    assert directories() == [before, before]
