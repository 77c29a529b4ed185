"""Files of a command: read, or checked before the work begins and written at its end."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting, OutputNotWritten, PiecegraphError


class Output:
    """A file to write, or standard output for the path `-`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_stdout = path == Path("-")

    def __str__(self) -> str:
        return str(self.path)

    def write(self, text: str) -> None:
        """Write all of `text`. Raises OutputNotWritten."""
        with self.writing() as path:
            if self.is_stdout:
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                path.write_text(text)

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The path, for code that writes to it; its OSError becomes OutputNotWritten."""
        try:
            yield self.path
        except OSError as error:
            raise OutputNotWritten(path=self.path, reason=error.strerror or error) from error


def outputs(
    paths: Mapping[str, Path | None], *, stdout: Collection[str] = ()
) -> list[Output | None]:
    """One output for each option that has a path, in order.

    Raises InvalidSetting if a file cannot be written, if two options name the same file, and for
    `-` with an option that is not in `stdout`. Devices may be shared.
    """
    seen: dict[Path, str] = {}
    checked: list[Output | None] = []
    for option, path in paths.items():
        checked.append(None if path is None else Output(path))
        if path is None:
            continue
        to_stdout = path == Path("-")
        if not (to_stdout and option in stdout) and (
            to_stdout or path.is_dir() or not _can_be_written(path)
        ):
            allowed = ", or - for standard output" if option in stdout else ""
            reason = "no file can be written there"
            expected = f"a file in a folder that exists{allowed}"
            raise InvalidSetting(name=option, value=str(path), reason=reason, expected=expected)
        if path.exists() and not path.is_file():
            continue
        place = path if to_stdout else Path(os.path.realpath(path))
        if place in seen:
            reason = f"what {seen[place]} asks for goes there already"
            expected = "a file of its own for each"
            raise InvalidSetting(name=option, value=str(path), reason=reason, expected=expected)
        seen[place] = option
    return checked


def output_of(option: str, path: Path, *, stdout: bool = False) -> Output:
    """The output of one option. Raises what `outputs` raises."""
    (output,) = outputs({option: path}, stdout=(option,) if stdout else ())
    assert output is not None
    return output


def read_facts(path: Path, name: str, command: str, schema: int, key: str) -> dict[str, Any]:
    """What `command` wrote: JSON of this schema with `key`. `name` is the option of the file.

    Raises InvalidSetting for another file.
    """
    with reading(name, path, f"a file that `{command}` wrote"):
        facts: dict[str, Any] = json.loads(path.read_text())
        if facts["schema"] != schema:
            raise ValueError(f"its schema is {facts['schema']}")
        facts[key]
    return facts


@contextmanager
def reading(name: str, path: Path | str, expected: str) -> Iterator[None]:
    """What goes wrong with the content of a file that an option named is InvalidSetting."""
    try:
        yield
    except PiecegraphError:
        raise
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
            ValueError) as error:  # fmt: skip
        raise InvalidSetting(
            name=name,
            value=str(path),
            reason=f"{type(error).__name__}: {error}",
            expected=expected,
        ) from error


def folder_fault(folder: Path) -> str:
    """Why no file can be written into `folder`, which is created if missing; empty if one can."""
    if folder.exists() and not folder.is_dir():
        return "it is not a folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_unnamed_file(folder)
    except OSError as error:
        return (error.strerror or str(error)).casefold()
    return ""


def _can_be_written(path: Path) -> bool:
    if path.exists():
        return os.access(path, os.W_OK)
    try:
        _write_unnamed_file(path.parent)
    except OSError:
        return False
    return True


def _write_unnamed_file(folder: Path) -> None:
    """Permission bits do not tell whether a file can be created, so create one."""
    with tempfile.TemporaryFile(dir=folder):
        pass
