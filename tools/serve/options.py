"""What the main job was asked to do, checked before anything heavy is imported."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import CacheNotWritable, InvalidSetting, OutputNotWritten
from ..engine.decoder_config import DecoderConfig

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
        from .fitted_sizes import read_sizes

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
    if path == STDOUT or path.is_dir() or not _takes_writing(path):
        raise InvalidSetting(
            name=name,
            value=str(path),
            reason="no file can be written there",
            expected="a file in a folder that exists"
            + (", or - for standard output" if or_stdout else ""),
        )
    return path


def _takes_writing(path: Path) -> bool:
    """Whether a file that is there may be written, or one that is not could be made."""
    if path.exists():
        return os.access(path, os.W_OK)
    try:
        _try_out(path.parent)
    except OSError:
        return False
    return True


def _try_out(folder: Path) -> None:
    """Make a file without a name in `folder`: what its mode allows is not always so."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def different_files(paths: Mapping[str, Path | None]) -> None:
    """Raise InvalidSetting if two of `paths`, by option, are one file; devices may be shared."""
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        place = path if path == STDOUT else Path(os.path.realpath(path))
        if place in seen:
            raise InvalidSetting(
                name=option,
                value=str(path),
                reason=f"what {seen[place]} asks for goes there already",
                expected="a file of its own for each",
            )
        seen[place] = option


def write(path: Path, text: str) -> None:
    """Write to a file, or to standard output if `path` is `-`. Raises OutputNotWritten."""
    with writing(path):
        if path == STDOUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            path.write_text(text)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says when `path` is written into OutputNotWritten."""
    try:
        yield
    except OSError as error:
        raise OutputNotWritten(path=path, reason=error.strerror or error) from error


def writable_cache(path: Path | None) -> Path | None:
    """The cache directory that was asked for, made if it is not there.

    The library would go on without it; who names a directory wants to be told.
    Raises CacheNotWritable.
    """
    if path is not None and (fault := _unwritable(path)):
        raise CacheNotWritable(path=path, reason=fault)
    return path


def writable_directory(name: str, path: Path | None) -> Path | None:
    """A directory that was asked for, made if it is not there. Raises InvalidSetting."""
    if path is not None and (fault := _unwritable(path)):
        raise InvalidSetting(
            name=name, value=str(path), reason=fault, expected="a folder that can be written"
        )
    return path


def _unwritable(folder: Path) -> str:
    """Why nothing can be written into `folder`, which is made if it is not there; or nothing."""
    if folder.exists() and not folder.is_dir():
        return "it is not a folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _try_out(folder)
    except OSError as error:
        return (error.strerror or str(error)).casefold()
    return ""
