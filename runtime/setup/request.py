"""From a model and its settings to a request to compile it."""

from __future__ import annotations

import itertools
from concurrent.futures import Executor

import torch

from ...compile.ir.compilation import CompileRequest, ExampleArguments
from ...compile.ir.config import call_forms
from ...config import BundleUse, Config, compile_config
from ...errors import InvalidSetting
from ...torch_compat.basics.modules import original_module
from ..core.exchange import Exchange
from ..core.records import Records
from .open_cache import open_cache


def compile_request(
    model: torch.nn.Module,
    config: Config,
    records: Records,
    examples: ExampleArguments | None,
    exchange: Exchange | None = None,
    executor: Executor | None = None,
) -> CompileRequest:
    """What to compile, and with what: `config` as `resolve_config`, the model's device, the cache.

    Raises InvalidSetting for what is no model, and no executor.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidSetting(
            name="model",
            value=model,
            reason="it is a class" if isinstance(model, type) else "it is no torch.nn.Module",
            expected="an instance of torch.nn.Module, and for a function one that calls it",
        )
    if not (executor is None or isinstance(executor, Executor)):
        raise InvalidSetting(
            name="executor",
            value=executor,
            reason="it is no concurrent.futures.Executor",
            expected="an object whose submit(fn, *args) returns a concurrent.futures.Future",
        )
    forms = call_forms(config.inputs)
    if examples is not None and len(forms) > 1:
        raise InvalidSetting(
            name="examples",
            value=f"one call, and {len(forms)} call forms",
            reason="examples of several forms are built from Config.inputs",
            expected="no examples, or the inputs of one form",
        )
    model = original_module(model)
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    device = torch.device("cpu") if first is None else first.device
    if device.type == "meta":
        raise InvalidSetting(
            name="model",
            value=type(model).__name__,
            reason="its weights are on the meta device, where they have no values",
            expected="a loaded model, or the device that its weights will be on: "
            "compile_ahead(device=…), prepare(weights=…, device=…)",
        )
    return CompileRequest(
        model,
        compile_config(config),
        open_cache(config, records.events),
        records.events,
        device,
        examples,
        exchange=exchange,
        records=records.compile,
        dump_dir=config.codegen.dump_dir,
        executor=executor,
        needs_bundle=config.bundle is BundleUse.FORCE,
    )
