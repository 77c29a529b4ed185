"""The C++ toolchain that Inductor uses: compiler, headers, probes."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..basics.patch import compiler_lock, preserve_cache_variables, replaced, with_globals


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor uses in this process; None if there is none."""
    with preserve_cache_variables():
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            return get_cpp_compiler()
        except InvalidCxxCompiler:
            return None


MAX_HEADER_BYTES = 2 << 30
"""Most that precompiled headers take, of all installed torch versions and compilers."""
PROBES = "isa_probes"
_IS_PROBE = re.compile("[0-9a-f]{64}").fullmatch

_NO_COMPILER = """#!/bin/sh
case " $* " in
    *" --version "*) echo "g++ (GCC)"; exit 0 ;;
    " -v ") IFS= read -r line < "$0.version"; printf '%s\\n' "$line"; exit 0 ;;
esac
exit 1
"""


def compiler_version() -> bytes:
    """Version text of the C++ compiler; part of the names of Inductor's CPU probes."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    return get_compiler_version_info(get_cpp_compiler()).removesuffix("_").encode()


@contextmanager
def without_compiler(folder: str, version: bytes) -> Iterator[None]:
    """Load code with all its libraries, with or without a C++ compiler on the machine.

    Inductor would compile a library that it does not find; here that is an error. Before it looks
    for one it precompiles headers, for which it runs the preprocessor even if they exist (0.3 s);
    here it does not. And it asks the compiler for its `version`. If there is no compiler, a script
    in `folder` answers like the one that built the libraries, and refuses to compile.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor import codecache

    def must_exist(lock: str, builders: Sequence[Any]) -> None:
        library = builders[-1].get_target_file_path()
        if not os.path.exists(library):
            raise FileNotFoundError(f"the library {os.path.basename(library)} was not stored")

    with (
        compiler_lock(),
        replaced(codecache, "_worker_compile_cpp", must_exist),
        inductor_config.patch({"cpp_cache_precompile_headers": False}),
    ):
        if shutil.which(inductor_config.cpp.cxx[-1]) is not None:
            yield
            return
        stand_in = Path(folder, "g++")
        stand_in.write_text(_NO_COMPILER)
        stand_in.chmod(0o700)
        Path(f"{stand_in}.version").write_bytes(version + b"\n")
        with inductor_config.patch({"cpp.cxx": (None, str(stand_in))}):
            yield


@contextmanager
def named_libraries() -> Iterator[list[Path]]:
    """Name each C++ library by its text alone, in the cache directory of one compile.

    Yields the libraries of the code that is generated or loaded inside. Inductor also puts the
    compile command, with its absolute paths, into a library's name, and finds the library by that
    name: it would miss it in another container. The options of the command are equal for all code
    of one compile, and factors of the key under which it is stored.
    """
    from torch._inductor import codecache

    original = codecache.write
    libraries: list[Path] = []

    def write(content: Any, extension: str, extra: str = "", *args: Any, **options: Any) -> Any:
        if extension in ("main.cpp", "optimized.cpp"):
            # the text of the optimized part, if there is one, and a command such as "g++ i -O3 …"
            before, separator, _ = extra.rpartition(" i -")
            extra = before.rpartition(" ")[0] if separator else extra
        key, path = original(content, extension, extra, *args, **options)
        if extension == "main.cpp":
            libraries.append(Path(path).with_suffix(".so"))
        return key, path

    with replaced(codecache, "write", write):
        yield libraries


def cpp_headers_ready(toolchain: Path) -> bool:
    """Whether `toolchain` has Inductor's precompiled C++ headers, for any options."""
    with preserve_cache_variables():
        from torch._inductor import codecache

    return not hasattr(codecache, "_HEADER_DIR") or any(toolchain.rglob("*.gch"))


@contextmanager
def precompiled_headers_in(toolchain: Path) -> Iterator[None]:
    """Let Inductor use and store precompiled C++ headers in `toolchain`.

    Its own place for them is `torchinductor_<user>` in the directory for temporary files, which it
    uses without checking the owner. Each installed torch and set of options has its own, of 150 MB:
    when one is made, those that no process has used for longest are removed. Where one is missing,
    the compiler reads the plain header.

    Inductor preprocesses the header in each process to find the one that was made of equal text,
    which takes 0.1 of 5 s of a cold start. It is found by the files that were read, while each has
    the size and the time of its last change that it had.
    """
    with preserve_cache_variables():
        from torch._inductor import codecache

    if not hasattr(codecache, "_HEADER_DIR"):
        yield
        return
    directory = toolchain / "precompiled_headers"
    here = {"_HEADER_DIR": str(directory), "_HEADER_LOCK_DIR": f"{directory}/locks"}
    original = inspect.unwrap(codecache._precompile_header)
    # torch's own cache has headers that were made in other directories
    build = functools.cache(with_globals(original, vars(codecache) | here))

    def precompile(header: str, *command: Any, **options: Any) -> str:
        # the options are in the command
        asked = f"{header} {command}".encode() + compiler_version()
        name = f"{hashlib.sha256(asked).hexdigest()}.made-of"
        before, began = set(directory.glob("*.gch")), time.time_ns()
        if (plain := _header_of_files(directory / name)) is None:
            plain = str(build(header, *command, **options))
            _publish(directory, name, _files_of_header(plain, began))
        made = Path(f"{plain}.gch")
        with suppress(OSError):  # another process has removed it
            os.utime(made)
        if made not in before:
            _remove_oldest(directory, "*.gch*", MAX_HEADER_BYTES)
        return plain

    with replaced(codecache, "_precompile_header", precompile), _complete_headers():
        yield


def _files_of_header(plain: str, before_ns: int) -> bytes:
    """A header and what it was made of, in JSON; nothing if a file may have changed since."""
    with suppress(OSError, ValueError):
        read = Path(f"{plain}.gch.files").read_text().replace("\\\n", " ").split()[1:]
        files = {file: _version(file) for file in read if file != plain}
        if files and all(changed < before_ns for _, changed in files.values()):
            return json.dumps([plain, files]).encode()
    return b""


def _header_of_files(known: Path) -> str | None:
    """The header that was made of files which are as they were then."""
    with suppress(OSError, ValueError, TypeError, AttributeError):  # others may write there
        plain, files = json.loads(known.read_bytes())
        if all([*_version(file)] == version for file, version in files.items()):
            return str(plain) if os.path.exists(f"{plain}.gch") else None
    return None


def _version(file: str) -> tuple[int, int]:
    facts = os.stat(file)
    return facts.st_size, facts.st_mtime_ns


@contextmanager
def _complete_headers() -> Iterator[None]:
    """Give a precompiled header its name only when it is complete.

    The compiler fails on a part of a header, which a killed process leaves.
    """
    from torch._inductor import cpp_builder

    original = cpp_builder.run_compile_cmd

    def run(command: str, cwd: str) -> None:
        words = shlex.split(command)
        output = words[words.index("-o") + 1] if "-o" in words else ""
        if output.endswith(".gch"):
            part = f"{output}.{os.getpid()}"
            words[1:1] = ["-MD", "-MF", f"{part}.files"]
            original(shlex.join([part if word == output else word for word in words]), cwd)
            with suppress(FileNotFoundError):
                os.replace(f"{part}.files", f"{output}.files")
            os.replace(part, output)
        else:
            original(command, cwd)

    with replaced(cpp_builder, "run_compile_cmd", run):
        yield


def _remove_oldest(directory: Path, pattern: str, limit: int) -> None:
    """Remove the files used longest ago beyond `limit` bytes."""
    files = []
    for file in directory.glob(pattern):
        with suppress(OSError):  # another process removes them at the same time
            files.append((file.stat(), file))
    total = 0
    for facts, file in sorted(files, key=lambda each: each[0].st_mtime, reverse=True):
        total += facts.st_size
        if total > limit:
            file.unlink(missing_ok=True)


def _publish(directory: Path, name: str, content: bytes) -> None:
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        whole = directory / f"{name}.{os.getpid()}"
        whole.write_bytes(content)
        whole.replace(directory / name)


def probes(toolchain: Path) -> dict[str, bytes]:
    """Results of compiler probes, of this machine and of loaded artifacts; b"" if it failed."""
    with suppress(OSError):
        names = os.listdir(toolchain / PROBES)
        results = {name: known_probe(toolchain, name) for name in names if _IS_PROBE(name)}
        return {name: result for name, result in results.items() if result is not None}
    return {}


def known_probe(toolchain: Path, name: str) -> bytes | None:
    """The result of one probe, None if it was not run. Special files are ignored."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(toolchain / PROBES / name, flags)
    except OSError:
        return None
    try:
        return os.read(descriptor, 64) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


def keep_probe(toolchain: Path, name: str, answer: bytes) -> None:
    """Add a result to `probes`; without write access the probe is repeated each time."""
    _publish(toolchain / PROBES, name, answer)


_EXTENSIONS = re.compile(
    r"sse\w*|ssse3|avx\w*|amx\w*|fma4?|f16c|bmi[12]|adx|abm|popcnt|movbe|aes|vaes|v?pclmulqdq|"
    r"sha_ni|sha512|sm[34]|gfni|xsave\w*|rdrand|rdseed|rdpid|fsgsbase|clflushopt|clwb|movdir\w+|"
    r"serialize|waitpkg|tsxldtrk|rtm|hle|3dnowprefetch|mwaitx|tbm|xop|lzcnt|cldemote|ptwrite|cx16"
)
"""Flags of an x86 CPU that name instruction sets; others describe its kernel and its defects."""


def cpu_extensions(facts: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """The instruction-set extensions of this machine's CPU, sorted; empty where none are stated."""
    with suppress(OSError), facts.open() as lines:
        for line in lines:
            name, _, stated = line.partition(":")
            if name.strip() == "flags":
                return tuple(sorted(f for f in stated.split() if _EXTENSIONS.fullmatch(f)))
            if name.strip() == "Features":  # of an ARM CPU: all name instruction sets
                return tuple(sorted(stated.split()))
    return ()
