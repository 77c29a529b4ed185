"""Settings and switches of torch that change generated code."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

_SHAPE_CODE = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")


_SHAPE_NO_CODE = re.compile(
    r"(_|trace\.|test_configs\.|worker_|compile_threads|.*(cache|debug|verbose|log|dir|path|metadata)).*"
)


def changed_settings() -> dict[str, Any]:
    """Settings of torch's compilers that this process has changed, by full name.

    Nothing is imported: a settings module that is not loaded has its defaults, and environment
    variables are their own key factor. Settings that cannot affect generated code are excluded.
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
    """Process-wide switches that change traces or generated kernels."""
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
