"""AOTInductor libraries: compile, load."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat import aoti, aoti_build, inductor, settings, tensors
from piecegraph.torch_compat.patch import replaced

TOOLCHAIN = toolchain_directory("")
CPU = torch.device("cpu")


def applied_to_itself(op: Callable[..., Any]) -> tuple[torch.fx.GraphModule, torch.Tensor]:
    """The graph of `op(x, x)`, and a fake `x`."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(op, (x, x)),))
    with tensors.fresh_fake_mode():
        return torch.fx.GraphModule({}, graph), torch.empty(8, 2)


@pytest.mark.compile
def test_libraries_are_compiled_and_loaded(tmp_path: Path) -> None:
    before = settings.changed_settings()
    made = {}
    with inductor.inductor_cache_directory(str(tmp_path)), inductor.inductor_options(TOOLCHAIN):
        with aoti_build.library_builds(TOOLCHAIN) as builds:
            for op in (torch.add, torch.mul):
                module, fake = applied_to_itself(op)
                dynamic = [{0: ("s0", 1, 64)}]
                made[op] = aoti.aoti_compile(module, [fake], dynamic, {}, builds)
            runs = {op: aoti.aoti_load(str(m.library.result()), CPU) for op, m in made.items()}
    assert builds.fallbacks == []
    assert settings.changed_settings() == before  # later models of the process keep their keys
    for op, run in runs.items():
        assert (1, 64) in made[op].ranges.values()
        for size in (1, 5, 64):
            x = torch.randn(size, 2)
            (result,) = run([x])
            assert torch.equal(result, op(x, x))


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
        aoti_build.library_builds(TOOLCHAIN) as builds,
    ):
        made = aoti.aoti_compile(module, [fake], [{}], {}, builds)
        with pytest.raises(OSError, match="no space left"):
            made.library.result()
    assert [".own.cpp" in each for each in refused] == [True, False]  # then as torch builds it


def container() -> str:
    import torch._inductor.codegen as codegen

    return Path(codegen.__path__[0], "aoti_runtime", "interface.cpp").read_text()


class Commands:
    """Runs the compilers of one library: each writes its own command, unless it fails."""

    def __init__(self, tmp_path: Path, wrapper: str, fails: str = "") -> None:
        self.ran: list[str] = []
        self.fails, self.folder = fails, tmp_path
        (tmp_path / "m.wrapper.cpp").write_text(wrapper)

    def run(self, command: str, cwd: str) -> None:
        words = shlex.split(command)
        self.ran.append(command)
        if self.fails and any(word.endswith(self.fails) for word in words):
            raise RuntimeError(f"cannot make {self.fails}")
        Path(words[words.index("-o") + 1]).write_text(command)

    def library(self, toolchain: Path) -> tuple[str, list[str]]:
        """The command that linked the library, and why torch's way was taken."""
        base = self.folder / "m"
        with aoti_build.library_builds(toolchain) as builds:
            build = aoti_build.Build(builds, self.run)
            compile_it = f"g++ {base}.wrapper.cpp -O1 -include own.h -c -o {base}.wrapper.o"
            build.command(compile_it, str(self.folder))
            build.command(f"g++ {base}.wrapper.o -shared -o {base}.so", str(self.folder))
            build.link(Path(f"{base}.so")).result()
        return (self.folder / "m.so").read_text(), builds.fallbacks


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Libraries that the system was asked to load."""
    loaded: list[str] = []
    monkeypatch.setattr(aoti_build.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    return loaded


def test_what_libraries_share_is_built_once_per_machine(tmp_path: Path, loads: list[str]) -> None:
    (tmp_path / "toolchain").mkdir()
    made = []
    for name, own in (("one", "int own;\n"), ("two", "int other;\n")):
        (tmp_path / name).mkdir()
        wrapper = f"#include <x.h>\n{container()}\n{own}"
        commands = Commands(tmp_path / name, wrapper)
        linked, fallbacks = commands.library(tmp_path / "toolchain")
        assert ".shared.o" in linked
        assert fallbacks == []
        code = (tmp_path / name / "m.wrapper.cpp.own.cpp").read_text()
        assert own in code
        assert container() not in code
        made.append(sum(".cpp.own.cpp" not in ran and "-c" in ran for ran in commands.ran))
    assert made == [1, 0]
    assert len(loads) == 2
    (kept,) = (tmp_path / "toolchain" / "objects").iterdir()
    kept.write_bytes(b"damaged")
    (tmp_path / "two" / "m.so").unlink()
    assert ".shared.o" in commands.library(tmp_path / "toolchain")[0]
    assert kept.read_bytes() != b"damaged"


@pytest.mark.parametrize("failure", [".own.cpp", "keep", ".shared.o", "load", "text"])
def test_a_library_is_built_as_torch_does_if_its_parts_fail(
    tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    text = container() if failure != "text" else container().replace("NoGrad", "NoGradients")
    commands = Commands(tmp_path, f"#include <x.h>\n{text}\nint own;\n", failure)
    if failure == "keep":
        monkeypatch.setattr(aoti_build, "keep_object", lambda *_: 1 / 0)
    if failure == "load":
        monkeypatch.setattr(aoti_build.ctypes, "CDLL", lambda *_, **__: 1 / 0)
    linked, fallbacks = commands.library(tmp_path)
    assert ".shared.o" not in linked
    assert len(fallbacks) == 1
    whole = [each for each in commands.ran if "m.wrapper.cpp -c" in each]
    assert len(whole) == 1
    assert "-include" not in whole[0]  # a header that needs the shared object


def test_checks_that_only_a_variable_turns_on_are_left_out() -> None:
    wrapper = f"""#include <x.h>
{container()}
AOTI_NOINLINE static void check_input_0(
    AtenTensorHandle* input_handles
) {{ many(); lines(); }}
AOTI_NOINLINE static void check_input_1() {{ more(); }}
static bool _check_aoti_runtime_check_inputs_env() {{ return false; }}
static void __check_inputs_outputs() {{
    check_input_0(input_handles);
    check_input_1(input_handles);
}}
void run() {{}}
"""
    parts = aoti_build._parts(wrapper)
    assert parts is not None
    own = parts[0].partition("vector>")[2]
    assert "check_input_" not in own
    assert "static bool _check_aoti_runtime_check_inputs_env() { return false; }" in own
    assert "void run() {}" in own
