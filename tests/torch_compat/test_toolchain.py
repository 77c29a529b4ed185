"""The C++ toolchain that Inductor uses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from piecegraph.torch_compat import inductor, toolchain


@pytest.mark.parametrize("code", ["int probe;", "not C++"])
def test_the_compiler_is_probed_once_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.cpu_vec_isa import VecAVX512, VecISA

    original = VecISA.check_build

    def probe(scratch: str) -> bool:
        with inductor.inductor_cache_directory(str(tmp_path / scratch)):
            with inductor.inductor_options():
                return VecAVX512().check_build(code)

    monkeypatch.setattr(toolchain, "_probes", lambda: tmp_path / "probes")
    builds = code == "int probe;"
    assert probe("first") is builds
    monkeypatch.setattr(CppBuilder, "build", lambda self: pytest.fail("built again"))
    assert probe("second") is builds
    assert VecISA.check_build is original


def test_compiler_is_found_and_says_its_version() -> None:
    compiler = toolchain.cpp_compiler()
    assert compiler is not None
    assert shutil.which(compiler)
    assert toolchain.compiler_version()


def test_no_compiler_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    assert toolchain.cpp_compiler() is None


def test_stand_in_answers_and_refuses_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor_config

    monkeypatch.setattr(inductor_config.cpp, "cxx", (None, "no-such-compiler"))
    before = os.environ["PATH"]
    with toolchain.without_compiler(str(tmp_path), b"some version"):
        said = subprocess.run(
            ["no-such-compiler", "-v"], capture_output=True, text=True, check=True
        )
        assert said.stdout == "some version\n"
        assert subprocess.run(["no-such-compiler", "-o", "x", "x.cpp"]).returncode == 1
    assert os.environ["PATH"] == before


def test_headers_are_ready_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    assert not toolchain.cpp_headers_ready()
    (tmp_path / "one.gch").touch()
    assert toolchain.cpp_headers_ready()


def test_kept_probes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_probes", lambda: tmp_path / "probes")
    assert toolchain.probes() == {}
    toolchain.keep_probe("a" * 64, b"builds")
    toolchain.keep_probe("b" * 64, b"")
    assert toolchain.probes() == {"a" * 64: b"builds", "b" * 64: b""}


def test_f7_extensions_of_the_cpu_are_those_that_stand_for_instructions(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text(
        "processor : 0\nflags\t\t: fpu avx2 amx_tile md_clear avx512_fp16 ibrs\n\nflags : no"
    )
    assert toolchain.cpu_extensions(facts) == ("amx_tile", "avx2", "avx512_fp16")
    facts.write_text("Features : asimd sve\n")
    assert toolchain.cpu_extensions(facts) == ("asimd", "sve")
    assert toolchain.cpu_extensions(tmp_path / "none") == ()
