"""C++ kernels of a piece are built while the code of the next piece is generated.

Saves: 0.64 of 6.27 s of a cold start with 32 layers on two cores (medians of 2 and 2 starts, in
turn, of what `python -m benchmarks prepare --quick` starts). Each of its six kernels takes g++
0.49 s, 0.35 s of it to load the precompiled header.
For: torch 2.11 to 2.15. Triton kernels are waited for as before: the artifact has their binaries.
Can go: once `standalone_compile` returns before its kernels are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..basics.patch import replaced


@contextmanager
def later_kernels() -> Iterator[Callable[[], None]]:
    """Generate code inside without waiting for its C++ kernels; call the result to wait for them.

    Until then a call of the code fails.
    """
    from torch._inductor.async_compile import AsyncCompile

    build, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    begun: list[Any] = []
    missing: list[tuple[dict[str, Any], str, Any]] = []

    def build_later(compiler: Any, *source: Any) -> Any:
        kernel = build(compiler, *source)
        begun.append(kernel)
        return kernel

    def wait_for_others(compiler: Any, module: dict[str, Any]) -> None:
        later = [name for name, value in module.items() if any(value is each for each in begun)]
        missing.extend((module, name, module.pop(name)) for name in later)
        wait(compiler, module)

    def wait_for_kernels() -> None:
        for module, name, kernel in missing:
            # where Inductor may use one thread only, it has built the kernel at once
            module[name] = kernel.result() if hasattr(kernel, "result") else kernel

    with (
        replaced(AsyncCompile, "cpp_pybinding", build_later),
        replaced(AsyncCompile, "wait", wait_for_others),
    ):
        yield wait_for_kernels
