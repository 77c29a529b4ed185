"""What torch states of the devices of this process, of whatever type."""

from __future__ import annotations

from typing import Any

import torch


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name and capability of an accelerator. Raises LookupError where torch states neither."""
    module = torch.get_device_module(device)
    try:
        name, capability = module.get_device_name, module.get_device_capability
    except AttributeError as error:
        raise LookupError(f"torch.{device.type} states no name or no capability") from error
    return {"name": name(device), "capability": capability(device)}


def runs_triton(device: torch.device) -> bool:
    """Whether Inductor generates Triton kernels for `device`: it has C++ for a CPU and Metal."""
    return device.type not in ("cpu", "mps")


def autocast_devices() -> tuple[str, ...]:
    """Types of the devices that `torch.autocast` may be active for."""
    kinds = dict.fromkeys(("cpu", "cuda", _accelerator()))
    return tuple(filter(torch.amp.is_autocast_available, kinds))


def devices_in_use() -> tuple[str, range]:
    """Type and indices of the accelerators; none before the process has used one."""
    module: Any = torch.get_device_module(_accelerator())
    in_use = hasattr(module, "is_initialized") and module.is_initialized()
    return _accelerator(), range(module.device_count() if in_use else 0)


def graph_classes() -> dict[type[Any], str]:
    """The classes of torch that capture the work of a device from `capture_begin` on, each with
    what it makes. Older versions have the first one alone."""
    classes = {
        torch.cuda.CUDAGraph: "a CUDA graph",
        getattr(torch.xpu, "XPUGraph", None): "an XPU graph",
        getattr(torch.accelerator, "Graph", None): "a graph of the accelerator",
    }
    return {each: name for each, name in classes.items() if each is not None}


def _accelerator() -> str:
    """Type of the accelerator that this build of torch is for, or that was registered."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else "cuda"
