"""What the trace key and the codegen keys are made of.

The trace key is made before anything is traced, so it holds what tracing reads: the source of every
module class (by module name and content), the Python attributes of every submodule, the signature
of every weight and example, the settings, and the versions of the parts. A codegen key holds what
compiling one piece reads: its content hash, the compiler and its options, the instruction set.
What only a trace can find out is recorded in the bundle; see `provenance`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import platform
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...cache import Key
from ...cache.keys.annotations import config_factors
from ...cache.keys.code_fingerprint import code_digest, fingerprint
from ...cache.keys.environment import environment_factors
from ...torch_compat.inductor_fixes import REPAIRS
from ...torch_compat.settings import changed_settings, global_state
from ...torch_compat.toolchain import cpp_compiler
from ..ir.compilation import ExampleArguments
from ..ir.config import CompileConfig, InputSpec
from ..ir.serialization import dtype_name
from ..passes.graph_pass import GraphPass, pass_factors, passes_for
from ..pieces.split import splitting_predicate
from ..trace.examples import Leaf, example_inputs
from ..trace.module_state import described, module_attributes


def trace_key(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    examples: ExampleArguments | None = None,
) -> Key:
    """Key of the bundle for `model` under `config` on `device`, traced with `examples` if given.

    Raises the errors of `example_inputs` for examples that do not fit.
    """
    return Key.of(
        "trace",
        {
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "examples": example_signature(model, config, device, examples),
            "sources": module_sources(model),
            "methods": class_methods(model),
            "attributes": _digest(module_attributes(model)),
            "tensors": tensors_digest(model),
            "config": config_factors(config, "trace"),
            "splitting": predicate_factor(config),
            "passes": pass_factors(passes_for(config)),
            "device": device_factors(device),
            "platform": f"{sys.platform} {platform.machine()}",
            "versions": versions(),
            "torch_state": torch_state(),
            "environment": environment_factors(),
        },
    )


def machine_factors(config: CompileConfig, device: torch.device) -> dict[str, Any]:
    """What the codegen keys of all pieces of a model have in common."""
    return {
        "config": config_factors(config, "codegen"),
        "device": device_factors(device),
        "platform": f"{sys.platform} {platform.machine()}",
        "toolchain": toolchain(),
        "versions": versions(),
        "repairs": [fingerprint(each) for each in REPAIRS],
        "torch_state": torch_state(),
        "environment": environment_factors(),
    }


def codegen_key(
    machine: Mapping[str, Any], piece_digest: str, passes: Sequence[GraphPass], size: int | None
) -> Key:
    """Key of the artifact of one unique piece under `passes`, static if for one `size`."""
    own = {"piece": piece_digest, "size": size, "passes": pass_factors(passes)}
    return Key.of("codegen", {**machine, **own})


def predicate_factor(config: CompileConfig) -> str | None:
    """Fingerprint of the source of a user's splitting predicate."""
    predicate = splitting_predicate(config)
    return fingerprint(predicate) if predicate else None


def versions() -> dict[str, str]:
    """Versions of what traces, compiles and loads."""
    return {
        "piecegraph": importlib.metadata.version("piecegraph"),
        "torch": torch.__version__,
        "torch_commit": str(torch.version.git_version),
        "triton": _installed("triton"),
        "python": platform.python_version(),
    }


def torch_state() -> dict[str, Any]:
    """Process-wide switches of torch, and those settings of its compilers that were changed."""
    changed = {name: str(described(value)) for name, value in changed_settings().items()}
    return {**global_state(), "settings": changed}


def device_factors(device: torch.device) -> dict[str, Any]:
    """What generated code depends on.

    Of a CPU the instruction set and the number of threads, for which Inductor lays out its loops;
    of a GPU name, capability and index.
    """
    if device.type != "cuda":
        return {
            "type": device.type,
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "index": device.index or 0,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def toolchain() -> dict[str, str]:
    """The C++ compiler that Inductor runs, by what it says of itself; empty where there is none."""
    if (compiler := cpp_compiler()) is None:
        return {}
    try:
        shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"cxx": shown.stdout.partition("\n")[0]}


def module_sources(model: torch.nn.Module) -> dict[str, str]:
    """sha256 of the source file of every class of a submodule, by module name; torch's apart."""
    names = {cls.__module__ for cls in _classes(model)} - {"builtins"}
    return {
        name: source_digest(name) for name in sorted(names) if name.partition(".")[0] != "torch"
    }


def class_methods(model: torch.nn.Module) -> dict[str, str]:
    """Digest of the methods of every class of a submodule as they are in this process, by class.

    They differ from the source where a program replaces methods, in torch's classes as well.
    """
    found = {
        f"{cls.__module__}.{cls.__qualname__}": dict(_own_methods(cls)) for cls in _classes(model)
    }
    return {name: _digest(methods) for name, methods in sorted(found.items()) if methods}


def _classes(model: torch.nn.Module) -> set[type]:
    """The classes of all submodules, and those they inherit from."""
    return {base for module in model.modules() for base in type(module).__mro__}


def _own_methods(cls: type) -> Iterator[tuple[str, str]]:
    """Methods by name with a digest of their code, except those that torch's classes came with."""
    for name, member in sorted(vars(cls).items()):
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(function, types.FunctionType) and not _is_torch(cls, function):
            yield name, code_digest(function.__code__)


def _is_torch(cls: type, function: types.FunctionType) -> bool:
    return all(name.partition(".")[0] == "torch" for name in (cls.__module__, function.__module__))


def source_digest(module_name: str) -> str:
    """sha256 of a module's source; of its name where there is no source to read.

    A module that the model imports only while it runs is not imported for that, but the package
    that it is in is.
    """
    try:
        if module_name in sys.modules:
            source = inspect.getsource(sys.modules[module_name])
        else:
            source = _source_on_disk(module_name)
    except (OSError, TypeError, ImportError, UnicodeDecodeError):
        source = module_name
    return hashlib.sha256(source.encode()).hexdigest()


def _source_on_disk(module_name: str) -> str:
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        return module_name
    return Path(spec.origin).read_text()


def example_signature(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    given: ExampleArguments | None,
) -> dict[str, Any] | None:
    """The form of each tensor among the examples, dynamic sizes by symbol, and all other values."""
    if given is None:
        return None  # built from `Config.inputs`, which is a factor itself
    examples = example_inputs(model, config, device, given)
    return {leaf.label: _form(leaf, examples.symbols) for leaf in examples.leaves()}


def _form(leaf: Leaf, symbols: Mapping[tuple[str, int], str]) -> Any:
    if not isinstance(leaf.value, torch.Tensor):
        return str(described(leaf.value))
    shape = tuple(symbols.get((leaf.label, i), n) for i, n in enumerate(leaf.value.shape))
    return f"{leaf.value.device.type} {InputSpec(dtype=dtype_name(leaf.value.dtype), shape=shape)}"


def tensors_digest(model: torch.nn.Module) -> str:
    """Of every weight and buffer: name, form, device, class, and which of them are the same."""
    first: dict[int, str] = {}
    signature = [
        [
            name,
            list(tensor.shape),
            list(tensor.stride()),
            str(tensor.dtype),
            tensor.device.type,
            type(tensor).__qualname__,
            first.setdefault(id(tensor), name),
        ]
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    ]
    return _digest(signature)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
