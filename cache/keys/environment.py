"""Environment variables: which are factors of a key, and which are not and why.

Every variable with one of the prefixes is a factor unless it is listed here with a reason: a new
variable of torch or Triton is covered the day it appears. Values that are paths are never factors.
The library reads its own variables through `read`, which asserts that each is declared.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from .factors import is_place, varies_per_run

CACHE_DIR = "PIECEGRAPH_CACHE_DIR"
SIGNING_KEY_FILE = "PIECEGRAPH_CACHE_SIGNING_KEY_FILE"
TRUSTED_KEYS_FILE = "PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE"
OFF = "PIECEGRAPH_OFF"
FASTER = "faster"
"""The part of OFF that no setting turns off: what only saves time."""
DUMP_DIR = "PIECEGRAPH_DUMP_DIR"
LOG_LEVEL = "PIECEGRAPH_LOG_LEVEL"

DECLARED: Mapping[str, str] = {
    CACHE_DIR: "where the private cache directory lies",
    SIGNING_KEY_FILE: "a builder's file with the private key that signs shared entries",
    TRUSTED_KEYS_FILE: "file with the public keys whose entries are loaded from shared layers",
    OFF: "parts that are off, separated by commas",
    DUMP_DIR: "where graphs and generated code are written for people",
    LOG_LEVEL: "least severe level that the command line logs: debug, info, warning",
}
"""Every variable the library reads, with its meaning."""

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
PREFIXES = ("PIECEGRAPH_", "TORCH", "PYTORCH_", "TRITON_", "ATEN_")

EXEMPT: Mapping[str, str] = {
    r"PIECEGRAPH_CACHE_.*": "where and whom to trust, not what is compiled",
    OFF: "what it changes is in the settings, or a factor itself",
    r".*_(DIR|DIRS|PATH|HOME|FILE|FOLDER)": "a place",
    r".*_(LOGS?|LOG_LEVEL|TRACE|VERBOSE|PROGRESS|PRINT_.*|SHOW_.*|COMPILE_DEBUG)": "what is shown",
    r".*_(DUMP|DEBUG_DUMP|DUMP_.*|REPRODUCER.*)": "what is written for people",
    r"TORCHELASTIC_.*|TORCH_(NCCL|GLOO|UCC)_.*|TORCH_DISTRIBUTED_DEBUG": "launch and transport",
    r"TORCHX_.*|.*_(JOB|RUN|TASK|POD|REPLICA)_?(ID|UID|UUID|NAME)": "which job this is",
    r".*_(SERVICE|PORT)(_.*)?": "links to services, set by an orchestrator",
    r"PYTORCH_VERSION|TORCH_CUDA_ARCH_LIST": "how an image was built; torch's version is a factor",
    r"PYTORCH(_CUDA|_HIP|_NO_CUDA)?_(ALLOC_CONF|MEMORY_CACHING)": "where tensors lie, not code",
    r"TORCHINDUCTOR_(COMPILE_THREADS|WORKER_.*|PROFILE.*)": "how compiling is spread",
    r"TORCHINDUCTOR_VEC_ISA_OK": "skips a probe; the instruction set found is a factor itself",
    r"TORCHINDUCTOR_.*CACHE.*|TORCH_COMPILE_.*CACHE.*|TRITON_(ALWAYS_COMPILE|CACHE_.*)": (
        "which other caches are used"
    ),
}
"""Patterns of names that are no factor though they have a prefix, each with its reason."""

VARIABLES: Any = vars(os.environ)["_data"]
"""The dict inside `os.environ` and `os.environb`, by which a read of any variable is known."""

READERS: tuple[Any, ...] = (os.environ, getattr(os, "environb", None), os.getenv)
"""By what code reads variables that it names."""


def read(name: str) -> str | None:
    """The value of one of our variables, which must be in DECLARED."""
    assert name in DECLARED, f"declare {name} in cache/keys/environment.py"
    return os.environ.get(name)


def all_variables() -> list[str]:
    """Each variable of this process with its value, in order."""
    return sorted(map("=".join, os.environ.items()))


def parts_off() -> list[str]:
    """What PIECEGRAPH_OFF turns off."""
    return [name.strip() for name in (read(OFF) or "").split(",") if name.strip()]


def observed(name: str) -> str | None:
    """The value of any variable, for a condition; of one that may hold a secret only a digest."""
    value = os.environ.get(name)
    if value is not None and _SECRET.search(name.upper()):
        return f"sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:16]}"
    return value


def child_environment(**changes: str) -> dict[str, str]:
    """The environment with `changes`, for a process to start."""
    return {**os.environ, **changes}


def exemption(name: str, value: str) -> str | None:
    """Why a variable with one of the prefixes is not a factor, or None if it is one."""
    for pattern, reason in EXEMPT.items():
        if re.fullmatch(pattern, name):
            return reason
    if is_place(value):
        return "its value is a place"
    return "its value differs for each run" if varies_per_run(value) else None


def environment_factors() -> dict[str, str]:
    """The variables that are factors, by name."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and exemption(name, value) is None
    }
