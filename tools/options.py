"""What the main job was asked to do, checked before anything heavy is imported."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CacheNotWritable, InvalidSetting
from .decoder_config import DecoderConfig

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
STRATEGIES = ("EAGER", "DELAYED", "LAZY")
BACKENDS = ("inductor", "eager")
DTYPES = ("float32", "float16", "bfloat16")
VERIFY = ("none", "sample", "all")
SWITCH_NAMES = ("all", "compile", "graphs", "inductor", "cache", "dedupe", "guard-proof")
STDOUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings of `piecegraph run`; None leaves a choice to the library."""

    model: DecoderConfig
    dtype: str
    device: str
    seed: int
    trace: Path
    requests: int
    length_scale: float
    time_scale: float
    mode: str | None
    strategy: str
    capture_sizes: tuple[int, ...] | None
    max_num_tokens: int
    max_num_reqs: int
    backend: str
    level: int | None
    cache_dir: Path | None
    cache: bool
    block_size: int
    kv_blocks: int | None
    verify: str
    off: tuple[str, ...] = ()
    dump_dir: Path | None = None
    json: Path | None = None
    metrics: Path | None = None


def choice(name: str, value: str, choices: Iterable[str]) -> str:
    """The one of `choices` that `value` means; case and `-` for `_` are free."""
    meant = value.replace("-", "_").casefold()
    for candidate in choices:
        if candidate.replace("-", "_").casefold() == meant:
            return candidate
    raise InvalidSetting(
        name=name,
        value=value,
        reason="there is no such choice",
        expected="one of " + ", ".join(candidate.casefold() for candidate in choices),
    )


def parse_sizes(name: str, value: str | None) -> tuple[int, ...] | None:
    """Capture sizes from `1,2,4`, or from a file that `piecegraph sizes fit` wrote.

    Whether they suit the limits is the library's question.
    """
    if value is not None and value.endswith(".json"):
        from .sizes import read_sizes

        return tuple(read_sizes(Path(value)))
    try:
        return value if value is None else tuple(int(item) for item in value.split(","))
    except ValueError:
        raise InvalidSetting(
            name=name,
            value=value,
            reason="it is not a list of numbers",
            expected="sizes separated by commas, such as 1,2,4,8",
        ) from None


def finite(name: str, value: float, *, above_zero: bool) -> float:
    """`value` if it is a number at least (or above) zero."""
    if math.isfinite(value) and value >= 0 and (value > 0 or not above_zero):
        return value
    raise InvalidSetting(
        name=name,
        value=value,
        reason="it is out of range",
        expected="a finite number above 0" if above_zero else "a finite number, 0 or more",
    )


def writable(name: str, path: Path | None, *, or_stdout: bool = False) -> Path | None:
    """`path` if a file can be written there, so that a long run does not end in an error.

    `-` is refused unless the option may go to standard output instead. Raises InvalidSetting.
    """
    if path is None or (or_stdout and path == STDOUT):
        return path
    existing = path if path.exists() else path.parent
    if path == STDOUT or path.is_dir() or not os.access(existing, os.W_OK):
        raise InvalidSetting(
            name=name,
            value=str(path),
            reason="no file can be written there",
            expected="a file in a folder that exists"
            + (", or - for standard output" if or_stdout else ""),
        )
    return path


def write(path: Path, text: str) -> None:
    """Write to a file, or to standard output if `path` is `-`."""
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text)


def writable_directory(path: Path | None) -> Path | None:
    """The cache directory that was asked for, made if it is not there.

    The library would go on without it; who names a directory wants to be told.
    Raises CacheNotWritable.
    """
    if path is None:
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheNotWritable(path=path, reason=error.strerror) from None
    if not os.access(path, os.W_OK):
        raise CacheNotWritable(path=path, reason="permission denied")
    return path
