"""What AOTInductor libraries share is built once; what fails is built as torch does."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from piecegraph.torch_compat.compiling import aoti_build


def test_the_header_declares_a_regular_expression_and_includes_what_was_asked_for() -> None:
    text = aoti_build.precompiled_header("torch/cpu.h")
    assert text.startswith("regex>\n")
    assert text.endswith("#define regex piecegraph_regex\n#include <torch/cpu.h")


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
