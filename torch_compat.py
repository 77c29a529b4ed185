"""Every private or version-dependent torch API the library uses (torch 2.11 to 2.13), in one place.

Nothing here imports Dynamo or Inductor at module level: a warm start must not pay for them.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import operator
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "StorageWeakRef",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# torch's own context managers around these cost a microsecond, which a step does not have
is_grad_enabled = torch.is_grad_enabled
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

_TORCH = os.path.dirname(torch.__file__) + os.sep

# Dynamo and Inductor keep process-wide state while they run; only one of our threads may be inside.
compiler_lock = threading.RLock()


@dataclass(frozen=True)
class Captured:
    """What Dynamo's full-graph capture yields, free of its version-dependent types."""

    graph: torch.fx.GraphModule
    fake_mode: Any
    call: Callable[..., Any]
    """`call(compiled_fn)(model, *args, **kwargs)` runs Dynamo's bytecode around `compiled_fn`."""
    traced_code: tuple[Any, ...]
    """Code objects of all functions that were inlined."""
    guarded: tuple[tuple[str, str], ...]
    """What Dynamo guards on: (Python expression over `L` and `G`, kind of guard)."""
    aliases: dict[str, str]
    """Dynamo's own names for modules among the globals."""


@contextmanager
def cache_variables_kept() -> Iterator[None]:
    """Put back the variables that name torch's cache directories, which torch itself sets.

    It does so when Dynamo is imported and whenever a file is named. Only one thread is inside, so
    that what one of ours sets for a compile is never what another finds and keeps; nor does anybody
    else compile meanwhile.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with compiler_lock, _dynamo_lock():
        before = {name: os.environ.get(name) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _dynamo_lock() -> AbstractContextManager[Any]:
    """What Dynamo holds while it compiles for `torch.compile`; nothing before it is imported."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    lock: AbstractContextManager[Any] = getattr(module, "compile_lock", nullcontext())
    return lock


@contextmanager
def reasoning_about_sizes(dynamic_shapes: str) -> Iterator[None]:
    """How torch decides conditions on sizes, for tracing and for compiling alike."""
    from torch.fx.experimental import _config

    shapes_config: Any = _config

    oblivious = dynamic_shapes == "backed_size_oblivious"
    with compiler_lock, torch.no_grad(), shapes_config.patch(backed_size_oblivious=oblivious):
        yield


@contextmanager
def dynamo_tracing(dynamic_shapes: str) -> Iterator[None]:
    """Settings for one trace, put back afterwards."""
    with ExitStack() as stack:
        stack.enter_context(cache_variables_kept())
        import torch._dynamo.config as dynamo_config
        from torch._dynamo.utils import dynamo_timed, get_metrics_context

        stack.enter_context(_dynamo_lock())
        stack.enter_context(reasoning_about_sizes(dynamic_shapes))
        stack.enter_context(dynamo_config.patch(automatic_dynamic_shapes=False))
        stack.enter_context(get_metrics_context())
        stack.enter_context(dynamo_timed("piecegraph.trace", log_pt2_compile_event=True))
        yield


def capture_full_graph(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Captured | None:
    """One Dynamo graph of `model.forward`, or None if it holds no tensor operation."""
    from torch._dynamo.convert_frame import fullgraph_capture, get_traced_fn

    output = fullgraph_capture(model, args, kwargs)
    if output.backend_input is None:
        return None
    function, _ = get_traced_fn(model)

    def call(compiled_fn: Callable[..., Any]) -> Callable[..., Any]:
        return output.forward_callable(compiled_fn=compiled_fn, extra_globals=function.__globals__)

    return Captured(
        graph=output.backend_input.graph_module,
        fake_mode=output.backend_input.fake_mode,
        call=call,
        traced_code=tuple(getattr(output.graph_capture_output, "traced_code", None) or ()),
        guarded=_guarded(output.graph_capture_output.output_graph.guards),
        aliases=dict(output.graph_capture_output.import_sources),
    )


def _guarded(guards: Any) -> tuple[tuple[str, str], ...]:
    named = {(str(guard.originating_source.name), guard.create_fn_name()) for guard in guards}
    return tuple(sorted(named))


def is_torch_file(file: str) -> bool:
    """Whether a source file is torch's own; those of torchvision and the like are not."""
    return file.startswith(_TORCH)


def user_location(error: BaseException) -> str | None:
    """file:line of the user's code that a Dynamo error is about."""
    seen: BaseException | None = error
    while seen is not None:
        stack = getattr(seen, "real_stack", None)
        if stack:
            own = [frame for frame in stack if not is_torch_file(frame.filename)]
            return f"{(own or stack)[-1].filename}:{(own or stack)[-1].lineno}"
        seen = seen.__cause__ or seen.__context__
    return None


def mark_dynamic(
    tensor: torch.Tensor, dim: int, symbol: str, limits: tuple[int, int], dynamic_shapes: str
) -> None:
    """Declare a dimension dynamic; for unbacked shapes, equal symbols share one.

    Only an unbacked dimension is told its limits (from torch 2.12 on): a backed one that is found
    narrower would be an error of torch's instead of a guard of ours.
    """
    with cache_variables_kept():
        import torch._dynamo

    if dynamic_shapes == "unbacked":
        mark = torch._dynamo.decorators.mark_unbacked
        known = {"min", "max"} <= inspect.signature(mark).parameters.keys()
        bounds = dict(zip(("min", "max"), limits, strict=True)) if known else {}
        mark(tensor, dim, shape_id=symbol, **bounds)
    else:
        torch._dynamo.mark_dynamic(tensor, dim)


def original_symbol(size: torch.SymInt) -> Any:
    """The symbol a dimension was given at first, before Dynamo found it equal to another."""
    return size.node._expr


def default_overload(packet: Any) -> Any:
    """The overload that a call of an op without an overload's name means."""
    names = packet.overloads()
    return getattr(packet, names[0] if len(names) == 1 else "default")


def custom_op_function(name: str) -> Callable[..., Any] | None:
    """The Python function behind an op made by `torch.library.custom_op`; else None."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    return definition._init_fn if definition else None


def triton_call(node: torch.fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """The kernel and the arguments of a node that launches a Triton kernel; else None.

    The node itself holds numbers of a table of this process, in the order of first use.
    """
    if not str(node.target).startswith("triton_kernel_wrapper"):
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kwargs: dict[str, Any] = dict(node.kwargs)
    kernel = kernel_side_table.get_kernel(kwargs.pop("kernel_idx"))
    constants = kernel_side_table.get_constant_args(kwargs.pop("constant_args_idx"))
    return kernel, {**kwargs, "constants": dict(constants)}


def triton_writes(node: torch.fx.Node, kwargs: dict[str, Any]) -> list[Any] | None:
    """What the Triton kernel that a node launches writes to, of its example `kwargs`."""
    if not str(node.target).startswith("triton_kernel_wrapper"):
        return None
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    given = kwargs["kwargs"]
    table = (kwargs["kernel_idx"], kwargs["constant_args_idx"])
    names = get_mutated_tensors(*table, given, kwargs["tma_descriptor_metadata"])
    return [given[name] for name in names]


def fake_function(name: str) -> Callable[..., Any] | None:
    """The Python function that gives the shapes of op `ns::op`'s results, if one is registered."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    definition = OPDEFS.get(name)
    kernel = singleton.find(name).fake_impl.kernel
    fake: Callable[..., Any] | None = kernel.func if kernel is not None else None
    return _registered(fake) if definition is None else definition._abstract_fn


def _registered(fake: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What the user registered, out of torch's wrapper, whose closure changes at the first call."""
    if fake is None or "_check_pystubs_once" not in fake.__qualname__:
        return fake
    inside: Callable[..., Any] = inspect.getclosurevars(fake).nonlocals["func"]
    return inside


def registering_files(name: str) -> set[str]:
    """Python files, torch's apart, that registered kernels of the overload `ns::op.overload`."""
    known: str = torch._C._dispatch_dump(name)
    files = set(re.findall(r"registered at (.+\.py):\d+", known))
    return {file for file in files if not is_torch_file(file) and os.path.isfile(file)}


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor runs in this process; None where there is none."""
    with cache_variables_kept():
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            return get_cpp_compiler()
        except InvalidCxxCompiler:
            return None


def input_source(node: torch.fx.Node) -> str:
    """Python expression over `L` (arguments) and `G` (globals) that yields a graph input."""
    return str(node._dynamo_source.name)  # type: ignore[attr-defined]


@contextmanager
def inductor_cache_directory(path: str) -> Iterator[None]:
    """Point the file caches of Inductor and Triton at `path` for one compile or load.

    Both are told by environment variables alone: `torch._inductor.runtime.cache_dir_utils`, through
    which every file is named, reads TORCHINDUCTOR_CACHE_DIR on each call and consults no setting
    (2.11 to 2.13), and hands it to the processes that it starts. Triton's directory lies below it
    unless TRITON_CACHE_DIR says otherwise. Both variables are put back, whatever happens inside,
    and in-memory tables that name files under `path` are cleared.
    """
    with cache_variables_kept():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = path
        os.environ.pop("TRITON_CACHE_DIR", None)
        from torch._inductor.utils import clear_caches  # which makes the directory

        try:
            clear_caches()
            yield
        finally:
            clear_caches()


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
def compiler_dispensable(folder: str, version: bytes) -> Iterator[None]:
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


_SHAPE_CODE = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
_SHAPE_NO_CODE = re.compile(
    r"(_|trace\.|test_configs\.|worker_|compile_threads|.*(cache|debug|verbose|log|dir|path|metadata)).*"
)


def changed_settings() -> dict[str, Any]:
    """Settings of torch's compilers that this process has changed, by full name.

    Nothing is imported: a module of settings that is not loaded yet has its defaults, and what
    the environment says is a factor of its own. Left out is what shapes no code.
    """
    from torch.utils._config_module import _UNSET_SENTINEL as unset

    changed = {}
    for module in filter(None, map(sys.modules.get, _SHAPE_CODE)):
        settings: Any = module
        for name, value in settings.get_config_copy().items():
            entry = settings._config[name]
            stated = (entry.env_value_force, entry.env_value_default, entry.default)
            original = next(each for each in stated if each is not unset)
            if value != original and not _SHAPE_NO_CODE.fullmatch(name):
                changed[f"{module.__name__}.{name}"] = value
    return changed


def global_state() -> dict[str, Any]:
    """Switches of this process that decide what a trace holds or which kernels are generated."""
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "autocast": {
            device: str(torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        },
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "reduced_precision": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    }


def cpp_headers_ready() -> bool:
    """Whether Inductor's precompiled C++ headers were built on this machine, for any options."""
    with cache_variables_kept():
        from torch._inductor import codecache

    directory = getattr(codecache, "_HEADER_DIR", None)
    return directory is None or any(Path(directory).rglob("*.gch"))


def mutated_arguments(op: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Those of the given arguments that the schema of `op` says it writes to."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


@contextmanager
def reads_before_mutations() -> Iterator[None]:
    """Have Inductor compute what reads a tensor before the custom op that then mutates it.

    Inductor (2.11 to 2.13) gives such an op its place in the order of execution, and only then
    says what it mutates, which is what computes the pending reads of the old value: pointwise
    values that are used again later came after the op, and were computed from the new value.

    It also has `cat` take the memory of its operands for parts of the result. Where the result is
    mutated they are copied, for what reads an operand afterwards read the new value.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    kernels: Any = ir.FallbackKernel
    original = vars(kernels)["create"]
    concatenations: Any = ir.ConcatKernel
    concatenate = vars(concatenations)["create"]

    def create_cat(cls: Any, inputs: Any, dim: int) -> Any:
        if is_mutated(V.graph.current_node):
            inputs = [lowering.clone(each) for each in inputs]
        return concatenate.__func__(cls, inputs, dim)

    def create(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kernel, "_schema", None) is not None:
            for each in tree_leaves(list(mutated_arguments(kernel, args, kwargs))):
                if isinstance(each, ir.TensorBox):
                    each.realize()
                    V.graph.mark_buffer_mutated(each.get_name())
        return original.__func__(cls, kernel, *args, **kwargs)

    with (
        compiler_lock,
        _replaced(kernels, "create", classmethod(create)),
        _replaced(concatenations, "create", classmethod(create_cat)),
    ):
        yield


def is_mutated(node: torch.fx.Node) -> bool:
    """Whether anything in its graph may write to the result of `node`, also through a view."""
    from torch._library.utils import zip_schema

    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if user.op == "output":
            continue
        if schema is None:  # a part of several results, or an operation that may do anything
            if user.target is not operator.getitem or is_mutated(user):
                return True
            continue
        for argument, given in zip_schema(schema, user.args, user.kwargs):
            alias = argument.alias_info if node in tree_leaves(given) else None
            if alias is not None and (alias.is_write or is_mutated(user)):
                return True
    return False


def inductor_compile(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]
) -> tuple[Any, Callable[[], list[Path]]]:
    """Inductor's standalone artifact of `graph`, symbolic where its fake inputs are.

    Its C++ kernels are still being compiled. The function that comes with it waits for them and
    returns their libraries; until then the artifact must not be called.
    """
    from torch._inductor import standalone_compile

    with reads_before_mutations(), _kernels_in_background() as modules, _traced_sizes(graph):
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
    """Let Inductor reason about sizes where the trace did, whatever a piece returns.

    Told to find that by itself it looks at results alone, and knows nothing of any size in a piece
    that only writes to its inputs.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensor

    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    with tracing(TracingContext(next(modes, None) or fresh_fake_mode())):
        yield


@contextmanager
def _kernels_in_background() -> Iterator[list[dict[str, Any]]]:
    """Do not wait for C++ kernels when generated code is loaded; yields its namespaces.

    Generated code ends with `async_compile.wait(globals())`, which replaces each kernel that is
    being compiled by its function. Nothing calls one before the code is called.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    namespaces: list[dict[str, Any]] = []
    original = AsyncCompile.wait

    def wait(self: Any, namespace: dict[str, Any]) -> None:
        others = {
            name: value
            for name, value in namespace.items()
            if not isinstance(value, LambdaFuture) or value.future is not None
        }
        original(self, others)
        namespace.update(others)
        namespaces.append(namespace)

    with _replaced(AsyncCompile, "wait", wait):
        yield namespaces


def _kernels_of(namespace: dict[str, Any]) -> Iterator[Path]:
    """Wait for the C++ kernels of generated code; their libraries."""
    from torch._inductor.codecache import LambdaFuture
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for name, value in list(namespace.items()):
        if isinstance(value, LambdaFuture):
            namespace[name] = value = value.result()
        module = getattr(value, "__self__", None)
        library = Path(getattr(module, "__file__", None) or "")
        if isinstance(value, BuiltinFunctionType) and library.is_relative_to(cache_dir()):
            yield library


def inductor_unpack(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any], folder: str
) -> None:
    """Compile `graph` and lay its generated code out in `folder`, as files that may be edited."""
    from torch._inductor import standalone_compile

    with reads_before_mutations(), _traced_sizes(graph):
        artifact = standalone_compile(
            graph,
            inputs,
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
        )
        artifact.save(path=folder, format="unpacked")


def inductor_load_unpacked(folder: str) -> Callable[[list[Any]], Any]:
    """The function whose code lies in `folder`, of one list of arguments."""
    with cache_variables_kept():
        from torch._inductor.standalone_compile import CompiledArtifact
        from torch._inductor.utils import clear_caches

        clear_caches()
        artifact = CompiledArtifact.load(path=folder, format="unpacked")
    return lambda args: artifact(*args)


def inductor_serialize(artifact: Any) -> bytes | None:
    """None where Inductor kept nothing: with its caches off, or after a pass without a key."""
    if getattr(artifact.inner_fn.compiled_fn, "serialize", None) is None:
        return None
    return bytes(artifact.serialize())


def inductor_deserialize(data: bytes) -> Any:
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    return AOTCompiledArtifact.deserialize(data)


def inductor_callable(artifact: Any) -> Callable[[list[Any]], Any]:
    """The artifact as a function of one list of arguments, past its outermost wrapper."""
    compiled_fn = artifact.inner_fn.compiled_fn
    return lambda args: compiled_fn(*args)


def post_grad_pass(run: Callable[[torch.fx.Graph], None], uuid: Any) -> Any:
    """`run` in the form in which Inductor takes a pass; `uuid` is its part of Inductor's keys."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            run(graph)

        def uuid(self) -> Any:
            return uuid

    return Pass()


@contextmanager
def inductor_options() -> Iterator[None]:
    """Options of every compile and load of ours.

    `cpp.vec_isa_ok` trusts the CPU's own flags instead of building six libraries (8 s) that probe
    the compiler. For AMX it builds some all the same (1 s): what came of them is kept.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.cpu_vec_isa import VecISA

    original = VecISA.check_build

    def check_build(isa: Any, code: str) -> bool:
        asked = f"{isa.build_arch_flags()} {code}".encode() + compiler_version()
        name = hashlib.sha256(asked).hexdigest()
        if (known := probes().get(name)) is None:
            known = b"builds" if original(isa, code) else b""
            keep_probe(name, known)
        return bool(known)

    with (
        _replaced(VecISA, "check_build", check_build),
        inductor_config.patch({"cpp.vec_isa_ok": True}),
    ):
        yield


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
    with cache_variables_kept():
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir(), "isa_probes")


@dataclass
class Partitions:
    """What Inductor cut while `inductor_partitions` lasted."""

    count: int = 0
    """Partitions of the code that was made or loaded last."""
    cut_at: set[str] = field(default_factory=set)
    """Ops of `custom_should_partition_ops` that it cut at."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Other operations that it put into no partition, and why."""
    alive: set[str] = field(default_factory=set)
    """Ops of the graph once what nobody needs was removed from it, before it is optimised."""


@contextmanager
def inductor_partitions(wrap: Callable[[Any], Any]) -> Iterator[Partitions]:
    """Let Inductor replace every partition of what it compiles or loads by `wrap(partition)`.

    The scheduler cuts at the ops of the option `custom_should_partition_ops`, and around whatever
    it believes that no graph can hold. One of these rules is right for CUDA graphs alone: that
    operations of a CPU cannot be captured. In a model that is on a CPU as a whole they count as a
    device's. Partitions that write parts of one tensor are made to share its memory. All that is
    replaced is process-wide, and put back, whatever happens inside.
    """
    with cache_variables_kept():
        import torch._inductor.config as inductor_config
        from torch._inductor import compile_fx
        from torch._inductor.scheduler import Scheduler
        from torch._inductor.utils import _unstable_customized_partition_wrapper as wrapper

        made = Partitions()
        judge: Any = Scheduler.should_partition
        sign: Any = Scheduler.get_graph_partition_signature
        optimise: Any = compile_fx._recursive_post_grad_passes

        def signatures(scheduler: Any, partitions: Any, *args: Any, **kwargs: Any) -> Any:
            signed = sign(scheduler, partitions, *args, **kwargs)
            share_memory_of_parts(partitions, signed)
            return signed

        def optimised(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
            made.alive |= _ops_of(graph)
            optimise(graph, *args, **kwargs)

        def should_partition(scheduler: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
            with _cpu_as_device():
                reason = judge(scheduler, node, *args, **kwargs)
            if reason and not hasattr(node, "snodes"):
                op: Any = getattr(node.node, "op_overload", None)
                name = node.get_name() if op is None else op.name()
                if name in inductor_config.custom_should_partition_ops:
                    made.cut_at.add(name)
                else:
                    made.left_out[name] = str(reason)
            return reason

        def customized(partition: Any, metadata: Any) -> Any:
            made.count = metadata.num_partitions
            return wrap(partition)

        with (
            inductor_config.patch(graph_partition=True),
            _replaced(Scheduler, "should_partition", should_partition),
            _replaced(Scheduler, "get_graph_partition_signature", signatures),
            _replaced(compile_fx, "_recursive_post_grad_passes", optimised),
            _replaced(wrapper, "wrapper", customized),
        ):
            yield made


def share_memory_of_parts(partitions: list[list[Any]], signatures: list[Any]) -> None:
    """Have all partitions that write parts of one tensor write into the same memory.

    The result of `cat` is allocated where the first of its parts is written, but its place in the
    order of execution is after the last. Inductor (2.11 to 2.13) takes it for an output of the
    partition of that place alone, and then allocates it anew in each partition that has a part:
    what the others wrote was lost. It becomes an output of the first of them, an input of the rest.
    """
    from torch._inductor import ir
    from torch._inductor.scheduler import get_layout_symints

    parts: dict[str, set[int]] = {}
    whole: dict[str, tuple[int, Any]] = {}
    for at, nodes in enumerate(partitions):
        for buffer in (output.node for node in nodes for output in node.get_outputs()):
            whole[buffer.get_name()] = at, buffer
            if isinstance(buffer.layout, ir.NonOwningLayout):
                parts.setdefault(buffer.layout.view.get_name(), set()).add(at)
    for name, writers in parts.items():
        last, buffer = whole.get(name, (0, None))
        first, *others = sorted({*writers, last})
        if first >= last:
            continue
        kept = any(output is buffer for output in signatures[last].output_nodes)
        signatures[first].symbol_inputs.update(get_layout_symints(buffer))
        signatures[first].output_nodes.append(buffer)
        for at in others:
            signatures[at].input_nodes[name] = buffer
            signatures[at].input_deallocation[name] = at == last and not kept
            if at != last:
                signatures[at].output_nodes.append(buffer)


def _ops_of(graph: torch.fx.GraphModule) -> set[str]:
    """Names of the ops that a graph calls, also through what makes functions of them."""
    called: list[Any] = []
    for node in graph.graph.nodes:
        called += [node.target, *node.args[:1]]
    return {op.name() for op in called if hasattr(op, "_schema")}


def is_decomposed(op: Any) -> bool:
    """Whether Inductor replaces calls of `op` while it traces."""
    from torch._inductor.decomposition import select_decomp_table

    return op in select_decomp_table() or is_composite(op)


@contextmanager
def _cpu_as_device() -> Iterator[None]:
    """Let the scheduler take a node of a graph that is on the CPU alone for one of a GPU."""
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch._inductor.virtualized import V

    if set(V.graph.device_types) <= {"cpu"}:
        with _replaced(BaseSchedulerNode, "is_gpu", BaseSchedulerNode.is_cpu):
            yield
    else:
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass(frozen=True)
class AheadCompiled:
    """An AOTInductor library on disk, and the conditions on sizes it was compiled under."""

    path: str
    guards: tuple[Any, ...]
    ranges: dict[Any, tuple[int, int]]


def aoti_compile(
    graph: torch.fx.GraphModule,
    inputs: list[Tensor],
    dynamic: list[dict[int, tuple[str, int, int] | None]],
    options: dict[str, Any],
) -> AheadCompiled:
    """Export `graph` and compile it to one shared library.

    `inputs` are example tensors of a fake mode of their own. `dynamic` says for each which
    dimensions vary: (symbol, least, most), or None where a size follows from others.
    """
    from torch._inductor import aot_compile
    from torch.export import Dim, export

    dims: dict[str, Any] = {}

    def dim(spec: tuple[str, int, int] | None) -> Any:
        if spec is None:
            return Dim.DYNAMIC
        name, low, high = spec
        return dims.setdefault(name, Dim(name, min=low, max=high))

    shapes = tuple({index: dim(spec) for index, spec in each.items()} for each in dynamic)
    program = export(graph, tuple(inputs), dynamic_shapes=shapes)
    env = inputs[0].fake_mode.shape_env  # type: ignore[attr-defined]
    with warnings.catch_warnings(), reads_before_mutations():
        warnings.simplefilter("ignore")  # torch warns of its own deprecated pytree classes
        path = aot_compile(
            program.module(check_guards=False),
            tuple(inputs),
            options={"aot_inductor.enable_line_tables": False, **options},
        )
    ranges = {s: (int(r.lower), int(r.upper)) for s, r in program.range_constraints.items()}
    return AheadCompiled(str(path), tuple(guard.expr for guard in env.guards), ranges)


def aoti_load(path: str, device: torch.device) -> Callable[[list[Any]], Any]:
    """The `run` of the library at `path`; imports neither Dynamo nor Inductor."""
    if device.type == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1).run
    runner = torch._C._aoti.AOTIModelContainerRunnerCuda
    return runner(path, 1, str(device)).run


def fresh_fake_mode() -> Any:
    """A fake mode with a shape environment of its own."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def writes_of_faking(tensor: Tensor, fake_mode: Any) -> int:
    """How many writes Dynamo's fake of `tensor` counts before anything is done to it."""
    with torch.inference_mode(False):  # in which nothing counts writes; Dynamo leaves it
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        alias.set_(tensor.untyped_storage(), *place)
        count: int = fake_mode.from_tensor(alias)._version
    return count


def surely(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold for all of them; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


# graphs: what recordings need below the public surface of torch


def is_faking() -> bool:
    """Whether operations make fake tensors in this thread: a run that asks for shapes alone."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def without_modes() -> AbstractContextManager[Any]:
    """Run plainly: no dispatch mode sees what is called inside."""
    return _disable_current_modes()


def storage_id(tensor: Tensor) -> int:
    """Identity of the storage behind `tensor`; unique while a reference, even a weak one, lives."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to the storage behind `tensor`: while it lives, the identity stays taken."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def unowned_alias(tensor: Tensor) -> Tensor:
    """The same memory under a new tensor that does not keep it alive."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether `op` is only a composition of other operators."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return op.has_kernel_for_dispatch_key(key)


def run_kernel(op: torch._ops.OpOverload, device: str, args: Any, kwargs: Any) -> Any:
    """Run the kernel of `op` for `device` (CPU, CUDA) past every mode.

    A mode that is on sees the operators called in the body of that kernel.
    """
    key = getattr(torch._C.DispatchKey, device)
    return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def raw_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """The C++ replay of `graph`, bound: without the Python method that wraps it."""
    return super(torch.cuda.CUDAGraph, graph).replay


def node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a graph captured with `keep_graph=True`, asked of the driver torch has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    nodes = ctypes.c_size_t()
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    status = driver.cuGraphGetNodes(raw, None, ctypes.byref(nodes))
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes returned CUDA driver error {status}")
    return nodes.value


def flush_host_cache() -> None:
    """Give cached pinned memory back."""
    torch._C._host_emptyCache()


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Undo what an invalidated capture leaves behind: `capture_end` raises before it does this."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
