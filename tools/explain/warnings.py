"""What to do about each event at WARNING and above: `tests/tools/test_advice.py` finds all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEY = "Run `piecegraph cache why` with the options of this start."
CHECK_DISK = "Check that the directory can be written and its disk has room: `piecegraph doctor`."
LOG = "The log has its facts."
HARMLESS = "Nothing, unless it repeats: the library goes on without it."
BISECT = "Run `piecegraph bisect` with these options; it names the operator and what differs."

RULES: Mapping[str, tuple[str, str]] = {
    "after_seal": (
        "{kind} after seal(): {detail}, in {shape}, at {stack[0]}",
        "Run it once before `seal()`, for example as a task of `warm_up`.",
    ),
    "artifact.refused": ("code of piece {piece} was compiled again: {reason}", KEY),
    "backend.fallback": (
        "a graph at {where} runs by torch's own backend: {reason}",
        "Correct what is named; options={{'strict': True}} raises the error.",
    ),
    "background.failed": (
        "the model is served uncompiled: {reason}",
        "Correct the cause; without bundle=serve the same start raises the error.",
    ),
    "background.impossible": (
        "the model was compiled before it served, not beside it: {reason}",
        "Compile it ahead, with `piecegraph.compile_ahead` or `piecegraph cache warm`.",
    ),
    "bucket.fallback": (
        "no bucket fits {shape}: it was padded to {padded}",
        "Plan buckets for it: {missing}.",
    ),
    "bundle": ("the bundle was refused: {reason}", KEY),
    "bundle.failed": ("code of bundle {digest} raised: {reason}", BISECT),
    "bundle.not_kept": (
        "no start of this model can be warm: it relies on {reason}",
        "Let the model read plain values there; see Conditions in docs/cache.md.",
    ),
    "bundle.not_verified": (
        "it is not known whether the bundle is that of this model: {reason}",
        "Run `piecegraph cache verify --trace` where the image is built.",
    ),
    "bundle.stale": (
        "the bundle was made from another program: {difference}",
        "Restart: the next start compiles. Say in an issue what had changed.",
    ),
    "cache.evict_failed": ("old entries could not be removed: {reason}", CHECK_DISK),
    "cache.flight": ("{entry} was perhaps compiled twice: {alone}", HARMLESS),
    "cache.miss": ("{entry} in {layer} is not usable: {reason} {detail}", KEY),
    "cache.publish_failed": ("{entry} could not be stored in {layer}: {reason}", CHECK_DISK),
    "cache.quarantine": (
        "file {file} of the cache was put aside: {reason}",
        "Check the disk; `piecegraph cache verify` reads every byte.",
    ),
    "cache.read_only": ("nothing is stored in the cache: {reason}", CHECK_DISK),
    "cache.unusable": ("there is no cache: {reason}", CHECK_DISK),
    "capture.failed": (
        "entry {graph_index} could not be captured: {reason}",
        "Its batches run in a lower mode; drop the size or correct the op that is named.",
    ),
    "capture.host_values": (
        "{recording} holds the values of {tensors}, which are on the host",
        "Move them to the device; a step after a change raises HostValueChanged.",
    ),
    "capture.unwatched": (
        "{recording} reads {tensors}, whose addresses no step checks",
        "Name them with `prepared.watch(name, tensor)`, or put them into `layers`.",
    ),
    "capture.waits": (
        "graphs are not captured between steps while settings of the process are others: {changed}",
        "Set them back, as after a load of another model, or call capture() under those of now.",
    ),
    "compile.library_failed": (
        "the next start loads code with Inductor: {reason}",
        "Unbacked sizes have no libraries; else look for g++ with `piecegraph doctor`.",
    ),
    "compile.tampered": (
        "edited code in {directory} is in service",
        "Unset codegen.dump_dir to run what the compiler generates.",
    ),
    "copies_failed": ("equal layers of {module} were traced one by one: {reason}", HARMLESS),
    "effect_dropped": (
        "the model sets {changed} at {where}: a step does not repeat it",
        "Return the value, or write it into a tensor in place.",
    ),
    "guard.dropped": (
        "guard {expression} is not proved and nothing checks it",
        "Use tracing.guards='check', make the model independent of it, or narrow the range.",
    ),
    "memory.uncertain": (
        "graphs may take {margin} bytes more than the forecast of {bytes}",
        "Capture a second time with steps.memory_limit set, or fewer sizes.",
    ),
    "memory.unknown_step": (
        "no room was left for the largest step without a graph: {reason}",
        "Pass `metadata_for` to `capture`, so that a dummy batch can run.",
    ),
    "opaque_op": (
        "pieces call {op} {calls} times a step, Python at {where}: nothing is fused with it",
        "Lower it by a pass in codegen.passes, or let the model call what it is made of.",
    ),
    "proof.not_kept": ("{model} is proved again at each start: {reason}", HARMLESS),
    "rows_mixed": (
        "padding would change real rows or state: {result} at {where}, by {size}",
        "Let each row depend on its own request alone. Until then such sizes run unpadded.",
    ),
    "shadow.stopped": ("no further step is proved: {reason} {detail}", BISECT),
    "shadow.wrong": (
        "a {mode} step of {num_tokens} tokens was wrong: {out_of_service} left service. {changed}",
        "Run `piecegraph bisect --replay {file}`.",
    ),
    "warmup.skipped": ("warm-up of {kind} was left out: {cost}", "Leave out skip={kind!r}."),
    "weights.first": (
        "the model was compiled after its weights were loaded, not beside that: {reason}",
        "Correct what no cache can keep, or load the weights before `prepare`.",
    ),
    "worker.lost": ("a compiling process ended: {reason}", "Look for the out-of-memory killer."),
    "worker.silent": ("process {worker} says nothing while {phase}", HARMLESS),
}
"""What happened and what to do about it, by event, of the facts of the event."""


def advice_of(warnings: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """`(what, todo)` of each different warning of `Events.warnings`, with how often it occurred.

    Remarks, which state both themselves, are left out.
    """
    for row in warnings:
        if "todo" in row["newest"][0]:
            continue
        what, todo = RULES.get(row["event"], (row["event"], LOG))
        texts = dict.fromkeys((what.format(**f).strip(), todo.format(**f)) for f in row["newest"])
        times = f", {row['count']} times" if row["count"] > len(texts) else ""
        yield from ((what + times, todo) for what, todo in texts)
