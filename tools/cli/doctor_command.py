"""`piecegraph doctor`: what a start on this machine depends on, each with what to do about it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import PiecegraphError
from .cache_commands import DirOption, OfOption, model_of
from .cache_entries import cache_directory, manifests
from .run_commands import JsonOption, console_beside, write_json

if TYPE_CHECKING:
    from torch.nn import Module

    from ... import Config

TO_DO = 1
LEAST_FREE = 2 << 30
"""Bytes below which a disk is called too full for a cache."""

Found = tuple[str, str]
"""What was found, and what to do about it: empty where nothing is."""


def doctor_command(
    of: OfOption = None,
    cache_dir: DirOption = None,
    json_path: JsonOption = None,
    config: Annotated[
        Path | None, typer.Option(help="Check these settings of a Config, in JSON, and no more.")
    ] = None,
) -> int:
    """Check what a start on this machine depends on; status 1 if there is something to do.

    With --of it also says whether that model would start warm.
    """
    from rich.markup import escape

    from ... import Config
    from ..report.output import outputs

    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    model, started = (None, Config(cache_dir=cache_dir)) if of is None else model_of(of, cache_dir)
    checks: dict[str, Callable[[], Found]] = {
        "python": _python,
        "torch": _torch,
        "packages": _packages,
        "compiler": _compiler,
        "devices": _devices,
        "cache": lambda: _cache(started),
        "disk": lambda: _disk(started.cache_dir),
        "trust": _trust,
        "variables": _variables,
    }
    if model is not None:
        checks["start"] = lambda: _start(model, started, str(of))
    if config is not None:
        checks = {"settings": lambda: _settings(config)}
    report, console = {}, console_beside(to_json)
    for name, check in checks.items():
        try:
            found, fix = check()
        except (PiecegraphError, OSError) as error:
            found, fix = "not usable", str(error)
        report[name] = {"found": found, "fix": fix or None}
        console.print(f"[bold]{name:<10}[/] {escape(found)}", highlight=False, soft_wrap=True)
        if fix:
            console.print(
                f"[yellow]{'to do':<10}[/] {escape(fix)}", highlight=False, soft_wrap=True
            )
    write_json(to_json, report)
    return TO_DO if any(row["fix"] for row in report.values()) else 0


def _python() -> Found:
    found = f"{platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"
    if (3, 11) <= sys.version_info[:3] <= (3, 11, 8):
        found += ". ast.parse beside a trace may raise SystemError (gh-106905): not in 3.11.9"
    return found, ""


def _torch() -> Found:
    import torch
    from packaging.requirements import Requirement

    stated = map(Requirement, distribution("piecegraph").requires or ())
    tested = next(each.specifier for each in stated if each.name == "torch")
    found = torch.__version__
    fix = "" if tested.contains(found, prereleases=True) else f"Install torch{tested}."
    return found, fix


def _packages() -> Found:
    from ..report.origin import installed_version

    names = ("piecegraph", "triton", "transformers", "vllm", "fsspec", "cryptography")
    versions = {name: installed_version(name) for name in names}
    return ", ".join(f"{n} {found}" if found else f"no {n}" for n, found in versions.items()), ""


def _compiler() -> Found:
    from ...torch_compat.compiling.toolchain import cpp_compiler

    if (found := cpp_compiler()) is None:
        fix = (
            "Install g++ or clang++, or start from bundles with libraries (docs/starts.md): "
            "Inductor compiles C++ for a CPU and for wrappers of CUDA kernels."
        )
        return "no C++ compiler", fix
    return shutil.which(found) or found, ""


def _devices() -> Found:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"torch's build for CUDA {built} finds no GPU" if built else "a CPU build of torch"
        return f"cpu ({reason}; graphs are emulated)", ""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names), ""


def _cache(config: Config) -> Found:
    from ... import Events
    from ...runtime.setup.open_cache import open_cache

    cache = open_cache(config, Events())
    root = cache_directory(config.cache_dir)
    if not any(layer.writable for layer in cache.layers):
        return f"{root}: cannot be written", "Set --cache-dir to a private directory."
    shared = ", ".join(layer.name for layer in cache.layers if layer.name != "private")
    return f"{root}: {len(manifests(root))} entries; shared layers: {shared or 'none'}", ""


def _disk(cache_dir: Path | None) -> Found:
    from ..report.sections import size

    root = cache_directory(cache_dir)
    free = shutil.disk_usage(next(each for each in (root, *root.parents) if each.exists())).free
    fix = "" if free > LEAST_FREE else "Run `piecegraph cache prune --size 1GiB`, or free space."
    return f"{size(free)} free at {root}", fix


def _trust() -> Found:
    from ...cache.signing import signing_key, trusted_keys

    own = signing_key()
    keys = trusted_keys(own)
    signs = f"signs with key {own.public.id}" if own else "signs nothing"
    known = list(keys.keys.values()) if keys else []
    expired = [key.id for key in known if key.expired]
    fix = f"Keys have expired: {', '.join(expired)}. See docs/cache.md." if expired else ""
    return f"{signs}, trusts {len(known)} keys", fix


def _variables() -> Found:
    from ...cache.keys.environment import PREFIXES, all_variables, parts_off

    names = [line.partition("=")[0] for line in all_variables() if line.startswith(PREFIXES)]
    off = parts_off()
    fix = f"Parts are off: {', '.join(off)}. Unset PIECEGRAPH_OFF." if off else ""
    return ", ".join(names) or "none", fix


def _settings(path: Path) -> Found:
    from ... import Config
    from ...runtime.setup.remarks import remarks_of
    from ..report.output import reading

    with reading("--config", path, 'settings in JSON, such as {"max_num_reqs": 8}'):
        settings = json.loads(path.read_text())
        if not isinstance(settings, dict):
            raise TypeError("it is no object")
    found = remarks_of(Config(**settings))
    text = "; ".join(remark.what for remark in found) or "each has an effect, no step is slow"
    return text, " ".join(dict.fromkeys(remark.todo for remark in found))


def _start(model: Module, config: Config, of: str) -> Found:
    """A cold start is no fault of the machine."""
    from ... import explain_miss

    answer = explain_miss(model, config)
    if answer.reason is None:
        return str(answer), ""
    return f"would compile: {answer.reason}. `piecegraph cache why --of {of}` says more", ""
