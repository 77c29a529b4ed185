"""Inductor: compile a graph to a standalone artifact or to a folder of code; store and load it."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch

from ..basics.patch import preserve_cache_variables, replaced
from ..basics.tensors import fresh_fake_mode, is_grad_enabled
from ..repairs.inductor_fixes import repaired_lowering, without_lost_cubins
from .toolchain import (
    compiler_version,
    keep_probe,
    known_probe,
    libraries_named_by_text,
    precompiled_headers_in,
)


@contextmanager
def inductor_cache_directory(path: str) -> Iterator[None]:
    """Use `path` as cache directory of Inductor and Triton for one compile or load.

    Only environment variables can set it: `torch._inductor.runtime.cache_dir_utils` reads
    TORCHINDUCTOR_CACHE_DIR on each call, has no setting for it (2.11 to 2.14), and passes it to
    child processes. Triton uses a subdirectory unless TRITON_CACHE_DIR is set. Both variables are
    restored at the end, and in-memory tables that refer to files in `path` are cleared.
    """
    with preserve_cache_variables():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = path
        os.environ.pop("TRITON_CACHE_DIR", None)
        from torch._inductor.utils import clear_caches  # which makes the directory

        try:
            clear_caches()
            yield
        finally:
            clear_caches()


def cache_directory() -> str:
    """The directory that `inductor_cache_directory` set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def import_inductor() -> None:
    """Import Inductor's compiler, about 0.8 s, so that it can be timed apart from its work.

    It parses 20 templates of Triton kernels, a third of the time; here each when it is used first.
    """
    from torch._inductor.codegen.common import KernelTemplate

    parse = KernelTemplate._template_from_string
    with replaced(KernelTemplate, "_template_from_string", staticmethod(partial(_Template, parse))):
        import torch._inductor.compile_fx  # noqa: F401


class _Template:
    """A template of Inductor's that is parsed when something of it is read."""

    def __init__(self, parse: Callable[[str], Any], source: str) -> None:
        self._parsed = functools.cache(partial(parse, source))

    def __bool__(self) -> bool:  # there is none without Jinja
        return bool(self._parsed())

    def __getattr__(self, name: str) -> Any:
        if name == "_parsed":  # while it is copied
            raise AttributeError(name)
        return getattr(self._parsed(), name)


@contextmanager
def _own_cache() -> Iterator[None]:
    """Leave the sources of torch and Triton out of the keys of Inductor's caches.

    Inductor would read and hash them all (0.6 s). Here its caches are in a directory of this
    compile, from which nothing is loaded by key.
    """
    from torch._inductor import codecache

    system = staticmethod(lambda: {"hash": "piecegraph"})
    with (
        replaced(codecache, "torch_key", lambda: b"piecegraph"),
        replaced(codecache.CacheBase, "get_system", system),
    ):
        yield


def inductor_compile(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]
) -> tuple[Any, Callable[[], list[Path]]]:
    """Inductor's standalone artifact of `graph`, symbolic in the symbolic sizes of `inputs`.

    Its C++ kernels are still being compiled. The returned function waits for them and returns their
    libraries; the artifact must not be called before.
    """
    from torch._inductor import standalone_compile

    in_background = _kernels_in_background()
    with repaired_lowering(), _own_cache(), in_background as modules, _traced_sizes(graph):
        artifact = standalone_compile(
            graph,
            inputs,
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
            aot=True,
        )
    return artifact, lambda: [path for module in modules for path in _kernels_of(module)]


@contextmanager
def _traced_sizes(graph: torch.fx.GraphModule) -> Iterator[None]:
    """Make Inductor use the shape environment of the trace.

    By default it looks for one in the results of the graph, and finds none if a piece only writes
    to its inputs.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensor

    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    with tracing(TracingContext(next(modes, None) or fresh_fake_mode())):
        yield


@contextmanager
def _kernels_in_background() -> Iterator[list[dict[str, Any]]]:
    """Load generated code without waiting for its C++ kernels; yields namespaces that have them.

    Generated code ends with `async_compile.wait(globals())`, which replaces each kernel that is
    being compiled by its function. Kernels are not called before the code is. Where torch has one
    thread to compile in, as in vLLM on a CPU, it would compile each kernel before the next line of
    code is generated; here that thread is another one than this. With the option `cpp_wrapper` all
    code is one library, which no namespace has.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import (
        CppPythonBindingsCodeCache,
        CppWrapperCodeCache,
        LambdaFuture,
    )

    namespaces: list[dict[str, Any]] = []
    original = AsyncCompile.wait
    thread = ThreadPoolExecutor(1)

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        load = CppPythonBindingsCodeCache.load_pybinding_async
        return LambdaFuture(load(argtypes, source_code, submit_fn=thread.submit))

    def wait(self: Any, namespace: dict[str, Any]) -> None:
        others = {
            name: value
            for name, value in namespace.items()
            if not isinstance(value, LambdaFuture) or value.future is not None
        }
        original(self, others)
        namespace.update(others)
        namespaces.append(namespace)

    load_wrapper = CppWrapperCodeCache.load_pybinding

    def load_pybinding(*args: Any, **options: Any) -> Any:
        entry = load_wrapper(*args, **options)
        namespaces.append({"inductor_entry": entry})
        return entry

    alone = get_compile_threads() <= 1
    with (
        replaced(CppWrapperCodeCache, "load_pybinding", staticmethod(load_pybinding)),
        replaced(AsyncCompile, "wait", wait),
        replaced(AsyncCompile, "cpp_pybinding", cpp_pybinding) if alone else nullcontext(),
    ):
        try:
            yield namespaces
        finally:
            thread.shutdown(wait=False)


def _kernels_of(namespace: dict[str, Any]) -> Iterator[Path]:
    """Wait for the C++ kernels of generated code; yields their libraries."""
    from torch._inductor.codecache import LambdaFuture
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for name, value in list(namespace.items()):
        if isinstance(value, LambdaFuture):
            namespace[name] = value = value.result()
        module = getattr(value, "__self__", None)
        library = Path(getattr(module, "__file__", None) or "")
        if isinstance(value, BuiltinFunctionType) and library.is_relative_to(cache_dir()):
            yield library


def inductor_compile_to(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any], folder: str
) -> None:
    """Compile `graph` and write its generated code to `folder`, as files that can be edited."""
    from torch._inductor import standalone_compile

    with repaired_lowering(), _traced_sizes(graph):
        artifact = standalone_compile(
            graph,
            inputs,
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
        )
        artifact.save(path=folder, format="unpacked")


def inductor_load_from(folder: str) -> Callable[[list[Any]], Any]:
    """Load the code in `folder` as a function of one list of arguments."""
    with preserve_cache_variables():
        from torch._inductor.standalone_compile import CompiledArtifact
        from torch._inductor.utils import clear_caches

        clear_caches()
        artifact = CompiledArtifact.load(path=folder, format="unpacked")
    return lambda args: artifact(*args)


def inductor_serialize(artifact: Any) -> bytes | None:
    """The artifact as bytes; None if Inductor's caches are off or a pass had no key."""
    if getattr(artifact.inner_fn.compiled_fn, "serialize", None) is None:
        return None
    return bytes(artifact.serialize())


def inductor_deserialize(data: bytes) -> Any:
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    return AOTCompiledArtifact.deserialize(data)


def inductor_callable(artifact: Any) -> Callable[[list[Any]], Any]:
    """The artifact as a function of one list of arguments, without its outermost wrapper."""
    compiled_fn = artifact.inner_fn.compiled_fn
    return lambda args: compiled_fn(*args)


def post_grad_pass(run: Callable[[torch.fx.Graph], None], uuid: Any) -> Any:
    """`run` as a pass object for Inductor; `uuid` becomes part of Inductor's cache keys."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            run(graph)

        def uuid(self) -> Any:
            return uuid

    return Pass()


@contextmanager
def inductor_options(toolchain: Path) -> Iterator[None]:
    """Options of all our compiles and loads; headers and probes are stored in `toolchain`.

    `cpp.vec_isa_ok` trusts the CPU's flags and saves six probe builds (8 s). The probes for AMX
    (1 s) are built anyway: their results are stored.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.cpu_vec_isa import VecISA

    original = VecISA.check_build

    def check_build(isa: Any, code: str) -> bool:
        asked = f"{isa.build_arch_flags()} {code}".encode() + compiler_version()
        name = hashlib.sha256(asked).hexdigest()
        if (known := known_probe(toolchain, name)) is None:
            known = b"builds" if original(isa, code) else b""
            keep_probe(toolchain, name, known)
        return bool(known)

    with (
        precompiled_headers_in(toolchain),
        libraries_named_by_text(),
        without_lost_cubins(),
        _without_idle_wrappers(),
        replaced(VecISA, "check_build", check_build),
        inductor_config.patch({"cpp.vec_isa_ok": True}),
    ):
        yield


@contextmanager
def _without_idle_wrappers() -> Iterator[None]:
    """Call generated code without AOTAutograd's wrapper where that has nothing to do.

    For code that writes to no input and returns no alias of one, it turns off gradients, which a
    step has done, and notes the dynamic dimensions of each result for a later trace: 6 us for each
    piece. Its first call is kept, in which it checks that custom ops return no alias.
    """
    from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper

    original = RuntimeWrapper.post_compile

    def post_compile(self: Any, compiled_fn: Any, config: Any, *, runtime_metadata: Any) -> Any:
        wrapped = original(self, compiled_fn, config, runtime_metadata=runtime_metadata)
        works = (
            self.trace_joint
            or self.disable_amp
            or runtime_metadata.num_mutated_inp_runtime_indices
            or runtime_metadata.mutated_graph_handled_indices_seen_by_autograd
            or runtime_metadata.num_outputs_aliased
            or runtime_metadata.num_intermediate_bases
            or runtime_metadata.grad_enabled_mutation is not None
            or not getattr(compiled_fn, "_boxed_call", False)
        )
        if works:
            return wrapped
        call = wrapped

        @functools.wraps(wrapped, assigned=())
        def run(args: list[Any]) -> Any:
            nonlocal call
            if is_grad_enabled():
                return wrapped(args)
            now, call = call, compiled_fn
            return now(args)

        return run

    with replaced(RuntimeWrapper, "post_compile", post_compile):
        yield


def forget_threads() -> None:
    """In a fork: forget Inductor's pool of threads, which exist in the parent only.

    Inductor also takes the lock of progress bars, which is one for all forks: a thread of the
    parent may hold it, and a fork that is killed never gives it back.
    """
    if module := sys.modules.get("torch._inductor.async_compile"):
        module.AsyncCompile.pool.cache_clear()
    if progress := sys.modules.get("tqdm"):
        progress.tqdm.set_lock(threading.RLock())
