"""`piecegraph cache …`: look into the cache, check it, explain a miss, ship it."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cache.keys.environment import OFF, read
from ...errors import CacheNotWritable, InvalidSetting
from ..report.output import output_of, outputs
from ..report.sections import size as shown_size
from ..serve.options import RunOptions
from .cache_entries import cache_directory, described, lines, manifests, named, of_kind, parsed
from .run_commands import JsonOption, say, stderr, with_run_options

if TYPE_CHECKING:
    from torch.nn import Module

    from ... import Config
    from ...cache.manifest import Manifest

MISS = DIFFERENT = 1
UNVERIFIABLE = 4

cache_app = typer.Typer(
    help="Look into the cache, check it, explain a miss, ship it.", no_args_is_help=True
)

DirOption = Annotated[Path | None, typer.Option("--cache-dir", help="Where artifacts are kept.")]
TARGET = "MODULE:FUNCTION"
OfOption = Annotated[
    str | None,
    typer.Option(
        "--of",
        metavar=TARGET,
        help="A model of your own: what returns (model, Config). MODULE may be a file.",
    ),
]


@cache_app.command("list")
def list_command(cache_dir: DirOption = None, json_path: JsonOption = None) -> int:
    """List the entries, the one used last first."""
    root = cache_directory(cache_dir)
    if not root.is_dir():
        print(f"error: there is no directory {root}", file=sys.stderr)
        return UNVERIFIABLE
    found = sorted(manifests(root), key=lambda each: -each[1])
    facts = [described(manifest, used) for manifest, used in found]
    _say(json_path, facts, "\n".join([f"{len(facts)} entries in {root}", *lines(facts)]))
    return 0


@cache_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="First digits of a key, or kind/digits.")],
    cache_dir: DirOption = None,
    json_path: JsonOption = None,
) -> int:
    """Show an entry as JSON: what it was made from, and its blobs."""
    (manifest,) = named(cache_directory(cache_dir), [name])
    facts = {**parsed(manifest), "digest": manifest.digest}
    _say(json_path, facts, json.dumps(facts, indent=2))
    return 0


@cache_app.command("diff")
def diff_command(
    old: Annotated[str, typer.Argument(help="First digits of a key, or kind/digits.")],
    new: Annotated[str, typer.Argument(help="Of another entry.")],
    cache_dir: DirOption = None,
    json_path: JsonOption = None,
) -> int:
    """Show what two entries differ in: key factors, conditions, blobs. Status 1 if they do."""
    from ...cache.keys.key import diff

    before, after = (
        {name: facts[name] for name in ("factors", "meta", "blobs")}
        for facts in map(parsed, named(cache_directory(cache_dir), [old, new]))
    )
    differences = diff(before, after)
    facts = [{"name": d.name, "old": d.old, "new": d.new} for d in differences]
    _say(json_path, facts, "\n".join(map(str, differences)) or "they are equal")
    return DIFFERENT if differences else 0


@cache_app.command("stats")
def stats_command(cache_dir: DirOption = None, json_path: JsonOption = None) -> int:
    """Show hits, misses by reason, seconds saved and bytes, of all starts."""
    from ...cache.names import blob_names
    from ...cache.statistics import read_counts

    root, counts = cache_directory(cache_dir), read_counts(cache_directory(cache_dir))
    kinds = sorted({name.partition(".")[0] for name in counts if "." in name})
    facts: dict[str, Any] = {
        "directory": str(root),
        "entries": len(manifests(root)),
        "bytes": sum((root / name).stat().st_size for name in blob_names(root)),
        "bytes_read": counts["bytes_read"],
        "bytes_written": counts["bytes_written"],
        "seconds_saved": counts["milliseconds_saved"] / 1000,
        "lookups": {kind: of_kind(counts, kind) for kind in kinds},
    }
    text = [
        f"{facts['entries']} entries, {shown_size(facts['bytes'])}, in {root}",
        f"seconds of compiling saved: {facts['seconds_saved']:.1f}",
        f"read {shown_size(facts['bytes_read'])}, written {shown_size(facts['bytes_written'])}",
    ]
    for kind, of in facts["lookups"].items():
        text.append(f"{kind}: {of['hits']} hits of {of['hits'] + of['misses']}")
        text += [f"  {reason}: {count}" for reason, count in of["by_reason"].items()]
    _say(json_path, facts, "\n".join(text))
    return 0


@cache_app.command("verify")
def verify_command(
    trace: Annotated[
        str | None, typer.Option(metavar=TARGET, help="Trace what it returns: (model, Config).")
    ] = None,
    cache_dir: DirOption = None,
    json_path: JsonOption = None,
) -> int:
    """Check every byte. Status: 1 corrupt + 2 untrusted + 4 unverifiable, 0 if clean.

    With --trace: compare the bundle of one model with a new trace; status 2 if it is another's.
    """
    from ..cache_verify import exit_status, verify

    if trace is not None:
        return _verify_model(trace, cache_dir, json_path)
    root = cache_directory(cache_dir)
    findings, readable = verify(root), len(manifests(root))
    facts = [{"status": f.status.name, "name": f.name, "reason": f.reason} for f in findings]
    text = [f"{f.status.name}: {f.name}: {f.reason}" for f in findings]
    text.append(f"{readable} readable entries, {len(findings)} findings in {root}")
    _say(json_path, {"readable": readable, "findings": facts}, "\n".join(text))
    return exit_status(findings)


def _verify_model(target: str, cache_dir: Path | None, json_path: Path | None) -> int:
    from ... import prepare

    model, config = model_of(target, cache_dir)
    prepared = prepare(model, config.changed(bundle="force", **{"cache.verify_bundle": "before"}))
    verified = prepared.report()["cache"]["verified"]
    prepared.close()
    name = type(model).__qualname__
    _say(
        json_path, {"verified": verified}, f"the bundle of {name} is that of the model: {verified}"
    )
    return 0 if verified is True else UNVERIFIABLE


def model_of(target: str, cache_dir: Path | None) -> tuple[Module, Config]:
    """The model and settings that a function of the user returns. Raises InvalidSetting."""
    from torch.nn import Module

    from ... import Config

    module, _, function = target.partition(":")
    file = Path(module)
    try:
        sys.path.insert(0, str(Path.cwd() / file.parent))
        model, config = getattr(importlib.import_module(file.name.removesuffix(".py")), function)()
        if not (isinstance(model, Module) and isinstance(config, Config)):
            returned = f"{type(model).__name__} and {type(config).__name__}"
            raise TypeError(f"it returned {returned}")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        expected = "module:function, a function that returns (model, Config)"
        raise InvalidSetting(name=TARGET, value=target, reason=reason, expected=expected) from error
    return model, config if cache_dir is None else config.changed(cache_dir=cache_dir)


@cache_app.command("why")
@with_run_options
def why_command(
    options: RunOptions,
    of: OfOption = None,
    json_path: JsonOption = None,
) -> int:
    """Say whether `piecegraph run` with these options would hit, and if not, why; status 1."""
    from ... import explain_miss
    from ..serve.run import build_model, find_device, library_config

    if of is not None:
        model, config = model_of(of, options.cache_dir)
    else:
        model = build_model(options, find_device(options.device))
        config = library_config(options, model)
    answer = explain_miss(model, config)
    _say(json_path, answer.as_json(), str(answer))
    return MISS if answer.reason else 0


@cache_app.command("prune")
def prune_command(
    size: Annotated[str, typer.Option(help="Keep at most this much, such as 2GiB.")] = "10GiB",
    days: Annotated[float, typer.Option(min=0, help="Keep what was used since.")] = math.inf,
    cache_dir: DirOption = None,
    json_path: JsonOption = None,
) -> int:
    """Remove what was used least recently, beyond a size or an age."""
    from ... import Events
    from ...cache.evict import Limits, evict

    root = cache_directory(cache_dir)
    done = evict(root, Limits(size=_bytes(size), age=days * 86400, grace=0), Events())
    _refuse_failed(root, done.failure)
    left = len(manifests(root))
    text = f"removed {done.entries} entries, {shown_size(done.bytes)}; {left} are left"
    _say(json_path, {"removed": done.entries, "bytes": done.bytes, "left": left}, text)
    return 0


@cache_app.command("export")
def export_command(
    path: Annotated[Path, typer.Argument(help="A name in .tar, or a directory to create.")],
    names: Annotated[
        list[str] | None, typer.Argument(help="Entries to export; all bundles by default.")
    ] = None,
    cache_dir: DirOption = None,
    json_path: JsonOption = None,
) -> int:
    """Write bundles as an OCI image: to copy, to push, to mount. Signed if a key is set."""
    from ...cache.directory import DirectoryLayer
    from ...cache.signing import signing_key
    from ..cache_image import export_image

    root, signer = cache_directory(cache_dir), signing_key()
    output = output_of("PATH", path)
    chosen = _entries_to_ship(root, names)
    with output.writing():
        image = export_image(chosen, DirectoryLayer(root, name=str(root)), path, signer)
    signed = f"signed with key {signer.public.id}" if signer else "not signed here"
    facts = [described(manifest) for manifest in chosen]
    text = [f"{len(facts)} entries, {signed}: {path}", f"image {image}", *lines(facts)]
    _say(json_path, facts, "\n".join(text))
    return 0


def _entries_to_ship(root: Path, names: Sequence[str] | None) -> list[Manifest]:
    """The named entries, by default all bundles; raises InvalidSetting if there are none."""
    chosen = named(root, names or ()) or [
        each for each, _ in manifests(root) if each.kind == "bundle" and not each.aside_reason
    ]
    if not chosen:
        reason = "it holds no bundle"
        expected = "a cache that `piecegraph cache warm` or a run has filled"
        raise InvalidSetting(name="--cache-dir", value=str(root), reason=reason, expected=expected)
    return chosen


@cache_app.command("import")
def import_command(
    path: Annotated[Path, typer.Argument(help="What `export` wrote, or a copy of it.")],
    pin: Annotated[
        list[str] | None, typer.Option(help="Import just the entry with this digest. Repeatable.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Believe whatever is in it.")] = False,
    cache_dir: DirOption = None,
    json_path: JsonOption = None,
) -> int:
    """Read entries from an image: those signed with a trusted key, or named by --pin."""
    from ... import Events
    from ...cache import Cache
    from ...cache.signing import signing_key, trust_all, trusted_keys
    from ..cache_import import import_image

    if pin or trust:
        believed: Any = trust_all  # a digest covers an entry with all of its contents
    elif keys := trusted_keys(signing_key()):
        believed = keys.refuses
    else:
        reason = "there is no key to check a signature with"
        expected = "--pin DIGEST, --trust, or keys in PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE"
        raise InvalidSetting(name="PATH", value=str(path), reason=reason, expected=expected)
    entries = import_image(path, believed, only=pin or ())
    root = cache_directory(cache_dir)
    cache, stored = Cache(root, Events()), []
    for entry in entries:
        _refuse_failed(root, *cache.store(entry))
        stored.append(entry.manifest)
    facts = [described(manifest) for manifest in stored]
    _say(json_path, facts, "\n".join(lines(facts)))
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
    json_path: JsonOption = None,
) -> int:
    """Make the key that a builder signs with, and the line that servers trust it by."""
    from ...cache.signing import SigningKey, read_signing_key, write_keys

    if next_epoch:
        key = read_signing_key(path).next_epoch()
    elif path.exists():
        expected = "a new file, or --next-epoch to keep its key"
        raise InvalidSetting(name="PATH", value=str(path), reason="it exists", expected=expected)
    else:
        key = SigningKey.new(name=name, expires=expires.date() if expires else None)
    write_keys(key, path)
    public = key.public
    text = f"key {public.id}, epoch {public.epoch}: {path} signs; give servers {path}.pub:"
    facts = {"key": public.id, "epoch": public.epoch, "line": public.line()}
    _say(json_path, facts, f"{text}\n{public.line()}")
    return 0


@cache_app.command("warm")
@with_run_options
def warm_command(
    options: RunOptions,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; on cuda each has its device.")] = 1,
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Build libraries too, which load in milliseconds.")
    ] = False,
    json_path: JsonOption = None,
) -> int:
    """Build the bundle of a model without serving, for every rank."""
    from ... import Events, prepare
    from ...runtime.compile_ahead import build_libraries
    from ..serve.progress import starting
    from ..serve.run import build_model, find_device, library_config

    root, facts = cache_directory(options.cache_dir), list[dict[str, Any]]()
    for rank in range(ranks):
        name = f"cuda:{rank}" if options.device == "cuda" else options.device
        began, events = time.perf_counter(), Events()
        model = build_model(options, find_device(name))
        config = library_config(options, model)
        _refuse_unkept(options, config)
        with starting(stderr(), events):
            prepared = prepare(model, config, events=events)
            bundle = "was there" if prepared.compiled.from_bundle else "built"
            prepared.close()
            _refuse_failed(root, *prepared.records.compile.failed_writes)
            if ahead:
                libraries = build_libraries(model, config, prepared.records)
                bundle += ", with libraries" if libraries else ", no library possible"
                _refuse_failed(root, *prepared.records.compile.failed_writes)
        seconds = time.perf_counter() - began
        facts.append({"rank": rank, "device": name, "bundle": bundle, "seconds": seconds})
    text = (
        f"rank {f['rank']} on {f['device']}: {f['bundle']}, {f['seconds']:.1f} s" for f in facts
    )
    _say(json_path, facts, "\n".join(text))
    return 0


def _refuse_unkept(options: RunOptions, config: Config) -> None:
    """Raise InvalidSetting, naming the option, for a start that would store nothing."""
    from ...runtime.setup.switches import resolve_config

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
            expected = "options with which there is something to store"
            raise InvalidSetting(name=name, value=value, reason=reason, expected=expected)


def _refuse_failed(root: Path, *failures: str | None) -> None:
    """Raise CacheNotWritable for failed writes, which the library only records."""
    for reason in filter(None, failures):
        raise CacheNotWritable(path=root, reason=reason)


def _say(json_path: Path | None, facts: Any, text: str) -> None:
    (to_json,) = outputs({"--json": json_path}, stdout=("--json",))
    say(to_json, facts, text)


def _bytes(text: str) -> int:
    """Bytes of `2GiB`, `500MB` or a plain number."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as error:
        raise InvalidSetting(
            name="--size", value=text, reason="it is no size", expected="a size such as 2GiB"
        ) from error
