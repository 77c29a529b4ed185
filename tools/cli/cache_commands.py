"""`piecegraph cache …`: look into the cache, check it, explain a miss, ship it."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cache.keys.environment import OFF, read
from ...errors import CacheNotWritable, InvalidSetting
from ..report.output import outputs
from ..report.sections import rich_table
from ..report.sections import size as shown_size
from ..serve.options import RunOptions
from .cache_entries import cache_directory, label, manifests, named
from .run_commands import with_run_options

if TYPE_CHECKING:
    from ... import Config
    from ...cache.manifest import Manifest
    from ...events import Event

MISS, UNVERIFIABLE = 1, 4

cache_app = typer.Typer(
    help="Look into the cache, check it, explain a miss, ship it.",
    no_args_is_help=True,
)

DirOption = Annotated[Path | None, typer.Option("--cache-dir", help="Where artifacts are kept.")]


@cache_app.command("list")
def list_command(cache_dir: DirOption = None) -> int:
    """List the entries, the one used last first."""
    from rich.console import Console

    root = cache_directory(cache_dir)
    if not root.is_dir():
        print(f"error: there is no directory {root}", file=sys.stderr)
        return UNVERIFIABLE
    rows = [
        (
            label(manifest),
            shown_size(sum(blob.size for blob in manifest.blobs.values())),
            len(manifest.blobs),
            _ago(used),
            " ".join(_facts(manifest)),
        )
        for manifest, used in sorted(manifests(root), key=lambda found: -found[1])
    ]
    columns = ("entry", "size", "blobs", "used", "facts")
    Console().print(rich_table(f"Entries: {len(rows)}", columns, rows))
    return 0


@cache_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="First digits of a key, or kind/digits.")],
    cache_dir: DirOption = None,
) -> int:
    """Show an entry as JSON: what it was made from, and its blobs."""
    root = cache_directory(cache_dir)
    (manifest,) = named(root, [name])
    facts: dict[str, Any] = json.loads(manifest.line())
    print(json.dumps({**facts, "digest": manifest.digest}, indent=2))
    return 0


@cache_app.command("verify")
def verify_command(
    trace: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Trace what it returns: (model, Config)."),
    ] = None,
    cache_dir: DirOption = None,
) -> int:
    """Check every byte. Status: 1 corrupt + 2 untrusted + 4 unverifiable, 0 if clean.

    With --trace: compare the bundle of one model with a new trace; status 2 if it is another's.
    """
    from ..cache_verify import exit_status, verify

    if trace is not None:
        return _verify_model(trace, cache_dir)
    root = cache_directory(cache_dir)
    findings = verify(root)
    for finding in findings:
        print(f"{finding.status.name}: {finding.name}: {finding.reason}")
    print(f"{len(manifests(root))} readable entries, {len(findings)} findings in {root}")
    return exit_status(findings)


def _verify_model(target: str, cache_dir: Path | None) -> int:
    from ... import prepare

    module, _, function = target.partition(":")
    try:
        sys.path.insert(0, str(Path.cwd()))
        model, config = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidSetting(
            name="--trace",
            value=target,
            reason=f"{type(error).__name__}: {error}",
            expected="module:function, a function that returns (model, Config)",
        ) from error
    if cache_dir is not None:
        config = config.changed(cache_dir=cache_dir)
    prepared = prepare(model, config.changed(bundle="force", **{"cache.verify_bundle": "before"}))
    verified = prepared.report()["cache"]["verified"]
    prepared.close()
    print(f"the bundle of {type(model).__qualname__} is that of the model: {verified}")
    return 0 if verified is True else UNVERIFIABLE


@cache_app.command("why")
@with_run_options
def why_command(options: RunOptions) -> int:
    """Say whether `piecegraph run` with these options would hit, and if not, why; status 1."""
    from ... import explain_miss
    from ..serve.run import build_model, find_device, library_config

    answer = explain_miss(
        build_model(options, find_device(options.device)), library_config(options)
    )
    print(answer)
    return MISS if answer.reason else 0


@cache_app.command("prune")
def prune_command(
    size: Annotated[str, typer.Option(help="Keep at most this much, such as 2GiB.")] = "10GiB",
    days: Annotated[float, typer.Option(min=0, help="Keep what was used since.")] = math.inf,
    cache_dir: DirOption = None,
) -> int:
    """Remove what was used least recently, beyond a size or an age."""
    from ... import Events
    from ...cache.evict import Limits, evict

    root, events = cache_directory(cache_dir), Events()
    evict(root, Limits(size=_bytes(size), age=days * 86400, grace=0), events)
    _refuse_failed(root, events.named("cache.evict_failed"))
    facts = events.named("cache.evict")
    removed, freed = (facts[0].facts["entries"], facts[0].facts["bytes"]) if facts else (0, 0)
    print(f"removed {removed} entries, {shown_size(freed)}; {len(manifests(root))} are left")
    return 0


@cache_app.command("export")
def export_command(
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    names: Annotated[
        list[str] | None, typer.Argument(help="Entries to export; all bundles by default.")
    ] = None,
    cache_dir: DirOption = None,
) -> int:
    """Write bundles to one file, for a container image; signed if a key is in the environment."""
    from ...cache.directory import DirectoryLayer
    from ...cache.signing import signing_key
    from ..cache_export import export_entries

    root, signer = cache_directory(cache_dir), signing_key()
    (to_file,) = outputs({"PATH": path})
    assert to_file is not None
    chosen = _entries_to_ship(root, names)
    with to_file.writing():
        export_entries(chosen, DirectoryLayer(root, name=str(root)), path, signer)
    signed = f"signed with key {signer.public.id}" if signer else "not signed"
    print(f"{len(chosen)} entries, {shown_size(path.stat().st_size)}, {signed}: {path}")
    for manifest in chosen:
        print(f"  {label(manifest)} digest {manifest.digest}")
    return 0


def _entries_to_ship(root: Path, names: Sequence[str] | None) -> list[Manifest]:
    """The named entries, by default all bundles; raises InvalidSetting if there are none."""
    chosen = named(root, names or ()) or [
        manifest for manifest, _ in manifests(root) if manifest.kind == "bundle"
    ]
    if not chosen:
        raise InvalidSetting(
            name="--cache-dir",
            value=str(root),
            reason="it holds no bundle",
            expected="a cache that `piecegraph cache warm` or a run has filled",
        )
    return chosen


@cache_app.command("import")
def import_command(
    path: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    pin: Annotated[
        list[str] | None, typer.Option(help="Import just the entry with this digest. Repeatable.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Believe whatever is in it.")] = False,
    cache_dir: DirOption = None,
) -> int:
    """Read entries from a file: those signed with a trusted key, or named by --pin."""
    from ... import Events
    from ...cache import Cache
    from ...cache.signing import signing_key, trust_all, trusted_keys
    from ..cache_export import import_entries

    if not path.is_file():
        raise InvalidSetting(
            name="PATH",
            value=str(path),
            reason="it is not a file" if path.exists() else "there is no such file",
            expected="a file that `piecegraph cache export` wrote",
        )
    if pin or trust:
        believed: Any = trust_all  # a digest covers an entry with all of its contents
    elif keys := trusted_keys(signing_key()):
        believed = keys.refuses
    else:
        raise InvalidSetting(
            name="PATH",
            value=str(path),
            reason="there is no key to check a signature with",
            expected="--pin DIGEST, --trust, or keys in PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE",
        )
    entries = import_entries(path, believed, only=pin or ())
    root, events = cache_directory(cache_dir), Events()
    cache = Cache(root, events)
    for entry in entries:
        cache.store(entry)
        _refuse_failed(root, events.named("cache.publish_failed"))
        print(f"{label(entry.manifest)}: {shown_size(entry.size)}")
    return 0


@cache_app.command("keygen")
def keygen_command(
    path: Annotated[Path, typer.Argument(help="The private key; the public one is PATH.pub.")],
    name: Annotated[str, typer.Option(help="Whose key it is.")] = "",
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The last day it is trusted.")
    ] = None,
    next_epoch: Annotated[
        bool, typer.Option("--next-epoch", help="Keep the key in PATH and begin its next epoch.")
    ] = False,
) -> int:
    """Make the key that a builder signs with, and the line that servers trust it by."""
    from ...cache.signing import SigningKey, read_signing_key, write_keys

    if next_epoch:
        key = read_signing_key(path).next_epoch()
    elif path.exists():
        raise InvalidSetting(
            name="PATH",
            value=str(path),
            reason="it exists",
            expected="a new file, or --next-epoch to keep its key",
        )
    else:
        key = SigningKey.new(name=name, expires=expires.date() if expires else None)
    write_keys(key, path)
    print(f"key {key.public.id}, epoch {key.public.epoch}: {path} signs; give servers {path}.pub:")
    print(key.public.line())
    return 0


@cache_app.command("warm")
@with_run_options
def warm_command(
    options: RunOptions,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; on cuda each has its device.")] = 1,
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Build libraries too, which load in milliseconds.")
    ] = False,
) -> int:
    """Build the bundle of a model without serving, for every rank."""
    from ... import Events, compile_ahead, prepare
    from ..serve.run import build_model, find_device, library_config

    config = library_config(options)
    _refuse_unkept(options, config)
    root = cache_directory(options.cache_dir)
    for rank in range(ranks):
        name = f"cuda:{rank}" if options.device == "cuda" else options.device
        began, events = time.perf_counter(), Events()
        model = build_model(options, find_device(name))
        prepared = prepare(model, config, events=events)
        found = "was there" if prepared.compiled.from_bundle else "built"
        prepared.close()
        if ahead:
            libraries = compile_ahead(model, config, events=events)
            found += ", with libraries" if libraries else ", no library possible"
        seconds = time.perf_counter() - began
        _refuse_failed(root, events.named("cache.publish_failed"))
        print(f"rank {rank} on {name}: {found}, {seconds:.1f} s", flush=True)
    return 0


def _refuse_unkept(options: RunOptions, config: Config) -> None:
    """Raise InvalidSetting, naming the option, for a start that would store nothing."""
    from ...runtime.switches import resolve_config

    config = resolve_config(config)
    off = ("--off", ", ".join(options.off)) if options.off else (OFF, read(OFF))
    backend = ("--backend", "eager") if options.backend == "eager" else off
    faults = (
        (not config.cache, ("--no-cache", True) if options.no_cache else off, "the cache is off"),
        (not config.compile, off, "compiling is off"),
        (
            config.compiler == "eager",
            ("--level", options.level) if options.level == 0 else backend,
            "the compiler 'eager' keeps nothing",
        ),
        (
            config.codegen.dump_dir is not None,
            ("--dump-dir", str(config.codegen.dump_dir)),
            "with a dump directory nothing is kept",
        ),
    )
    for found, (name, value), reason in faults:
        if found:
            raise InvalidSetting(
                name=name,
                value=value,
                reason=reason,
                expected="options with which there is something to store",
            )


def _refuse_failed(root: Path, failures: Sequence[Event]) -> None:
    """Raise CacheNotWritable for failed writes, which the library only reports as an event."""
    if failures:
        raise CacheNotWritable(path=root, reason=failures[0].facts["reason"])


def _facts(manifest: Manifest) -> Iterator[str]:
    """What a line of the list shows besides size and use."""
    for name, value in manifest.meta.items():
        if isinstance(value, int | float | str | list) and len(str(value)) < 20:
            yield f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value}"


def _bytes(text: str) -> float:
    """Bytes of `2GiB`, `500MB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(i?)B?|B)?", text.strip())
    if match is None:
        raise InvalidSetting(
            name="--size", value=text, reason="it is no size", expected="a size such as 2GiB"
        )
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.casefold()) if unit else 0
    scale: int = (1024 if binary else 1000) ** power
    return float(number) * scale


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
