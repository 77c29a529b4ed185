"""The C++ toolchain that Inductor uses: compiler, headers, probes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .patch import compiler_lock, preserve_cache_variables


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor runs in this process; None where there is none."""
    with preserve_cache_variables():
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            return get_cpp_compiler()
        except InvalidCxxCompiler:
            return None


_NO_COMPILER = """#!/bin/sh
case " $* " in
    *" --version "*) echo "g++ (GCC)"; exit 0 ;;
    " -v ") IFS= read -r line < "$0.version"; printf '%s\\n' "$line"; exit 0 ;;
    *" sha512 "*) echo "= none"; exit 0 ;;
    *" -E "* | *" c++-header "*) ;;
    *) exit 1 ;;
esac
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && { : > "$2"; exit 0; }
    shift
done
exit 1
"""


def compiler_version() -> bytes:
    """What the C++ compiler says of itself; Inductor names its probes of the CPU after it."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    return get_compiler_version_info(get_cpp_compiler()).removesuffix("_").encode()


@contextmanager
def without_compiler(folder: str, version: bytes) -> Iterator[None]:
    """Let code whose libraries are all there be loaded where no C++ compiler is installed.

    Before Inductor looks for a library it asks the compiler for its `version`, and has it prepare
    headers, which `openssl` hashes. Where there is no compiler, a program in `folder` answers as
    the one did that made the libraries, with empty headers, for as long as this lasts; it refuses
    to compile. Torch names prepared headers by content and compiler, so
    an empty one is never taken for one that a compiler made.
    """
    import torch._inductor.config as inductor_config

    name = inductor_config.cpp.cxx[-1]
    with compiler_lock:
        if shutil.which(name) is not None:
            yield
            return
        for missing in (name, "openssl"):
            stand_in = Path(folder, os.path.basename(missing))
            stand_in.write_text(_NO_COMPILER)
            stand_in.chmod(0o700)
            Path(f"{stand_in}.version").write_bytes(version + b"\n")
        before = os.environ.get("PATH", "")
        os.environ["PATH"] = f"{before}{os.pathsep}{folder}"
        try:
            yield
        finally:
            os.environ["PATH"] = before


def cpp_headers_ready() -> bool:
    """Whether Inductor's precompiled C++ headers were built on this machine, for any options."""
    with preserve_cache_variables():
        from torch._inductor import codecache

    directory = getattr(codecache, "_HEADER_DIR", None)
    return directory is None or any(Path(directory).rglob("*.gch"))


def probes() -> dict[str, bytes]:
    """What C++ compilers can, here and where artifacts came from; b"" for what one cannot."""
    return {file.name: file.read_bytes() for file in _probes().glob("?" * 64)}


def keep_probe(name: str, answer: bytes) -> None:
    """Add to `probes`; where nothing can be written, the compiler is asked again each time."""
    with suppress(OSError):
        _probes().mkdir(parents=True, exist_ok=True)
        whole = _probes() / f"{name}.{os.getpid()}"
        whole.write_bytes(answer)
        whole.replace(_probes() / name)


def _probes() -> Path:
    with preserve_cache_variables():
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir(), "isa_probes")
