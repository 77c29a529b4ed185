"""Inductor: compile a graph to a standalone artifact or to a folder of code; store and load it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from ..basics.patch import cache_variables, preserve_cache_variables, replaced
from ..basics.tensors import fresh_fake_mode, is_fake
from ..repairs.inductor_fixes import repaired_lowering, without_lost_cubins
from .partition import partitioned
from .toolchain import (
    compiler_version,
    keep_probe,
    known_probe,
    named_libraries,
    precompiled_headers_in,
)


@contextmanager
def inductor_cache_directory(path: str) -> Iterator[None]:
    """Use `path` as cache directory of Inductor and Triton for one compile or load.

    Only environment variables can set it: `torch._inductor.runtime.cache_dir_utils` reads
    TORCHINDUCTOR_CACHE_DIR on each call, has no setting for it (2.11 to 2.15), and passes it to
    its worker processes. These keep the TRITON_CACHE_DIR of an earlier compile where it is not set.
    No other process gets them, see `cache_variables`: `path` is removed while it runs. Tables in
    memory that refer to `path` are cleared.
    """
    names = {"TORCHINDUCTOR_CACHE_DIR": path, "TRITON_CACHE_DIR": os.path.join(path, "triton")}
    with cache_variables(**names):
        from torch._inductor.utils import clear_caches  # which makes the directory

        try:
            clear_caches()
            yield
        finally:
            clear_caches()


def cache_directory() -> str:
    """The directory that `inductor_cache_directory` set."""
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


def import_inductor() -> None:
    """Import Inductor's compiler, about 1 s, so that it can be timed apart from its work."""
    import torch._inductor.compile_fx  # noqa: F401


def inductor_compile(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]
) -> tuple[Any, list[Path]]:
    """Inductor's standalone artifact of `graph`, symbolic in the symbolic sizes of `inputs`.

    Also returns the C++ libraries that it uses.
    """
    with named_libraries() as libraries:
        return _compiled(graph, inputs, options, aot=True), libraries


def _compiled(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any], **form: Any
) -> Any:
    from torch._inductor import standalone_compile

    with repaired_lowering(), partitioned(graph, options), _traced_sizes(graph):
        return standalone_compile(
            graph,
            inputs,
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
            **form,
        )


@contextmanager
def _traced_sizes(graph: torch.fx.GraphModule) -> Iterator[None]:
    """Make Inductor use the shape environment of the trace.

    By default it looks for one in the results of the graph, and finds none if a piece only writes
    to its inputs.
    """
    from torch._guards import TracingContext, tracing

    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    modes = (value.fake_mode for value in values if is_fake(value))
    with tracing(TracingContext(next(modes, None) or fresh_fake_mode())):
        yield


def inductor_compile_to(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any], folder: str
) -> None:
    """Compile `graph` and write its generated code to `folder`, as files that can be edited."""
    _compiled(graph, inputs, options).save(path=folder, format="unpacked")


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
    """The artifact as a function of one list of arguments, without its outermost wrapper.

    Its `ops` are the operators that the generated code calls, such as `ns::op.default`.
    """
    compiled_fn = artifact.inner_fn.compiled_fn
    call: Any = lambda args: compiled_fn(*args)  # noqa: E731
    called = _CALLED.findall(getattr(compiled_fn, "source_code", ""))
    call.ops = ["::".join(names) for names in called]
    return cast(Callable[[list[Any]], Any], call)


_CALLED = re.compile(r"^[^#\n]*\btorch\.ops\.(\w+)\.(\w+\.\w+)\(", re.MULTILINE)


def graph_pass(run: Callable[[torch.fx.Graph], None], uuid: Any) -> Any:
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
    (1 s) are built anyway: their results are stored. A Triton kernel that is tuned at its first run
    would save what is best beside its source, in a scratch directory that is gone by then.
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
        without_lost_cubins(),
        replaced(VecISA, "check_build", check_build),
        inductor_config.patch({"cpp.vec_isa_ok": True, "autotune_local_cache": False}),
    ):
        yield
