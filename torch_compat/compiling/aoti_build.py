"""Build the C++ of AOTInductor libraries: in threads, and what is equal in all of them only once.

Torch writes the text of its model container (interface.cpp) into the code of each library, and
includes headers that instantiate the standard library's regular expressions. Here both are compiled
once for a machine, a torch build and flags, and the object file is linked into each library. A
library's own part takes a fifth of the time. If the text is not as expected, or anything fails, a
library is built as torch builds it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from .toolchain import compiler_version, cpu_extensions, keep_object, known_object

_REGEX = """\
#ifndef PIECEGRAPH_REGEX
#define PIECEGRAPH_REGEX
#include <regex>
namespace std {
struct piecegraph_regex {
  const char* pattern;
  piecegraph_regex(const char* text) : pattern(text) {}
};
bool regex_match(const string&, smatch&, const piecegraph_regex&);
}
#endif
"""
"""A regular expression that only the shared object compiles and matches."""
_USE_REGEX = f"{_REGEX}#define regex piecegraph_regex\n"
_DEFINE_REGEX = """
bool std::regex_match(const string& text, smatch& found, const piecegraph_regex& expression) {
  return regex_match(text, found, regex(expression.pattern));
}
"""
_MODEL = "torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>"
_DEFINE_MODEL = f"template class {_MODEL};\n"
_DECLARE_MODEL = f"""\
#undef regex
#include <torch/csrc/inductor/aoti_runtime/interface.h>
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>
extern template class {_MODEL};
"""
_CHECKS = re.compile(
    r"AOTI_NOINLINE static void check_input_0\(.*?(?=static bool _check_aoti_runtime_check_inputs)|"
    r"^ *check_input_\d+\(input_handles\);$",
    re.DOTALL | re.MULTILINE,
)
"""Checks of a library's inputs that run only if AOTI_RUNTIME_CHECK_INPUTS is set."""


class LibraryBuilds:
    """Threads that run C++ compilers and linkers, and the object files that libraries share."""

    def __init__(self, compilers: Executor, linkers: Executor, toolchain: Path) -> None:
        self.compilers, self.linkers, self._toolchain = compilers, linkers, toolchain
        self._shared: dict[str, Future[bytes]] = {}
        self.fallbacks: list[str] = []
        """Why libraries were built as torch builds them."""

    def shared_object(
        self, source: str, compiler: list[str], run: Callable[[str, str], None], folder: Path
    ) -> Future[bytes]:
        """The object file of `source`, known on this machine or built in a thread."""
        facts = [source, *compiler, torch.__version__, str(torch.version.git_version)]
        facts += [*cpu_extensions(), compiler_version().decode()]
        headers = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime"
        facts += [file.read_text() for file in sorted(headers.glob("*.h"))]
        name = hashlib.sha256("\0".join(facts).encode()).hexdigest()

        def build() -> bytes:
            if (known := known_object(self._toolchain, name)) is not None:
                return known
            code, output = folder / f"{name}.cpp", folder / f"{name}.o"
            code.write_text(source)
            run(shlex.join([*compiler, str(code), "-c", "-o", str(output)]), str(folder))
            keep_object(self._toolchain, name, built := output.read_bytes())
            return built

        if name not in self._shared:
            self._shared[name] = self.compilers.submit(build)
        return self._shared[name]


@contextmanager
def library_builds(toolchain: Path) -> Iterator[LibraryBuilds]:
    """As many threads as Inductor runs C++ compilers at a time."""
    from torch._inductor.async_compile import get_compile_threads

    count = max(1, get_compile_threads())
    with ThreadPoolExecutor(count) as compilers, ThreadPoolExecutor(count) as linkers:
        yield LibraryBuilds(compilers, linkers, toolchain)


def precompiled_header(header: str) -> str:
    """What Inductor precompiles for a library's own part, as it stands in `#include <…>`."""
    return f"regex>\n{_USE_REGEX}#include <{header}"


class Build:
    """The commands for one library: its C++ is compiled, then linked, in threads.

    Torch removes the object files after it has linked them, so the link finds them under a name of
    ours.
    """

    def __init__(self, builds: LibraryBuilds, run: Callable[[str, str], None]) -> None:
        self._builds, self._run = builds, run
        self._objects: list[Future[None]] = []
        self._parts: tuple[Future[None], Future[bytes]] | None = None
        self._whole: list[str] = []
        self._link: list[str] = []

    def command(self, command: str, cwd: str) -> None:
        words = shlex.split(command)
        output = words[words.index("-o") + 1]
        source = next((word for word in words if word.endswith(".cpp")), "")
        if "-c" in words and source.endswith((".wrapper.cpp", ".kernel.cpp")):
            words[words.index("-o") + 1] = _kept(output)
            if source.endswith(".wrapper.cpp"):
                self._compile_wrapper(words, source)
            else:
                self._objects.append(self._submit(words))
            Path(output).touch()
        elif output.endswith(".so"):
            for place, word in enumerate(words):
                if word.endswith(".o") and os.path.isfile(word):
                    words[place] = _kept(word)
                    if os.path.getsize(word):
                        os.link(word, words[place])
            self._link = words
        else:
            self._run(command, cwd)

    def link(self, library: Path) -> Future[Path]:
        """Make the library when the compilers are done."""
        if library.exists():  # torch appends weights of more than 2 GB to a linked library
            raise RuntimeError(f"torch wrote to {library.name} before it was linked")
        return self._builds.linkers.submit(self._linked, library)

    def _linked(self, library: Path) -> Path:
        for each in self._objects:
            each.result()
        folder = str(library.parent)
        if self._parts is not None:
            own, shared = self._parts
            try:
                own.result()
                beside = library.with_suffix(".shared.o")
                beside.write_bytes(shared.result())
                words = self._link.copy()
                words.insert(1, str(beside))
                self._run(shlex.join(words), folder)
                ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
                return library
            except Exception as error:
                self._builds.fallbacks.append(f"{type(error).__name__}: {error}")
                self._run(shlex.join(self._whole), folder)
        self._run(shlex.join(self._link), folder)
        return library

    def _compile_wrapper(self, words: list[str], source: str) -> None:
        """Start to compile a wrapper, without the model container if its text is as expected."""
        place = words.index("-o")
        compiler = [*words[:place], *words[place + 2 :]]
        compiler = [word for word in compiler if word not in (source, "-c")]
        if "-include" in compiler:  # of `precompiled_header`
            place = compiler.index("-include")
            del compiler[place : place + 2]
        self._whole = [*compiler, source, "-c", "-o", words[words.index("-o") + 1]]
        parts = _parts(Path(source).read_text())
        if parts is None:
            self._builds.fallbacks.append("the text of the model container is not as expected")
            self._objects.append(self._submit(self._whole))
            return
        own, shared = parts
        file = Path(f"{source}.own.cpp")
        file.write_text(own)
        built = self._builds.shared_object(shared, compiler, self._run, file.parent)
        own_words = [str(file) if word == source else word for word in words]
        self._parts = self._submit(own_words), built

    def _submit(self, words: list[str]) -> Future[None]:
        folder = os.path.dirname(words[words.index("-o") + 1])
        return self._builds.compilers.submit(self._run, shlex.join(words), folder)


def _parts(wrapper: str) -> tuple[str, str] | None:
    """The code of a wrapper without the model container, and that of the container."""
    import torch._inductor.codegen as codegen

    interface = Path(codegen.__path__[0], "aoti_runtime", "interface.cpp")
    container = interface.read_text().strip() if interface.is_file() else ""
    head, found, own = wrapper.partition(container) if container else (wrapper, "", "")
    if not found or container in own:
        return None
    includes = "".join(f"{line}\n" for line in head.splitlines() if line.startswith("#include"))
    shared = f"{_REGEX}{includes}{container}\n{_DEFINE_REGEX}{_DEFINE_MODEL}"
    return f"{_USE_REGEX}{head}{_DECLARE_MODEL}{_CHECKS.sub('', own)}", shared


def _kept(file: str) -> str:
    return f"{file}.kept.o"
