"""What the trace key and the codegen keys are made of.

The trace key finds candidates and is made without a trace: the model's class, the form of its
weights and of the examples, the settings, device, versions and switches of torch. Everything else
that a trace relied on is a condition of the bundle; see `conditions`. A codegen key holds what
compiling one piece reads: its content, passes, options, device, compiler and versions.

A factor that cannot be described is Undescribable: there is no key, and nothing is stored.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from ...cache import Key
from ...cache.keys.environment import environment_factors
from ...cache.keys.factors import Stable, StableTexts
from ...cache.keys.key import Difference
from ...torch_compat.basics.devices import device_facts
from ...torch_compat.basics.ops import overload_name, overridden_ops, registered_rules
from ...torch_compat.basics.settings import changed_settings, global_state
from ...torch_compat.basics.tensors import active_modes, subclass_parts
from ...torch_compat.compiling.partition import partition_options, partitioned
from ...torch_compat.compiling.toolchain import cpp_compiler, cpu_extensions
from ...torch_compat.repairs.inductor_fixes import REPAIRS
from ..conditions.code import code_parts, fingerprint
from ..conditions.custom_ops import kernel_parts
from ..conditions.values import Undescribable, class_name, stable_text, tensor_text
from ..ir.compilation import ExampleArguments
from ..ir.config import (
    CodeConfig,
    Codegen,
    CompileConfig,
    GraphPass,
    InputSpec,
    Tracing,
    call_forms,
)
from ..ir.plan import dotted
from ..ir.registered_compilers import registered_compiler
from ..ir.serialization import dtype_name
from ..passes.graph_pass import pass_factors
from ..pieces.fingerprint import tensor_class
from ..speedups import are_on
from ..trace.examples import Leaf, example_inputs


def trace_key(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    examples: ExampleArguments | None = None,
) -> Key:
    """Key of the bundles for `model` under `config` on `device`, traced with `examples` if given.

    Raises the errors of `example_inputs` for examples that do not fit, and Undescribable.
    """
    return Key.of(
        "trace",
        {
            "model": class_name(type(model)),
            "examples": _named("examples", example_signature, model, config, device, examples),
            "weights": _named("weights", weight_forms, model),
            "config": {
                **facts(config),
                "code": facts(config.code),
                "splitting_functions": _named("splitting_ops", splitting_factors, config),
                "passes": _named("passes", pass_factors, config.passes),
            },
            "device": device_factors(device),
            "platform": f"{sys.platform} {platform.machine()}",
            "versions": versions(config.code.compiler),
            "torch_state": _named("torch_state", torch_state),
            "environment": environment_factors(),
            "speedups": are_on(),  # the switch asks for a trace without them
        },
    )


def _named(factor: str, describe: Callable[..., Any], *arguments: Any) -> Any:
    """What `describe` returns; an Undescribable that it raises names the factor."""
    try:
        return describe(*arguments)
    except Undescribable as error:
        where = error.where.lstrip(".") or "the value"
        raise Undescribable(f"{factor}: {where}", error.reason) from error


def machine_key(config: CodeConfig, device: torch.device) -> Key:
    """What the codegen keys of all pieces of a model have in common; raises Undescribable."""
    return Key.of(
        "codegen",
        {
            "config": facts(config),
            "device": device_factors(device),
            "platform": f"{sys.platform} {platform.machine()}",
            "toolchain": toolchain(),
            "versions": versions(config.compiler),
            "repairs": [fingerprint(each) for each in (*REPAIRS, partition_options, partitioned)],
            "torch_state": torch_state(),
            "environment": environment_factors(),
        },
    )


def codegen_key(
    machine: Key,
    piece_digest: str,
    passes: Sequence[GraphPass],
    size: int | None,
    numbers: Sequence[int | None] = (),
) -> Key:
    """Key of the artifact of one unique piece under `passes`, static if for one `size`. `numbers`
    are those of symbols that are served at one number.

    Raises Undescribable.
    """
    factors = {"piece": piece_digest, "size": size, "passes": pass_factors(passes)}
    if any(number is not None for number in numbers):
        factors["numbers"] = [*numbers]
    return machine.extended(factors)


def facts(config: CompileConfig | CodeConfig) -> dict[str, Any]:
    """All settings of `config` by name. Code among them is no plain data: a key refuses it."""
    return {setting.name: getattr(config, setting.name) for setting in fields(config)}


def splitting_factors(config: CompileConfig) -> list[StableTexts]:
    """The code of a user's functions that say where to split, by part."""
    return [StableTexts(code_parts(function, "code")) for function in config.splitting_functions]


def versions(compiler: str) -> dict[str, str]:
    """Versions of what traces, compiles and loads; of a compiler of another package its own."""
    registered = registered_compiler(compiler)
    of_compiler = {f"compiler {compiler}": registered.version} if registered is not None else {}
    return {
        "piecegraph": importlib.metadata.version("piecegraph"),
        "torch": torch.__version__,
        "torch_commit": str(torch.version.git_version),
        "triton": _installed("triton"),
        "python": platform.python_version(),
        **of_compiler,
    }


def torch_state() -> dict[str, Any]:
    """Process-wide switches of torch, settings of its compilers that were changed, modes that see
    each call, and what the program registered to run or compile torch's own ops."""
    changed = StableTexts({name: stable_text(value) for name, value in changed_settings().items()})
    modes = {str(n): StableTexts(code_parts(mode, "code")) for n, mode in enumerate(active_modes())}
    kernels = {
        f"{overload_name(op)}[{key}]": StableTexts(kernel_parts(op, key))
        for op, key in overridden_ops()
    }
    rules = {
        name: StableTexts(code_parts(rule, "code")) for name, rule in registered_rules().items()
    }
    compiled_by = {**kernels, **rules}
    return {**global_state(), "settings": changed, "modes": modes, "kernels": compiled_by}


def device_factors(device: torch.device) -> dict[str, Any]:
    """What generated code depends on.

    Of a CPU its instruction-set extensions, which C++ is compiled for, and the number of threads,
    for which Inductor lays out its loops; of a GPU name, capability, multiprocessors and index.
    Of another device what torch states: its name and capability. Raises Undescribable.
    """
    cpu = {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "extensions": dict.fromkeys(cpu_extensions(), True),
    }
    if device.type == "cpu":
        return {"type": device.type, **cpu, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        try:
            stated = device_facts(device)
        except LookupError as error:
            raise Undescribable("device", f"has no description: {error}") from error
        return {"type": device.type, "index": device.index or 0, "is": stable_text(stated)}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "index": device.index or 0,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "host": cpu,
        "cuda": torch.version.cuda,
    }


def toolchain() -> dict[str, str]:
    """The C++ compiler that Inductor runs, by its `--version` output; empty if there is none."""
    if (compiler := cpp_compiler()) is None:
        return {}
    try:
        shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"cxx": shown.stdout.partition("\n")[0]}


def example_signature(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    given: ExampleArguments | None,
) -> Any:
    """The form of each tensor among the examples, dynamic sizes by symbol, all other values, and
    what holds them; a list of these for several call forms."""
    forms = call_forms(config.inputs)
    if given is None and not any("." in label for form in forms for label in form):
        return None  # built from `Config.inputs`, which is a factor itself
    signatures = [_signature(model, replace(config, inputs=form), device, given) for form in forms]
    return signatures if len(forms) > 1 else signatures[0]


def _signature(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    given: ExampleArguments | None,
) -> dict[str, Any]:
    examples = example_inputs(model, config, device, given)
    containers = {f"{dotted(each.path)}: {each.kind}": each.form for each in examples.containers()}
    values = {leaf.label: _form(leaf, examples.symbols) for leaf in examples.leaves()}
    return StableTexts(values | containers)


def _form(leaf: Leaf, symbols: Mapping[tuple[str, int], str]) -> Any:
    if not isinstance(leaf.value, torch.Tensor):
        return Stable(stable_text(leaf.value))
    shape = tuple(symbols.get((leaf.label, i), n) for i, n in enumerate(leaf.value.shape))
    return f"{leaf.value.device.type} {InputSpec(dtype=dtype_name(leaf.value.dtype), shape=shape)}"


def weight_forms(model: torch.nn.Module) -> dict[str, str]:
    """Form, device and class of every weight and buffer, and which of them are the same."""
    first: dict[int, str] = {}
    forms = StableTexts()
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            same = first.setdefault(id(tensor), name)
            forms[name] = f"is {same}" if same != name else weight_form(tensor)
    return forms


def weight_form(tensor: torch.Tensor) -> str:
    inner, context = subclass_parts(tensor)
    if not inner:
        return tensor_text(tensor)
    parts = "".join(f" {name}: {weight_form(each)}" for name, each in inner.items())
    return f"{tensor_text(tensor)}{parts} {tensor_class(type(tensor))} {stable_text(context)}"


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


FACTOR_NAMES = {
    "config.dedupe": "codegen.passes.dedupe",
    "config.code.autotune": "level",
    "config.splitting_functions": "splitting_ops",
    "device.threads": "device.threads (OMP_NUM_THREADS)",
}
"""Factors that no setting is called after."""


def documented(difference: Difference) -> str:
    """A difference by the setting or the variable behind its factor, as a user writes it."""
    name = difference.name.removeprefix("config.").removeprefix("code.")
    top = re.split(r"[.\[]", name)[0]
    owners = [each for each in (Tracing, Codegen) if top in each.model_fields]
    named = f"{owners[0]._path}.{name}" if owners else name
    return str(replace(difference, name=FACTOR_NAMES.get(difference.name, named)))
