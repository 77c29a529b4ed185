"""`piecegraph cache …`: look into the cache, check it, explain a miss, ship it."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidSetting, NoSuchEntry
from .options import RunOptions, writable
from .run_arguments import with_run_options
from .tables import size as shown_size

if TYPE_CHECKING:
    from ..cache.manifest import Manifest

MISS = 1

cache_app = typer.Typer(
    help="Look into the cache, check it, explain a miss, ship it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DirOption = Annotated[Path | None, typer.Option("--cache-dir", help="Where artifacts are kept.")]


@cache_app.command("list")
def list_command(cache_dir: DirOption = None) -> int:
    """List the entries, the one used last first."""
    from rich.console import Console

    from .tables import table

    rows = [
        (
            f"{manifest.kind}/{manifest.key.digest[:12]}",
            shown_size(sum(blob.size for blob in manifest.blobs.values())),
            len(manifest.blobs),
            _ago(used),
            " ".join(f"{k}={_short(v)}" for k, v in manifest.meta.items() if _is_short(v)),
        )
        for manifest, used in sorted(_manifests(_root(cache_dir)), key=lambda found: -found[1])
    ]
    columns = ("entry", "size", "blobs", "used", "facts")
    Console().print(table(f"Entries: {len(rows)}", columns, rows))
    return 0


@cache_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="First digits of a key, or kind/digits.")],
    cache_dir: DirOption = None,
) -> int:
    """Show an entry as JSON: what it was made from, and its blobs."""
    manifest = _named(_root(cache_dir), name)
    facts: dict[str, Any] = json.loads(manifest.line())
    print(json.dumps({**facts, "digest": manifest.digest}, indent=2))
    return 0


@cache_app.command("verify")
def verify_command(cache_dir: DirOption = None) -> int:
    """Check every byte. Status: 1 corrupt + 2 untrusted + 4 unverifiable, 0 if clean."""
    from ..cache.verify import exit_status, verify

    root = _root(cache_dir)
    findings = verify(root)
    for finding in findings:
        print(f"{finding.status.name}: {finding.name}: {finding.reason}")
    print(f"{len(list(_manifests(root)))} readable entries, {len(findings)} findings in {root}")
    return exit_status(findings)


@cache_app.command("why")
@with_run_options
def why_command(options: RunOptions) -> int:
    """Say whether `piecegraph run` with these options would hit, and if not, why; status 1."""
    from .. import why
    from .run import build_model, find_device, library_config

    answer = why(build_model(options).to(find_device(options.device)), library_config(options))
    print(answer)
    return MISS if answer.reason else 0


@cache_app.command("prune")
def prune_command(
    size: Annotated[str, typer.Option(help="Keep at most this much, such as 2GiB.")] = "10GiB",
    days: Annotated[float, typer.Option(min=0, help="Keep what was used since.")] = math.inf,
    cache_dir: DirOption = None,
) -> int:
    """Remove what was used least recently, beyond a size or an age."""
    from .. import Events
    from ..cache.evict import Limits, evict

    root, events = _root(cache_dir), Events()
    evict(root, Limits(size=_bytes(size), age=days * 86400, grace=0), events)
    facts = events.named("cache.evict")
    removed, freed = (facts[0].facts["entries"], facts[0].facts["bytes"]) if facts else (0, 0)
    print(f"removed {removed} entries, {shown_size(freed)}; {len(list(_manifests(root)))} are left")
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
    from ..cache import Entry
    from ..cache.bundle_file import export_entries
    from ..cache.entries import find
    from ..cache.layers import SharedDirectory
    from ..cache.signing import anybody, secret_from_environment

    root = _root(cache_dir)
    writable("PATH", path)
    chosen = [_named(root, name) for name in names or ()] or [
        manifest for manifest, _ in _manifests(root) if manifest.kind == "bundle"
    ]
    place = SharedDirectory(root, anybody)
    found = [find(place, manifest.kind, manifest.key.digest) for manifest in chosen]
    entries = [entry for entry in found if isinstance(entry, Entry)]
    export_entries(entries, path, secret_from_environment())
    signed = "signed" if secret_from_environment() else "not signed"
    print(f"{len(entries)} entries, {shown_size(path.stat().st_size)}, {signed}: {path}")
    for entry in entries:
        print(f"  {entry.manifest.kind}/{entry.key.digest[:12]} digest {entry.digest}")
    return 0


@cache_app.command("import")
def import_command(
    path: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    pin: Annotated[
        list[str] | None, typer.Option(help="Believe just entries with this digest. Repeatable.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Believe whatever is in it.")] = False,
    cache_dir: DirOption = None,
) -> int:
    """Read entries from a file. Believed is what is signed with the key in the environment."""
    from .. import Events
    from ..cache import Cache
    from ..cache.bundle_file import import_entries
    from ..cache.signing import anybody, pinned, secret_from_environment, signed_with

    secret = secret_from_environment()
    if pin:
        believed: Any = pinned(pin)
    elif trust:
        believed = anybody
    elif secret is not None:
        believed = signed_with(secret)
    else:
        raise InvalidSetting(
            name="--pin",
            value="nothing",
            reason="there is no key in the environment to check a signature with",
            expected="digests to pin, a key in PIECEGRAPH_CACHE_SIGNING_KEY_FILE, or --trust",
        )
    entries = import_entries(path, believed)
    cache = Cache(_root(cache_dir), Events())
    for entry in entries:
        cache.store(entry)
        print(f"{entry.manifest.kind}/{entry.key.digest[:12]}: {shown_size(entry.size)}")
    return 0


@cache_app.command("warm")
@with_run_options
def warm_command(
    options: RunOptions,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; on cuda each has its device.")] = 1,
) -> int:
    """Build the bundle of a model without serving, for every rank."""
    from .. import prepare
    from .run import build_model, find_device, library_config

    for rank in range(ranks):
        name = f"cuda:{rank}" if options.device == "cuda" else options.device
        began = time.perf_counter()
        prepared = prepare(build_model(options).to(find_device(name)), library_config(options))
        found = "was there" if prepared.compiled.from_bundle else "built"
        seconds = time.perf_counter() - began
        prepared.close()
        print(f"rank {rank} on {name}: {found}, {seconds:.1f} s", flush=True)
    return 0


def _root(cache_dir: Path | None) -> Path:
    """The cache's directory; raises InvalidSetting if there is none."""
    from .. import Config, cache_root

    root = cache_root(Config(cache_dir=cache_dir))
    assert root is not None
    return root


def _manifests(root: Path) -> list[tuple[Manifest, float]]:
    """Every manifest that can be read, and when it was last used (seconds since the epoch)."""
    from ..cache.listing import manifests

    def told(name: str, error: Exception) -> None:
        print(f"unreadable: {name}: {error}", file=sys.stderr)

    return list(manifests(root, unreadable=told))


def _named(root: Path, name: str) -> Manifest:
    """The one entry called `name`; raises NoSuchEntry if there is none or more than one."""
    kind, _, digits = name.rpartition("/")
    found = [
        manifest
        for manifest, _ in _manifests(root)
        if manifest.key.digest.startswith(digits) and kind in ("", manifest.kind)
    ]
    if len(found) != 1:
        raise NoSuchEntry(path=root, name=name)
    return found[0]


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


def _is_short(value: Any) -> bool:
    return isinstance(value, int | float | str | list) and len(str(value)) < 20


def _short(value: Any) -> Any:
    return f"{value:.1f}" if isinstance(value, float) else value
