"""Compile a unique piece with Inductor, store it with its kernels, load it without a compiler.

On a CPU Inductor's serialized artifact holds C++ source, and loading it runs the C++ compiler
unless Inductor's cache directory has the shared libraries. So our artifacts contain the libraries,
and loading writes them to a private directory first.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ...cache.files import check_private
from ...cache.lock import temporary_directory
from ...errors import UntrustedDirectory
from ...events import Events
from ...torch_compat.basics.frames import is_torch_file
from ...torch_compat.basics.tensors import fresh_fake_mode
from ...torch_compat.compiling.aoti import aoti_load
from ...torch_compat.compiling.inductor import (
    cache_directory,
    import_inductor,
    inductor_cache_directory,
    inductor_callable,
    inductor_compile,
    inductor_deserialize,
    inductor_options,
    inductor_serialize,
)
from ...torch_compat.compiling.toolchain import (
    compiler_version,
    cpp_headers_ready,
    keep_probe,
    named_libraries,
    probes,
    without_compiler,
)
from ..ir.compilation import COMPILER, KERNEL, PROBE, Blobs, Building, Built, PieceFn
from ..speedups import called_directly, generating_code

CODE = "code"
"""The blob with Inductor's standalone artifact."""


@contextmanager
def compiling(folder: str | None = None) -> Iterator[None]:
    """Use a scratch directory for Inductor's files while the pieces of one model are compiled.

    A kernel that several pieces share is compiled once. What is compiled in a `folder` is found
    again in a copy of it.
    """
    with ExitStack() as used:
        kept = folder is not None
        folder = folder or used.enter_context(scratch())
        options = inductor_options(toolchain_directory(folder))
        with inductor_cache_directory(folder), options:
            if kept:
                used.enter_context(named_libraries())
            yield


def compile_piece(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> Building:
    """Compile `graph` for its symbolic `inputs`; call it, and the result, inside `compiling()`."""
    toolchain = toolchain_directory(cache_directory())
    with generating_code() as wait_for_kernels:
        artifact, libraries = inductor_compile(graph, inputs, {**_described(graph), **options})

    def finish() -> Built:
        wait_for_kernels()
        code = inductor_serialize(artifact)
        if code is None:
            return _callable(artifact), {}
        blobs = {CODE: code} | {_blob_name(file): file.read_bytes() for file in libraries}
        if libraries:
            blobs |= {f"{PROBE}{name}": answer for name, answer in probes(toolchain).items()}
            blobs[COMPILER] = compiler_version()
        return _callable(artifact), blobs

    return finish


def _callable(artifact: Any) -> PieceFn:
    return called_directly(inductor_callable(artifact), artifact)


def _described(graph: GraphModule) -> dict[str, Any]:
    """Option that lets Inductor serialize calls of functions of torch, such as autocast's.

    By default it serializes only calls of functions that its own cache keys describe. Artifacts are
    found by our keys, which describe each call of a piece.
    """
    targets = [node.target for node in graph.graph.nodes if isinstance(node.target, FunctionType)]
    torchs = [each for each in targets if is_torch_file(each.__code__.co_filename)]
    names = {f"{each.__module__}.{each.__name__}": each.__name__ for each in torchs}
    return {"unsafe_marked_cacheable_functions": names} if names else {}


def compile_uncached(graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]) -> Building:
    """Like `compile_piece`, with all of torch's caches off; nothing can be stored."""
    with generating_code() as wait_for_kernels:
        artifact, _ = inductor_compile(graph, inputs, {**options, "force_disable_caches": True})

    def finish() -> Built:
        wait_for_kernels()
        return _callable(artifact), {}

    return finish


def first_use(device: torch.device, events: Events) -> None:
    """Import Inductor, and build the precompiled C++ headers if this machine lacks them."""
    with events.span("import inductor", level=logging.INFO):
        import_inductor()
    if device.type != "cpu":
        return
    with scratch() as folder:
        if cpp_headers_ready(toolchain_directory(folder)):
            return
    graph = Graph()
    one = graph.placeholder("one")
    graph.output((graph.call_function(torch.add, (one, one)),))
    with events.span("toolchain", level=logging.INFO), compiling():
        inputs = [fresh_fake_mode().from_tensor(torch.zeros(1, device="cpu"))]
        compile_piece(GraphModule({}, graph), inputs, {})()


def before_load(events: Events) -> None:
    """Import Inductor, which makes the directory that the environment names: a scratch one."""
    with (
        events.span("import inductor", level=logging.INFO),
        scratch() as folder,
        inductor_cache_directory(folder),
    ):
        import_inductor()


def load_pieces(artifacts: Sequence[Blobs]) -> list[PieceFn]:
    """The callables of verified artifacts; runs no compiler."""
    version = next((blobs[COMPILER] for blobs in artifacts if COMPILER in blobs), b"")
    with scratch() as folder, inductor_cache_directory(folder):
        toolchain = toolchain_directory(folder)
        for blobs in artifacts:
            _write_kernels(blobs, Path(folder), toolchain)
        options, names = inductor_options(toolchain), named_libraries()
        with options, names, without_compiler(folder, version):
            return [_callable(inductor_deserialize(blobs[CODE])) for blobs in artifacts]


def load_library(path: Path, sizes: tuple[int, ...], device: torch.device) -> PieceFn:
    """The AOTInductor library in `path` as a piece; `sizes` are the positions of its size inputs.

    A library takes tensors only: a size is passed as the length of an empty tensor. Imports neither
    Dynamo nor Inductor.
    """
    run: PieceFn = aoti_load(str(path), device)
    if not sizes:
        return run

    def run_with_sizes(args: list[Any]) -> Any:
        for position in sizes:
            args[position] = torch.empty((args[position], 0), device="cpu")
        return run(args)

    return run_with_sizes


@contextmanager
def scratch() -> Iterator[str]:
    """A temporary directory; removing it tolerates Inductor threads that still write to it."""
    with temporary_directory() as folder:
        yield str(folder)


def toolchain_directory(scratch: str) -> Path:
    """Where this user's processes share precompiled headers (150 MB each) and compiler probes.

    `scratch`, which lasts for one compile, if the directory is not private: it is in the directory
    for temporary files, where other users can create it first.
    """
    temporary = Path(os.path.realpath(tempfile.gettempdir()))
    directory = temporary / f"piecegraph-toolchain-{os.geteuid()}"
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        check_private(directory)
    except (OSError, UntrustedDirectory):
        return Path(scratch)
    return directory


def _blob_name(library: Path) -> str:
    """The name of a library's blob. Inductor stores a library at <two letters>/<name>."""
    return f"{KERNEL}{library.parent.name}.{library.name}"


def _write_kernels(blobs: Blobs, folder: Path, toolchain: Path) -> None:
    for name, content in blobs.items():
        if name.startswith(KERNEL):
            parent, _, file = name.removeprefix(KERNEL).partition(".")
            (folder / parent).mkdir(exist_ok=True)
            (folder / parent / file).write_bytes(content)
        elif name.startswith(PROBE):
            keep_probe(toolchain, name.removeprefix(PROBE), content)
