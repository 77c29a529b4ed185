"""What the trace key and the codegen keys are made of.

The trace key is made before anything is traced, so it holds what tracing reads: the source of every
module class (by module name and content), the Python attributes of every submodule, the signature
of every weight, the settings, and the versions of the parts. A codegen key holds what compiling one
piece reads: its content hash, the compiler and its options, and the machine's instruction set.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from ..cache import Key
from ..cache.environment import environment_factors
from ..cache.feeds import config_factors
from ..cache.sources import fingerprint
from .config import CompileConfig
from .passes.graph_pass import GraphPass, pass_factors, passes_for
from .split import splitting_predicate

DEPTH = 6
"""How deep an attribute of a module is followed; configuration objects are seldom deeper than 3."""


def trace_key(model: torch.nn.Module, config: CompileConfig, device: torch.device) -> Key:
    """Key of the bundle for `model` under `config` on `device`."""
    return Key.of(
        "trace",
        {
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "sources": module_sources(model),
            "attributes": _digest(module_attributes(model)),
            "tensors": _digest(tensor_signature(model)),
            "config": config_factors(config, "trace"),
            "splitting": predicate_factor(config),
            "passes": pass_factors(passes_for(config)),
            "device": device_factors(device),
            "versions": versions(),
            "environment": environment_factors(),
        },
    )


def codegen_key(
    piece_digest: str,
    config: CompileConfig,
    device: torch.device,
    passes: Sequence[GraphPass],
    size: int | None,
) -> Key:
    """Key of the artifact of one unique piece under `passes`, static if for one `size`."""
    return Key.of(
        "codegen",
        {
            "piece": piece_digest,
            "size": size,
            "config": config_factors(config, "codegen"),
            "passes": pass_factors(passes),
            "device": device_factors(device),
            "toolchain": toolchain(),
            "versions": versions(),
            "environment": environment_factors(),
        },
    )


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


def device_factors(device: torch.device) -> dict[str, Any]:
    """What generated code depends on: a CPU's instruction set; a GPU's name, capability, index."""
    if device.type != "cuda":
        return {
            "type": device.type,
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
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
    """The C++ compiler, by what it says of itself; empty where there is none."""
    try:
        shown = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"cxx": shown.stdout.splitlines()[0]}


def module_sources(model: torch.nn.Module) -> dict[str, str]:
    """sha256 of the source file of every class of a submodule, by module name; torch's apart."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    names = {cls.__module__ for cls in classes} - {"builtins"}
    return {
        name: source_digest(name) for name in sorted(names) if name.partition(".")[0] != "torch"
    }


def source_digest(module_name: str) -> str:
    """sha256 of a module's source; of its name where there is no source to read."""
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (OSError, TypeError, KeyError):
        source = module_name
    return hashlib.sha256(source.encode()).hexdigest()


def module_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Python values that tracing may bake in: the plain attributes of every submodule."""
    inherited = set(vars(torch.nn.Module()))
    return {
        name: {
            "class": type(module).__qualname__,
            "training": module.training,
            **{k: _plain(v, DEPTH) for k, v in sorted(vars(module).items()) if k not in inherited},
        }
        for name, module in model.named_modules()
    }


def tensor_signature(model: torch.nn.Module) -> list[Any]:
    """Name, shape, strides, dtype and device of every weight and buffer, and which are shared."""
    first: dict[int, str] = {}
    return [
        [
            name,
            list(tensor.shape),
            list(tensor.stride()),
            str(tensor.dtype),
            tensor.device.type,
            first.setdefault(id(tensor), name),
        ]
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    ]


def _plain(value: Any, depth: int) -> Any:
    """A stable stand-in for any attribute: its value if it is data, else its class and content."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return repr(value)
        case Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case torch.Tensor():
            return [str(value.dtype), list(value.shape)]
        case list() | tuple() if depth:
            return [_plain(item, depth - 1) for item in value]
        case set() | frozenset() if depth:
            return sorted(repr(_plain(item, depth - 1)) for item in value)
        case Mapping() if depth:
            return [[_plain(k, depth - 1), _plain(v, depth - 1)] for k, v in value.items()]
        case torch.nn.Module():
            return type(value).__qualname__
        case torch.dtype() | torch.device() | torch.layout():
            return str(value)
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    fields = getattr(value, "__dict__", None)
    return [kind, _plain(dict(sorted(fields.items())), depth - 1)] if fields and depth else kind


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
