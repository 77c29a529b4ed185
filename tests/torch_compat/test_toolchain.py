"""The C++ toolchain that Inductor uses."""

import getpass
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from piecegraph.compile.backends.inductor import compiling, toolchain_directory
from piecegraph.torch_compat.compiling import inductor, toolchain


@pytest.mark.parametrize("code", ["int probe;", "not C++"])
def test_the_compiler_is_probed_once_a_machine(tmp_path, monkeypatch, code):
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.cpu_vec_isa import VecAVX512, VecISA

    original = VecISA.check_build

    def probe(scratch):
        with inductor.inductor_cache_directory(str(tmp_path / scratch)):
            with inductor.inductor_options(tmp_path / "toolchain"):
                return VecAVX512().check_build(code)

    builds = code == "int probe;"
    assert probe("first") is builds
    monkeypatch.setattr(CppBuilder, "build", lambda self: pytest.fail("built again"))
    assert probe("second") is builds
    assert VecISA.check_build is original


def test_compiler_is_found_and_says_its_version():
    compiler = toolchain.cpp_compiler()
    assert compiler is not None
    assert shutil.which(compiler)
    assert toolchain.compiler_version()


def test_no_compiler_is_none(monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    assert toolchain.cpp_compiler() is None


def test_stand_in_answers_and_refuses_to_compile(tmp_path):
    import torch._inductor.config as inductor_config

    options = inductor_config.patch({"cpp.cxx": (None, "/usr/missing/compiler")})
    with options, toolchain.without_compiler(str(tmp_path), b"some version"):
        compiler = toolchain.cpp_compiler()
        assert compiler is not None
        said = subprocess.run([compiler, "-v"], capture_output=True, text=True, check=True)
        assert said.stdout == "some version\n"
        assert subprocess.run([compiler, "-o", "x", "x.cpp"]).returncode == 1


@pytest.mark.parametrize("optimized", [None, "int i -= 1;"])
def test_a_library_is_named_by_its_text_alone(tmp_path, optimized):
    """Of the same text and another compiler, Python or torch; a header has its command's name."""
    from torch._inductor import codecache

    def named(text, command, extension="main.cpp", **place):
        return codecache.write(text, extension, extra=f"{optimized} {command}", **place)[0]

    here, there = "g++ i -O3 -I/a/torch", "/usr/bin/g++-12 i -O3 -I/b/torch -L/b/lib"
    directory = inductor.inductor_cache_directory(str(tmp_path))
    with directory, toolchain.named_libraries() as libraries:
        name = named("int x;", here)
        assert named("int x;", here) == named("int x;", there)
        assert libraries == [tmp_path / name[1:3] / f"{name}.main.so"] * 3
        assert named("int x;", here) != named("int y;", here)
        assert named("int x;", here) != codecache.write("int x;", "main.cpp", f"other {here}")[0]
        headers = {named("int x;", c, "h", specified_dir=str(tmp_path)) for c in (here, there)}
        assert len(headers) == 2


def test_a_library_that_was_not_stored_is_an_error(tmp_path):
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder, CppOptions

    text = tmp_path / "text.cpp"
    text.write_text("int x;")
    builder = CppBuilder("text", str(text), CppOptions(), str(tmp_path))
    with toolchain.without_compiler(str(tmp_path), b"some version"):
        with pytest.raises(FileNotFoundError, match=r"the library text\.so was not stored"):
            codecache._worker_compile_cpp(str(tmp_path / "lock"), [builder])


def test_no_header_is_compiled_for_code_that_is_loaded(tmp_path):
    import torch._inductor.config as inductor_config

    with toolchain.without_compiler(str(tmp_path), b"some version"):
        assert not inductor_config.cpp_cache_precompile_headers
    assert inductor_config.cpp_cache_precompile_headers


def test_headers_are_ready_or_not(tmp_path):
    assert not toolchain.cpp_headers_ready(tmp_path)
    (tmp_path / "one.gch").touch()
    assert toolchain.cpp_headers_ready(tmp_path)


@pytest.fixture
def made_headers(monkeypatch):
    """Headers that Inductor made, each of half of what is kept, in place of those it compiles."""
    from torch._inductor import codecache

    made = []
    half = toolchain.MAX_HEADER_BYTES // 2

    def precompile(header, command):
        directory = globals()["_HEADER_DIR"]  # of the module that it stands in
        path = f"{directory}/{header}"
        if not os.path.exists(f"{path}.gch"):
            made.append(directory)
            os.makedirs(directory, exist_ok=True)
            with open(f"{path}.gch", "wb") as file:
                file.truncate(half)
        return path

    monkeypatch.setattr(codecache._precompile_header, "__wrapped__", precompile)
    return made


def precompile(header):
    from torch._inductor import codecache

    return codecache._precompile_header(header, "g++")


def test_headers_are_used_from_the_given_directory_only(tmp_path, made_headers):
    from torch._inductor import codecache

    before = codecache._precompile_header, codecache._HEADER_DIR
    for _ in range(2):
        for name in ("one", "other"):
            with toolchain.precompiled_headers_in(tmp_path / name):
                header = precompile("prefix.h")
                assert header == str(tmp_path / name / "precompiled_headers" / "prefix.h")
    assert len(made_headers) == 2
    assert (codecache._precompile_header, codecache._HEADER_DIR) == before


def headers_in(directory):
    return {file.name for file in directory.glob("*.gch*")}


def test_headers_used_longest_ago_are_removed_when_one_is_made(tmp_path, made_headers):
    directory = tmp_path / "precompiled_headers"
    with toolchain.precompiled_headers_in(tmp_path):
        precompile("old.h")
    with toolchain.precompiled_headers_in(tmp_path):
        precompile("new.h")
    for age, name in enumerate(("old.h", "new.h", "killed.h.gch.17")):
        file = directory / (name if age == 2 else f"{name}.gch")
        with open(file, "ab") as part:
            part.truncate(toolchain.MAX_HEADER_BYTES // 2)
        os.utime(file, (0, 1000 + age))
    with toolchain.precompiled_headers_in(tmp_path):  # such as a load
        assert len(headers_in(directory)) == 3
        precompile("old.h")  # used now, and not made
    assert len(headers_in(directory)) == 3
    with toolchain.precompiled_headers_in(tmp_path):
        precompile("newest.h")
    assert headers_in(directory) == {"old.h.gch", "newest.h.gch"}


@pytest.fixture
def asks(tmp_path, monkeypatch):
    """Precompiles a header as Inductor does; says how often it was asked for by the text."""
    from torch._inductor import codecache, cpp_builder

    part, made = tmp_path / "part.h", tmp_path / "precompiled_headers" / "one.h"
    part.write_text("int one;")
    os.utime(part, (0, 1000))
    made.parent.mkdir()
    made.write_text(f'#include "{part}"')
    asked = []

    def precompile(header, command):
        asked.append(header)
        cpp_builder.run_compile_cmd(f"g++ -x c++-header {made} -o {made}.gch", ".")
        return str(made)

    monkeypatch.setattr(codecache._precompile_header, "__wrapped__", precompile)

    def ask(command="g++"):
        asked.clear()
        with toolchain.precompiled_headers_in(tmp_path):
            codecache._precompile_header("one.h", command)
        return len(asked)

    return SimpleNamespace(ask=ask, part=part, folder=made.parent)


def test_a_header_is_found_by_the_files_that_it_was_made_of(asks):
    assert [asks.ask(), asks.ask(), asks.ask()] == [1, 0, 0]
    assert [asks.ask("g++ -O3"), asks.ask("g++ -O3"), asks.ask()] == [1, 0, 0]
    asks.part.write_text("int two;")
    os.utime(asks.part, (0, 1001))
    assert [asks.ask(), asks.ask()] == [1, 0]
    asks.part.write_text("int three;")
    os.utime(asks.part, (0, 1001))
    assert [asks.ask(), asks.ask()] == [1, 0]


def test_a_file_that_changes_while_its_header_is_made_is_read_again(asks):
    os.utime(asks.part, (0, time.time() + 60))
    assert [asks.ask(), asks.ask()] == [1, 1]


@pytest.mark.parametrize("lost", ["*.gch", "*.gch.files"])
def test_a_header_that_was_removed_is_made_again(asks, lost):
    asks.ask()
    for file in asks.folder.glob(lost):
        file.unlink()
    assert [asks.ask(), asks.ask()] == ([1, 0] if lost == "*.gch" else [0, 0])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"half", b'["x", {"/": 1}]'])
def test_a_damaged_list_of_files_is_written_again(asks, content):
    asks.ask()
    (known,) = asks.folder.glob("*.made-of")
    known.write_bytes(content)
    assert [asks.ask(), asks.ask()] == [1, 0]


@pytest.mark.parametrize("killed", [False, True])
def test_a_header_has_its_name_when_it_is_complete(tmp_path, monkeypatch, killed):
    from torch._inductor import codecache, cpp_builder

    def compile_half(command, cwd):
        Path(command.split()[-1]).write_bytes(b"half")
        if killed:
            raise KeyboardInterrupt

    def build(header, command):
        cpp_builder.run_compile_cmd(f"g++ -o {tmp_path}/x.h.gch", "")
        return f"{tmp_path}/{header}"

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", compile_half)
    monkeypatch.setattr(codecache._precompile_header, "__wrapped__", build)
    with toolchain.precompiled_headers_in(tmp_path / "headers"):
        with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
            precompile("x.h")
    assert (tmp_path / "x.h.gch").exists() is not killed


def test_kept_probes_are_found(tmp_path):
    assert toolchain.probes(tmp_path) == {}
    toolchain.keep_probe(tmp_path, "a" * 64, b"builds")
    toolchain.keep_probe(tmp_path, "b" * 64, b"")
    assert toolchain.probes(tmp_path) == {"a" * 64: b"builds", "b" * 64: b""}
    assert toolchain.known_probe(tmp_path, "a" * 64) == b"builds"
    assert toolchain.known_probe(tmp_path, "c" * 64) is None


def test_pipes_links_and_other_names_among_probes_are_ignored(tmp_path):
    """Opening a pipe to read it would wait for a writer."""
    toolchain.keep_probe(tmp_path, "a" * 64, b"builds")
    directory = tmp_path / toolchain.PROBES
    os.mkfifo(directory / ("b" * 64))
    (directory / ("c" * 64)).symlink_to("a" * 64)
    (directory / ("d" * 64)).mkdir()
    (directory / ("X" * 64)).write_bytes(b"builds")
    assert toolchain.probes(tmp_path) == {"a" * 64: b"builds"}
    assert [toolchain.known_probe(tmp_path, name * 64) for name in "bcd"] == [None] * 3


def test_directory_that_another_user_made_first_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = toolchain_directory("scratch")
    assert directory.parent == tmp_path
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o777)
    assert toolchain_directory("scratch") == Path("scratch")
    directory.rmdir()
    directory.symlink_to(tmp_path)
    assert toolchain_directory("scratch") == Path("scratch")


@pytest.mark.compile
def test_pipe_in_torchs_directory_does_not_stop_a_compile(tmp_path, monkeypatch):
    """That directory, which any user can create first, is not looked at."""
    planted = tmp_path / f"torchinductor_{getpass.getuser()}" / "isa_probes"
    planted.mkdir(parents=True)
    os.mkfifo(planted / ("0" * 64))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for the pipe"))
    signal.alarm(60)
    try:
        with compiling():
            from torch._inductor.cpu_vec_isa import VecAVX512

            assert not VecAVX512().check_build("not C++")
        assert len(toolchain.probes(toolchain_directory(""))) == 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_f7_extensions_of_the_cpu_are_those_that_stand_for_instructions(tmp_path):
    facts = tmp_path / "cpuinfo"
    facts.write_text(
        "processor : 0\nflags\t\t: fpu avx2 amx_tile md_clear avx512_fp16 ibrs\n\nflags : no"
    )
    assert toolchain.cpu_extensions(facts) == ("amx_tile", "avx2", "avx512_fp16")
    facts.write_text("Features : asimd sve\n")
    assert toolchain.cpu_extensions(facts) == ("asimd", "sve")
    assert toolchain.cpu_extensions(tmp_path / "none") == ()
