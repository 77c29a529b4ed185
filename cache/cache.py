"""The cache: look up in every layer, publish to the writable ones, never stop the process.

A lookup gives an entry or a miss with its reason; a damaged file is moved to quarantine and is a
miss. A publish that fails is an event, and the entry is returned anyway: the process uses what is
in memory. Without a root and layers the cache is off, with the same interface.

Counters: `cache.hit`, `cache.hit.<layer>`, `cache.miss`, `cache.miss.<reason>`, `cache.bytes_read`,
`cache.bytes_written`, `cache.published`, `cache.publish_failed`, `cache.quarantined`,
`cache.evicted`, `cache.duplicate_work`, `cache.milliseconds_saved`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidEntry, LayerFailed
from ..events import Events
from .directory import DirectoryLayer, private_directory
from .evict import Limits, evict, remove_leftovers
from .keys.factors import Json
from .keys.key import Key
from .layers import CacheLayer, Entry, Miss, Refusal, accept_any, find, held
from .lease import Lease
from .lock import (
    TEMPORARY,
    Flight,
    create_owned,
    remove_owned,
    remove_unowned,
    single_flight,
)
from .manifest import BadManifest, BlobRef, Manifest, aside_meta, decode, encode, read_manifest
from .names import checked_name, entry_name, lock_name
from .remote import RemoteLayer
from .statistics import add_counts


class Cache:
    """Layers in order: the private directory at `root`, then the `shared` ones.

    Thread-safe, and safe with any number of processes on the same directory.
    """

    def __init__(
        self,
        root: Path | DirectoryLayer | None,
        events: Events,
        *,
        shared: Sequence[CacheLayer] = (),
        limits: Limits | None = None,
        off_reason: str = "",
        sign: Callable[[Manifest], str] | None = None,
    ) -> None:
        """Without `root`, only `shared`; a layer is a directory that was opened before.

        What is published has the signature that `sign` gives, in the private directory, too: what
        an epoch withdraws from servers is not signed again from there.

        Removes temporary files of dead processes. `off_reason` says why there are no layers, or
        none that can be written. Raises UntrustedDirectory or CacheNotWritable.
        """
        self.private = private_directory(root) if isinstance(root, Path) else root
        self.layers: tuple[CacheLayer, ...] = (
            (self.private, *shared) if self.private is not None else tuple(shared)
        )
        self._events = events
        self._off_reason = off_reason
        self._sign = sign
        self.absent = Miss("absent") if self.layers else Miss("disabled", off_reason)
        """What a lookup gives where nothing is found."""
        self._limits = limits or Limits()
        self._since_eviction = math.inf  # bytes published; the first publish checks the limits
        self._written_back: set[str] = set()
        self._aside: frozenset[str] = frozenset()  # digests of code not to load
        remove_unowned(Path(tempfile.gettempdir()), TEMPORARY)
        self._remove_leftovers()

    @property
    def enabled(self) -> bool:
        """False if there are no layers; the compiler's own caches are then off as well."""
        return bool(self.layers)

    @property
    def keeps_nothing(self) -> str:
        """Why nothing can be stored; empty where a layer can be written."""
        if any(layer.writable for layer in self.layers):
            return ""
        return self._off_reason or ("all layers are only read" if self.layers else "it is off")

    def lookup(
        self,
        kind: str,
        key: Key,
        *,
        others: Iterable[Key] = (),
        refusal: Refusal = accept_any,
        count: bool = True,
    ) -> Entry | Miss:
        """The entry of `kind` ("artifact", "bundle") for `key`, every byte verified, or a Miss.

        `others` are keys to try in turn if there is none. `refusal` says why an entry cannot be
        used, before its contents are read; the miss is then "refused". Only a counted lookup is an
        event and in the counters.

        Raises InvalidName for a bad kind, and LayerFailed for a layer whose failures raise.
        """
        began = time.perf_counter()
        result = self._find(kind, key, refusal)
        others = iter(others)
        while isinstance(result, Miss) and (other := next(others, None)) is not None:
            following = self._find(kind, other, refusal)
            if isinstance(following, Entry) or following.precedes(result):
                result = following
        seconds = time.perf_counter() - began
        if count and isinstance(result, Miss):
            self._count_miss(kind, key, result)
        elif count and isinstance(result, Entry):
            self._count_hit(result, seconds)
        return result

    def _find(self, kind: str, key: Key, refusal: Refusal) -> Entry | Miss:
        miss = self.absent
        for layer in self.layers:
            result = find(layer, kind, key.digest, refusal)
            if isinstance(result, Entry):
                if result.manifest.holds(self._aside):  # a layer that is only read still has it
                    result = Miss("aside", "its code was put out of service", layer.name)
                elif (aside := self._record_hit(layer, result)) is None:
                    return result
                else:
                    result = aside
            self._aside |= result.aside
            if result.reason == "unreadable" and layer.failures == "raise":
                raise LayerFailed(layer=layer.name, reason=result.detail)
            if result.damaged is not None and layer is self.private and self.private.writable:
                self._quarantine(self.private, result.damaged, result.detail)
            if miss.reason == "absent" or result.precedes(miss):
                miss = result
        return miss

    def _record_hit(self, layer: CacheLayer, entry: Entry) -> Miss | None:
        """Record the use of a private entry; copy a shared one to the private directory.

        A miss if a writable layer says that the entry was put aside.
        """
        if layer is self.private:
            self.private.used(entry.manifest)
            return self._write_back(entry)
        if self.private is not None and self.private.writable:
            self._store(self.private, entry)
        return None

    def _write_back(self, entry: Entry) -> Miss | None:
        """Store a private hit in the writable layers that lack it, checked once per entry."""
        if entry.digest in self._written_back:
            return None
        self._written_back.add(entry.digest)
        for layer in self.layers:
            if isinstance(layer, RemoteLayer) and layer.writable:
                there = held(layer, entry.manifest)
                if entry.manifest.holds(there.aside):
                    reason = there.detail if isinstance(there, Miss) else "replaced elsewhere"
                    self.put_aside([entry.manifest], there.aside, reason)
                    return Miss("aside", reason, layer.name, aside=there.aside)
                if not layer.is_whole(there):
                    self._store(layer, entry)
        return None

    def put_aside(self, entries: Iterable[Manifest], code: Collection[str], reason: str) -> None:
        """Put entries out of service in every writable layer; a file is moved to quarantine.

        A mark takes their place: where it is read, no entry with a blob of the digests in `code` is
        loaded, also from a layer that cannot be written.
        """
        for manifest in entries:
            for layer in self.layers:
                there = held(layer, manifest) if layer.writable else None
                if isinstance(there, Manifest) and there.holds(code):
                    if isinstance(layer, DirectoryLayer):
                        name = entry_name(manifest.kind, manifest.key.digest)
                        self._quarantine(layer, name, reason, intact=True)
                    self._store(layer, Entry(manifest.put_aside(code, reason), {}, "aside"))

    def stored(self, kind: str) -> list[Manifest]:
        """The entries of one kind in the private directory, if it can be written."""
        found = []
        if self.private is not None and self.private.writable:
            for name in self.private.entries(kind):
                with contextlib.suppress(OSError, BadManifest):
                    found.append(read_manifest(self.private.root / name))
        return found

    def _quarantine(
        self, private: DirectoryLayer, name: str, reason: str, *, intact: bool = False
    ) -> None:
        try:
            moved = private.quarantine(name, reason, intact=intact)
        except OSError as error:
            reason = f"{reason}; it cannot be moved: {error}"
        else:
            if not moved:
                return
            self._events.count("cache.quarantined")
            self._remove_leftovers()
        self._events.emit("cache.quarantine", level=logging.WARNING, file=name, reason=reason)

    def publish(
        self,
        kind: str,
        key: Key,
        meta: Mapping[str, Json],
        blobs: Mapping[str, bytes | Path],
    ) -> Entry:
        """Store an entry in every writable layer and return it, even if storing failed.

        `meta` is plain data; `compile_seconds` in it, if given, is the time that a hit saves.
        `Entry.unstored` says why a layer, or all, did not store it.
        Raises InvalidName for a bad name, InvalidEntry if meta is not plain data or too large, and
        OSError if a blob given as a path cannot be read.
        """
        contents = {
            checked_name(name, "blob"): blob if isinstance(blob, bytes) else blob.read_bytes()
            for name, blob in sorted(blobs.items())
        }
        refs = {name: BlobRef.of(content) for name, content in contents.items()}
        if aside := self._aside - {ref.sha256 for ref in refs.values()}:
            meta = {**meta, **aside_meta(aside, "replaced")}
        checked_name(kind, "kind of entry")
        try:
            manifest, _ = decode(encode(Manifest(kind, key, meta, refs)))  # as a reader decodes it
        except (BadManifest, TypeError, ValueError) as error:
            raise InvalidEntry(entry=_label(kind, key), reason=error) from error
        entry = Entry(manifest, contents, "published", self._sign and self._sign(manifest))
        return replace(entry, unstored=self.store(entry))

    def store(self, entry: Entry) -> tuple[str, ...]:
        """Store an existing entry, such as an imported one, in every writable layer.

        Returns why layers could not store it, or why there is none.
        """
        self._written_back.add(entry.digest)
        self._aside -= {ref.sha256 for ref in entry.manifest.blobs.values()}
        if reason := self.keeps_nothing:
            return (reason,)
        reasons = [self._store(layer, entry) for layer in self.layers if layer.writable]
        return tuple(filter(None, reasons))

    def _store(self, layer: CacheLayer, entry: Entry) -> str | None:
        """Store an entry in one layer; returns why that failed."""
        label = _label(entry.manifest.kind, entry.key)
        try:
            layer.store(entry)
        except OSError as error:
            self._events.count("cache.publish_failed")
            self._events.emit(
                "cache.publish_failed",
                level=logging.WARNING,
                entry=label,
                layer=layer.name,
                reason=str(error),
            )
            if layer.failures == "raise":
                raise LayerFailed(layer=layer.name, reason=str(error)) from error
            return str(error)
        self._events.count("cache.published")
        self._events.count("cache.bytes_written", entry.size)
        self._add_counts({"bytes_written": entry.size})
        self._events.emit("cache.publish", entry=label, layer=layer.name, bytes=entry.size)
        if layer is self.private:
            self._since_eviction += entry.size
            if self._since_eviction > self._limits.size / 16:  # it costs more than a publish
                self.evict()
        return None

    def evict(self) -> None:
        """Apply the limits to the private directory now."""
        self._since_eviction = 0
        if self.private is not None and self.private.writable:
            evict(self.private.root, self._limits, self._events)

    def _remove_leftovers(self) -> None:
        if self.private is not None and self.private.writable:
            with contextlib.suppress(OSError):
                remove_leftovers(self.private.root, self._limits)

    def path(self, entry: Entry, name: str) -> Path:
        """A file with the verified bytes of a blob, for loaders that need a path.

        It is in the private directory or, if the entry could not be stored, in a temporary one
        that is removed with this cache. KeyError if there is no such blob.
        """
        ref, content = entry.manifest.blobs[name], entry.contents[name]
        if self.private is not None and (stored := self.private.file(ref, content)):
            return stored
        directory, lock = create_owned(Path(tempfile.gettempdir()), TEMPORARY)
        weakref.finalize(self, remove_owned, directory, lock)
        (directory / name).write_bytes(content)
        return directory / name

    @contextlib.contextmanager
    def single_flight(
        self,
        kind: str,
        key: Key,
        *,
        wait_limit: float = 900.0,
        progress_every: float = 5.0,
        waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[Flight]:
        """Let one process make the entry while others wait; after AFTER_OTHERS look up again.

        One on this machine, and one of all machines that write to a shared layer. UNLOCKED after
        `wait_limit` seconds, without a private directory, and where locks fail. Calls `waiting`
        every `progress_every` seconds of a wait; what it raises ends the wait.
        """
        if self.private is None:
            yield Flight.UNLOCKED
            return
        began, label = time.monotonic(), _label(kind, key)
        name, lock = entry_name(kind, key.digest), lock_name(kind, key.digest)
        root, shared = self.private.root, [layer for layer in self.layers if layer.writable]

        def wait(**facts: Any) -> None:
            self._events.emit("cache.wait", level=logging.INFO, entry=label, **facts)
            waiting()

        with (
            single_flight(
                root / lock, label, self._events, wait_limit, progress_every, wait
            ) as flight,
            contextlib.ExitStack() as stack,
        ):
            is_there = os.path.exists(root / name)  # they may have just finished
            layer = next((each for each in shared if isinstance(each, RemoteLayer)), None)
            is_done = is_there and flight is Flight.AFTER_OTHERS
            if layer is not None and flight is not Flight.UNLOCKED and not is_done:
                lease = Lease(layer, lock, name, label, self._events, wait)
                left = wait_limit - (time.monotonic() - began)
                flight = stack.enter_context(lease.flight(left, progress_every))
            yield Flight.AFTER_OTHERS if is_there and flight is Flight.FIRST else flight

    def _count_hit(self, entry: Entry, seconds: float) -> None:
        kind = entry.manifest.kind
        counts = {f"{kind}.hit": 1, "bytes_read": entry.size}
        saved = entry.meta.get("compile_seconds")
        if isinstance(saved, int | float) and saved > seconds:
            counts["milliseconds_saved"] = round((saved - seconds) * 1000)
            self._events.count("cache.milliseconds_saved", counts["milliseconds_saved"])
        self._events.count("cache.hit")
        self._events.count(f"cache.hit.{entry.layer}")
        self._events.count("cache.bytes_read", entry.size)
        self._events.emit(
            "cache.hit",
            entry=_label(kind, entry.key),
            layer=entry.layer,
            bytes=entry.size,
            seconds=seconds,
        )
        self._add_counts(counts)

    def _count_miss(self, kind: str, key: Key, miss: Miss) -> None:
        self._events.count("cache.miss")
        self._events.count(f"cache.miss.{miss.reason}")
        level = logging.DEBUG if miss.reason in ("absent", "disabled") else logging.WARNING
        self._events.emit(
            "cache.miss",
            level=level,
            entry=_label(kind, key),
            reason=miss.reason,
            detail=miss.detail,
            layer=miss.layer,
        )
        self._add_counts({f"{kind}.miss.{miss.reason}": 1})

    def _add_counts(self, counts: Mapping[str, int]) -> None:
        """To those of all starts."""
        if self.private is not None and self.private.writable:
            add_counts(self.private.root, counts)


def _label(kind: str, key: Key) -> str:
    """The name of an entry in events."""
    return f"{kind}/{key.digest[:12]}"
