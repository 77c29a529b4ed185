"""C++ kernels of a piece are built together, while the code of the next piece is generated.

One call of g++ takes 0.5 s of CPU time before it reads a kernel: it instantiates what the
precompiled header leaves pending, and links. Each kernel of a call adds 0.05 s.
Saves: 2.1 of 13.4 s of CPU time of a process that starts with 32 layers, whose six kernels are
built by three calls, and a third of the start on two busy cores (6 starts each way, in turn, of
what `python -m benchmarks prepare --quick` starts).
For: torch 2.11 to 2.15. Triton kernels are waited for as before: the artifact has their binaries.
Can go: once `standalone_compile` builds kernels together and returns before they are built.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..basics.patch import replaced

UNIT_BYTES = 32 << 10
"""Text of the kernels that are built together: those of a large piece are built in parallel."""

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*\n", re.MULTILINE)

_ENTRY = """
#include <dlfcn.h>
#include <cstring>
PyMODINIT_FUNC PyInit_kernel(void) {{
    static const char here = 0;
    Dl_info library;
    if (dladdr(&here, &library)) {{
        {choices}
    }}
    PyErr_SetString(PyExc_ImportError, "the library is named after none of its kernels");
    return nullptr;
}}
"""
"""Each kernel has a copy of the library, at the path where Inductor looks for the kernel's own."""


@contextmanager
def later_kernels() -> Iterator[Callable[[], None]]:
    """Generate code inside without waiting for its C++ kernels; call the result to wait for them.

    Until then a call of the code fails.
    """
    from torch._inductor import async_compile

    pool = async_compile.AsyncCompile
    build: Any = pool.cpp_pybinding
    wait = pool.wait
    begun: list[Any] = []
    missing: list[tuple[dict[str, Any], str, Any]] = []
    submitted: list[_Kernel] = []

    def submit(build_alone: Any) -> Any:
        with suppress(Exception):  # what has another form is built as it is
            submitted.append(_Kernel(build_alone))
            return submitted[-1]
        return pool.submit(build_alone)

    def build_later(compiler: Any, *source: Any) -> Any:
        # with one thread only it would build the kernel at once, and not by `submit`
        with replaced(async_compile, "get_compile_threads", lambda: 2):
            kernel = build(SimpleNamespace(submit=submit), *source)
        begun.append(kernel)
        return kernel

    def wait_for_others(compiler: Any, module: dict[str, Any]) -> None:
        for unit in _units(submitted):
            future = pool.submit(partial(_build, unit))
            for kernel in unit:
                kernel.future = future
        submitted.clear()
        later = [name for name, value in module.items() if any(value is each for each in begun)]
        missing.extend((module, name, module.pop(name)) for name in later)
        wait(compiler, module)

    def wait_for_kernels() -> None:
        for module, name, kernel in missing:
            module[name] = kernel.result()

    with replaced(pool, "cpp_pybinding", build_later), replaced(pool, "wait", wait_for_others):
        yield wait_for_kernels


class _Kernel:
    """A kernel that Inductor's pool was to build; `result` waits for it."""

    future: Future[None] | None = None

    def __init__(self, build_alone: Any) -> None:
        _, (builder,) = build_alone.args
        self.build_alone = build_alone
        self.library = Path(builder.get_target_file_path())
        self.source = self.library.with_suffix(".cpp")
        self.text = self.source.read_text()
        self._command: str = builder.get_command_line()

    def command(self, source: str = "", library: str = "") -> str:
        """What builds another library in the same way."""
        return self._command.replace(str(self.source), source).replace(str(self.library), library)

    def result(self) -> None:
        if self.future is not None:  # where Inductor may use one thread only, it is built
            self.future.result()


def _units(kernels: Sequence[_Kernel]) -> list[list[_Kernel]]:
    """Kernels that are built together: by the same command, and not too much of them."""
    units: list[list[_Kernel]] = []
    for kernel in kernels:
        last = units[-1] if units else []
        is_small = sum(len(each.text) for each in [*last, kernel]) <= UNIT_BYTES
        if last and is_small and last[0].command() == kernel.command():
            last.append(kernel)
        else:
            units.append([kernel])
    return units


def _build(unit: Sequence[_Kernel]) -> None:
    if len(unit) > 1:
        with suppress(Exception):  # then each is built alone
            _build_together(unit)
    for kernel in unit:
        with suppress(Exception):  # who loads it builds it again, and gets the error
            kernel.build_alone()


def _build_together(unit: Sequence[_Kernel]) -> None:
    from torch._inductor import cpp_builder

    first = unit[0]
    source, library = first.source.with_suffix(".unit.cpp"), first.library.with_suffix(".unit.so")
    source.write_text(_text(unit))
    cpp_builder.run_compile_cmd(first.command(str(source), str(library)), str(library.parent))
    for kernel in unit:
        part = kernel.library.with_suffix(".part")
        shutil.copy(library, part)  # a link would be the same library to the dynamic linker
        os.replace(part, kernel.library)


def _text(kernels: Sequence[_Kernel]) -> str:
    """The source of all kernels, each in a namespace and with symbols of its own."""
    includes = dict.fromkeys(line for each in kernels for line in _INCLUDE.findall(each.text))
    parts, choices = ["#define PY_SSIZE_T_CLEAN\n", *includes], list[str]()
    for kernel in kernels:
        file, key = kernel.library.name, kernel.library.name.partition(".")[0]
        symbols = ("kernel", "PyInit_kernel")
        parts += [f"#define {symbol} {symbol}_{key}\n" for symbol in symbols]
        parts += [f"namespace unit_{key} {{\n", _INCLUDE.sub("", kernel.text), "\n}\n"]
        parts += [f"#undef {symbol}\n" for symbol in symbols]
        choices.append(
            f'if (std::strstr(library.dli_fname, "{file}"))\n'
            f"            return unit_{key}::PyInit_kernel_{key}();"
        )
    return "".join(parts) + _ENTRY.format(choices="\n        ".join(choices))
