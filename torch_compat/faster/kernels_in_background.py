"""C++ kernels of one piece are built while code for the next is generated.

Saves: wall time of a cold start, by building kernels on a second core.
For: torch 2.11 to 2.14, on a CPU.
Can go: once generated code of torch can be loaded without waiting for its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

from ..basics.patch import replaced


@contextmanager
def kernels_in_background() -> Iterator[Callable[[], None]]:
    """Load generated code without waiting for its C++ kernels; yields a function that does.

    Generated code ends with `async_compile.wait(globals())`, which replaces each kernel that is
    being compiled by its function. Kernels are not called before the code is. Where torch has one
    thread to compile in, as in vLLM on a CPU, it would compile each kernel before the next line of
    code is generated; here that thread is another one than this.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture

    namespaces: list[dict[str, Any]] = []
    original = AsyncCompile.wait
    thread = ThreadPoolExecutor(1)

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        load = CppPythonBindingsCodeCache.load_pybinding_async
        return LambdaFuture(load(argtypes, source_code, submit_fn=thread.submit))

    def is_kernel(value: Any) -> bool:
        return isinstance(value, LambdaFuture) and value.future is None

    def wait(self: Any, namespace: dict[str, Any]) -> None:
        others = {name: value for name, value in namespace.items() if not is_kernel(value)}
        original(self, others)
        namespace.update(others)
        namespaces.append(namespace)

    def wait_for_kernels() -> None:
        for namespace in namespaces:
            kernels = {name: value for name, value in namespace.items() if is_kernel(value)}
            namespace.update((name, kernel.result()) for name, kernel in kernels.items())

    alone = get_compile_threads() <= 1
    with (
        replaced(AsyncCompile, "wait", wait),
        replaced(AsyncCompile, "cpp_pybinding", cpp_pybinding) if alone else nullcontext(),
    ):
        try:
            yield wait_for_kernels
        finally:
            thread.shutdown(wait=False)
