"""Settings and switches of torch that decide what a trace holds or which code is generated."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .devices import autocast_devices

_SHAPE_CODE = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")


def is_settings(module: Any) -> bool:
    """Whether a module holds settings of torch, such as `torch._inductor.config`."""
    from torch.utils._config_module import ConfigModule

    return isinstance(module, ConfigModule)


def inductor_option_names() -> frozenset[str]:
    """The names in `torch._inductor.config`, by its source: to import it takes more than a second,
    which a warm start does not have."""
    source = Path(torch.__file__).with_name("_inductor") / "config.py"
    return frozenset(_assigned(ast.parse(source.read_text("utf-8")).body, "", {}))


def _assigned(body: list[ast.stmt], prefix: str, classes: dict[str, list[ast.stmt]]) -> list[str]:
    """The names assigned in a module or class, with those of nested and of base classes."""
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            inherited = [each for base in bases for each in classes.get(base, ())]
            classes[node.name] = [*node.body, *inherited]
            names += _assigned(classes[node.name], f"{prefix}{node.name}.", classes)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [prefix + target.id for target in targets if isinstance(target, ast.Name)]
    return names


def changed_settings() -> dict[str, Any]:
    """Settings of torch's compilers that this process has changed, by full name.

    Nothing is imported: a module of settings that is not loaded yet, or that another thread is
    importing, has its defaults, and what the environment sets is a separate factor. What torch
    leaves out of its own keys is left out, unless it is an object, such as a pass: those torch
    knows by their own means.
    """
    from torch.utils._config_module import _UNSET_SENTINEL as unset

    changed = {}
    for module in filter(is_settings, map(sys.modules.get, _SHAPE_CODE)):
        settings: Any = module
        prefixes = getattr(settings, "_cache_config_ignore_prefix", ())
        left_out = re.compile("|".join(rf"{re.escape(each)}(\.|$)" for each in prefixes) or "$^")
        for name, value in settings.get_config_copy().items():
            entry = settings._config[name]
            stated = (entry.env_value_force, entry.env_value_default, entry.default)
            original = next(each for each in stated if each is not unset)
            plain = isinstance(value, bool | int | str)
            if value != original and not (plain and left_out.match(name)):
                changed[f"{settings.__name__}.{name}"] = value
    return changed


@dataclass(frozen=True)
class ProcessState:
    """What decides generated code and can be different in each process, to be set in another."""

    settings: Mapping[str, Any]
    num_threads: int
    dtype: torch.dtype
    precision: str
    deterministic: tuple[bool, bool]
    """Whether algorithms must be deterministic, and whether others only warn."""
    inference: bool

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Set it in this process, and in this thread, until the block ends."""
        before = process_state()
        with ExitStack() as used:
            used.callback(before._set)
            for name, value in self.settings.items():
                (owner,) = (each for each in _SHAPE_CODE if name.startswith(f"{each}."))
                settings: Any = importlib.import_module(owner)
                used.enter_context(settings.patch(name.removeprefix(f"{owner}."), value))
            self._set()
            used.enter_context(torch.inference_mode(self.inference))
            yield

    def _set(self) -> None:
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        mode, warn_only = self.deterministic
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def process_state() -> ProcessState:
    """That of this process, now."""
    return ProcessState(
        settings=changed_settings(),
        num_threads=torch.get_num_threads(),
        dtype=torch.get_default_dtype(),
        precision=torch.get_float32_matmul_precision(),
        deterministic=(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        inference=torch.is_inference_mode_enabled(),
    )


_FLAGS = (
    *("backends.fp32_precision", "backends.cuda.matmul.fp32_precision"),
    *("backends.cudnn.fp32_precision", "backends.cudnn.conv.fp32_precision"),
    *("backends.cudnn.rnn.fp32_precision", "backends.mkldnn.fp32_precision"),
    *("backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision"),
    "backends.mkldnn.rnn.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic"),
    *("backends.cudnn.allow_tf32", "backends.mkldnn.enabled", "backends.mkldnn.deterministic"),
    *("backends.opt_einsum.enabled", "backends.opt_einsum.strategy"),
    "utils.deterministic.fill_uninitialized_memory",
)
_GETTERS: Mapping[str, Callable[[], Any]] = {
    "default_dtype": torch.get_default_dtype,
    "default_device": torch.get_default_device,
    "inference_mode": torch.is_inference_mode_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "matmul_precision": torch.get_float32_matmul_precision,
    "flash_sdp": torch.backends.cuda.flash_sdp_enabled,
    "mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math_sdp": torch.backends.cuda.math_sdp_enabled,
    "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled,
    "mha_fastpath": torch.backends.mha.get_fastpath_enabled,
}


def global_state() -> dict[str, str]:
    """Switches of this process that a trace or generated code depends on, as text.

    Gradient mode is not one of them: models are traced with gradients off. A switch that torch
    cannot read has the error as its value: some of its getters raise once newer ones were used.
    """
    state = {name: _read(getter) for name, getter in _GETTERS.items()}
    state |= {name: _read(lambda name=name: _flag(name)) for name in _FLAGS}  # type: ignore[misc]
    for device, default in (("cpu", torch.bfloat16), ("cuda", torch.float16)):
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        if enabled or dtype is not default:
            state[f"autocast.{device}"] = f"{dtype}" if enabled else f"off, {dtype}"
    if torch.compiler.is_exporting():
        state["exporting"] = "True"
    if (shapes := sys.modules.get("torch.fx.experimental._config")) is not None:
        state["use_duck_shape"] = str(getattr(shapes, "use_duck_shape", None))
    unset = {"none", "ieee"}  # full precision of a product, by default or as stated
    return {
        name: value
        for name, value in state.items()
        if value not in (unset if "matmul.fp32" in name else {"none"})
    }


_OF_THREAD = ("default_device", "inference_mode", "autocast.")
"""What `global_state` states of the calling thread alone, by the beginnings of its names."""


@dataclass(frozen=True)
class TorchState:
    """The state under which a model is keyed, traced and run: taken once, compared at each border.

    `switches` is `global_state()`. The rest is what torch keeps for each thread, so that another
    thread can install it.
    """

    switches: Mapping[str, str]
    grad: bool
    inference: bool
    device: torch.device
    autocast_cache: bool
    autocast_dtypes: Mapping[str, torch.dtype]

    @classmethod
    def now(cls) -> TorchState:
        """That of this process and thread."""
        return cls(
            global_state(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_device(),
            torch.is_autocast_cache_enabled(),
            {device: torch.get_autocast_dtype(device) for device in autocast_devices()},
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give this thread, which ends afterwards, what torch keeps for each thread."""
        if torch.get_default_device() != self.device:
            torch.set_default_device(self.device)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for device, dtype in self.autocast_dtypes.items():
            torch.set_autocast_dtype(device, dtype)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield

    def changed(self) -> str:
        """Which switches are others now, as `name: before -> now`; empty if none is."""
        return _changes(self.switches, global_state())

    def changed_in_process(self, of_both: bool = False) -> str:
        """`changed`, without what each thread has for itself. With `of_both`, only what was known
        before and is now: a module of torch that was imported since has switches of its own."""
        now = global_state()
        names = self.switches.keys() & now.keys() if of_both else self.switches.keys() | now.keys()
        names = {name for name in names if not name.startswith(_OF_THREAD)}
        return _changes(*({k: s[k] for k in names & s.keys()} for s in (self.switches, now)))


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    differ = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    return "; ".join(f"{name}: {before.get(name)} -> {now.get(name)}" for name in differ)


def _flag(name: str) -> Any:
    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _read(getter: Callable[[], Any]) -> str:
    try:
        return str(getter())
    except AttributeError:  # not in this version of torch
        return "none"
    except Exception as error:
        return f"unreadable ({type(error).__name__})"
