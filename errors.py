"""The error catalogue: every error piecegraph raises for a user's reason, in one tree.

PiecegraphError
├── ConfigError          a setting is wrong
├── CompileError         the model cannot be traced, split or compiled as asked
├── CacheError           the cache cannot be used as asked
├── DispatchError        sizes, modes or batches that contradict each other
└── RunError             a step, a capture or a replay cannot go on

A class states *what* happened and what *to do* as templates; the place that raises it fills in the
facts, and `where` is the file:line of the user's code when there is one. Free text is never raised.
"""

from __future__ import annotations

import string
from typing import Any, ClassVar


class PiecegraphError(Exception):
    """Base of the tree. `facts` holds the values the templates were filled with."""

    what: ClassVar[str] = ""
    todo: ClassVar[str] = ""

    def __init__(self, *, where: str | None = None, **facts: Any) -> None:
        self.where = where
        self.facts = facts
        super().__init__(self._render())

    def _render(self) -> str:
        place = f" (at {self.where})" if self.where else ""
        advice = f" {self.todo.format(**self.facts)}" if self.todo else ""
        return f"{self.what.format(**self.facts)}{place}.{advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.where, self.facts)

    @classmethod
    def fields(cls) -> frozenset[str]:
        """Names of the facts that the templates need."""
        templates = string.Formatter().parse(cls.what + cls.todo)
        return frozenset(name.split(".")[0].split("[")[0] for _, name, _, _ in templates if name)


def _rebuild(
    cls: type[PiecegraphError], where: str | None, facts: dict[str, Any]
) -> PiecegraphError:
    return cls(where=where, **facts)


class ConfigError(PiecegraphError):
    """A setting is wrong."""


class CompileError(PiecegraphError):
    """The model cannot be traced, split or compiled as asked."""


class CacheError(PiecegraphError):
    """The cache cannot be used as asked."""


class DispatchError(PiecegraphError):
    """Sizes, modes or batches that contradict each other."""


class RunError(PiecegraphError):
    """A step, a capture or a replay cannot go on."""


class InvalidSetting(ConfigError):
    what = "setting {name} = {value!r} is not valid: {reason}"
    todo = "Choose {expected}."


# dispatch


class FullModeUnsupported(DispatchError):
    what = "graph mode FULL was asked for, but attention group {group!r} can never be captured"
    todo = "Choose PIECEWISE, which runs attention between the graphs, or NONE."


class CaptureSizeInvalid(DispatchError):
    what = "capture size {value!r} at position {position} of the list {fault}"
    todo = "Give distinct whole numbers from 1 to {limit}, ascending."


class PlanInvalid(DispatchError):
    what = "the dispatch plan cannot be: {fault}"
    todo = "Build plans with make_plan, from sizes, query lengths and cases that differ."


class BatchInvalid(DispatchError):
    what = "{batch} contradicts itself or the plan: {fault}"
    todo = "Correct the facts that the engine states about its step."


class NoModeLeft(DispatchError):
    what = "no runtime mode is left for {batch}: of the modes allowed {allowed}, {reason}"
    todo = "Allow NONE, which serves every batch, or allow a mode with a graph that fits."


class DecisionNotPossible(DispatchError):
    what = "the rank decision, graph_index {graph_index}, cannot be followed for {batch}: {reason}"
    todo = "Compare the ranks' plan digests and captured indices; all ranks must have the same."


class NoBuckets(DispatchError):
    what = "the limits leave no bucket; rejected were (batch, query, context) {rejected}"
    todo = "Widen the ranges, or raise the limit on tokens or on the model's length."


class BucketFileInvalid(DispatchError):
    what = "{source} has lines that are not buckets: {listed}"
    todo = "Write (batch, query, context), each an int, a list of ints or range(start, stop)."


class BeyondLimits(DispatchError):
    what = "no bucket can hold {shape} (batch, query, context): the limits allow {allowed}"
    todo = "Keep the engine's batches within the limits that its buckets were planned for."


# cache


class InvalidFactor(CacheError):
    what = "factor {name} cannot be part of a key: {reason}"
    todo = "{remedy}."


class InvalidName(CacheError):
    what = "{name!r} cannot name a {thing} in the cache"
    todo = "Use letters, digits, '.', '_' and '-', at most 128, the first no sign."


class InvalidEntry(CacheError):
    what = "entry {entry} cannot be stored: {reason}"
    todo = "Give meta as numbers, strings, lists and dicts, and large contents as blobs."


class UndeclaredVariable(CacheError):
    what = "environment variable {name} is read but not declared"
    todo = "Declare it in cache/keys/environment.py, as a factor or with the reason why it is none."


class UntrustedDirectory(CacheError):
    what = "cache directory {path} is not safe to load code from: {problem}"
    todo = "Run `{command}`, or choose another directory."


class CacheNotWritable(CacheError):
    what = "cache directory {path} cannot be written: {reason}"
    todo = "Choose another directory, give this one as a read-only layer, or turn the cache off."


class LayerFailed(CacheError):
    what = "cache layer {layer} failed: {reason}"
    todo = "Mend the layer, or let its failures be ignored."


class InvalidSecret(CacheError):
    what = "the key that signs cache entries cannot be used: {reason}"
    todo = "Give at least 16 bytes in {variable}, or a file only you can read in {file_variable}."


class EntryUnusable(CacheError):
    what = "entry {entry} of the cache at {path} cannot be used: {reason}"
    todo = "See what `piecegraph cache verify` says, and build the entry anew."


class BundleRefused(CacheError):
    what = "bundle file {path} is refused: {reason}"
    todo = "Export it again from a cache that verifies."


class BundleMissing(CacheError):
    what = "no bundle of {model} can be used, and bundle='force' forbids to compile: {reason}"
    todo = "Ship the bundle that was built from this model and these settings; see docs/cache.md."


# compile


class TraceFailed(CompileError):
    what = "the model cannot be traced as one graph: {reason}"
    todo = "Rewrite that line, or move it into a custom op listed in splitting_ops."


class Specialised(CompileError):
    what = "the trace is only valid for {symbol} = {value}: the model fixes that size"
    todo = "Remove the use of {symbol} as a Python number, or declare that dimension static."


class GuardUnproved(CompileError):
    what = "the trace holds only where {expression}, which fails for {symbol} = {sizes}"
    todo = (
        "Make the model independent of that condition, narrow the served range [{low}, {high}], "
        "or choose guards='check'."
    )


class ShapesDiffer(CompileError):
    what = "at {sizes} the model has {actual} where the trace says {expected}"
    todo = "Look for squeeze() or a branch on a size of one, which leave no guard."


class UnknownSplittingOp(CompileError):
    what = "splitting op {name!r} does not occur in the traced graph"
    todo = "Custom ops in the graph: {known}."


class InputNotTraceable(CompileError):
    what = "the graph takes {source}, which is neither a weight, a buffer nor an argument"
    todo = "Pass it as an argument or register it as a buffer."


class ExampleInputsMissing(CompileError):
    what = "no example can be built for argument {name!r}"
    todo = "Describe it in Config.inputs, e.g. {name}='int64[num_tokens]', or pass example inputs."


class UnknownInput(CompileError):
    what = "Config.inputs names {name!r}, which the model's forward does not take"
    todo = "Its parameters are: {known}."


class ExampleMismatch(CompileError):
    what = "example input {name!r} is {actual}, but Config.inputs says {expected}"
    todo = "Correct one of the two."


class UndeclaredDynamicShape(CompileError):
    what = "it cannot be inferred which dimensions are dynamic in {shapes}"
    todo = "Declare them in Config.inputs, e.g. input_ids='int64[num_tokens]'."


class UnboundSymbol(CompileError):
    what = "the size {expression} is not determined by the sizes of the inputs"
    todo = "Move the op whose result's size depends on data into a splitting op."


class NothingToCompile(CompileError):
    what = "tracing {model} found no tensor operation"
    todo = "Prepare the module whose forward does the work."


class NotPortable(CompileError):
    what = "a plan cannot hold {value!r} of type {kind}"
    todo = "Pass it as a tensor, number, string, slice, dtype, device or enum member."


class IllegalOrder(CompileError):
    what = "the plan cannot run: step {step} uses {value} {fault}"
    todo = "Report this with the traced graph; meanwhile cut at fewer splitting ops."


class PieceFailed(CompileError):
    what = "compiler {compiler!r} failed on piece {piece} ({digest}): {reason}"
    todo = "Run with compiler='eager' to see whether the piece itself is at fault."


class NotPartitioned(CompileError):
    what = "Inductor cannot cut the graph at its splitting ops alone: {reason}"
    todo = "Set use_inductor_graph_partition=False: the graph is then split before it is compiled."


class LibraryNotGeneral(CompileError):
    what = "the ahead-of-time library holds only where {expression}"
    todo = "The piece is served by Inductor's standalone artifact instead."


class LibraryDisagrees(CompileError):
    what = "the ahead-of-time library differs from its piece at {sizes}: {fault}"
    todo = "The piece is served by Inductor's standalone artifact instead."


class UnknownCompiler(CompileError):
    what = "there is no compiler {name!r}"
    todo = "Known: {known}."


class ModelMismatch(CompileError):
    what = "the model does not fit the plan: {reason}"
    todo = "Use the model that the plan was made for, or prepare it anew."


class ResultFormUnknown(CompileError):
    what = "the form of the model's result cannot be found by a run on fake tensors: {reason}"
    todo = (
        "Decorate functions that need a step with break_graph, with fake= if they return tensors."
    )


# runtime


class OutsideStep(RunError):
    what = "the forward context was asked for, but no step is running in this thread"
    todo = "Call the model through its prepared form, or inside `forward_context(...)`."


class UnknownBackend(RunError):
    what = "there is no graph backend called {name!r}"
    todo = "Known are {known}; others register in the entry-point group {group!r}."


class BackendUnavailable(RunError):
    what = "the graph backend {name!r} cannot work here: {reason}"
    todo = "Use the backend 'replay' to test without a device."


class NoCaptureSession(RunError):
    what = "a capture was started outside a capture session"
    todo = "Open `capture_session(...)` around it."


class NestedCapture(RunError):
    what = "{name} was to be captured while another capture is being recorded in this thread"
    todo = "Record one after the other."


class CaptureFailed(RunError):
    what = "capturing {name} failed: {reason}"
    todo = "Nothing of it is kept; the batch can run in a lower mode."


class CaptureOutOfMemory(CaptureFailed):
    what = "capturing {name} ran out of memory: {reason}"
    todo = "Nothing of it is kept; drop the largest capture sizes or leave more memory free."


class DummyStepFailed(RunError):
    """A dummy step was not given what it needs: a mistake of its caller, not a failed capture."""


class LayerMissing(DummyStepFailed):
    what = "the forward context was asked for layer {layer!r}, but it has {known}"
    todo = "Pass all layers to prepare, by the names that the splitting ops use: layers={{...}}."


class MetadataFailed(DummyStepFailed):
    what = "metadata_for raised for {mode} {num_tokens}: {reason}"
    todo = "Let it make metadata for every descriptor that it is called with."


class HostReadInCapture(RunError):
    what = "{op} needs a tensor's value on the host inside a captured region"
    todo = "Compute it on the device, or put the code into a splitting op."


class EagerResultChanged(RunError):
    what = "splitting op {op} returned {got} at replay, but {expected} when it was captured"
    todo = "A splitting op's results must have the same form for one padded size."


class RecordingReleased(RunError):
    what = "recording {name} was released and cannot be replayed"
    todo = "Capture it again."


class MovedTensor(RunError):
    what = "{name} is not where it was when graphs were captured: {recorded} then, {now} now"
    todo = "Write into the captured memory in place, or refresh the recordings that read it."


class InputMismatch(RunError):
    what = "input {name!r} is {got}, but the model was prepared for {expected}"
    todo = "Pass the input in that form."


class ArgumentFixed(RunError):
    what = "argument {name!r} is {value!r}, but the model was traced with {traced!r}"
    todo = "Pass the traced value, or make the argument a tensor."


class SizeOutOfRange(RunError):
    what = "{name} = {size} is outside the served range [{low}, {high}]"
    todo = "Split the batch, or raise the limit in Config and prepare again."


class BatchExceeded(RunError):
    what = "the inputs have {name} = {size}, but the batch that was dispatched has at most {most}"
    todo = "State in the Batch what the inputs of the step have."


class GuardBroken(RunError):
    what = "the compiled model is wrong for this size: it needs {expression}"
    todo = "Pad the batch to a size that satisfies it, or run the model eagerly."


class CaptureAfterSeal(RunError):
    what = "{name} was to be captured after seal()"
    todo = "Capture before sealing, or choose the strategy DELAYED or LAZY."


class ModelClosed(RunError):
    what = "the prepared model is closed"
    todo = "Prepare it again."


class WorkAfterSeal(RunError):
    what = "{kind} after seal(): {detail}, in a step of {shape}"
    todo = "Cover that shape in warm-up, or set after_seal to 'log' or 'count'."


class RankLost(RunError):
    what = "rank {rank} did not answer within {seconds} s at {topic!r}: {reason}"
    todo = "Look at that rank's own error, and restart all ranks."


class RanksDisagree(RunError):
    what = "rank {ranks} differs at {topic!r} in {fact}: {stated}, where most state {usual}"
    todo = "Start all ranks with the same model, settings and capabilities."


class UnknownWarmupStrategy(ConfigError):
    what = "there is no bucket warm-up strategy {name!r}"
    todo = "Known: {known}."


# tools


class TraceUnreadable(ConfigError):
    what = "the request trace {path} cannot be used: {reason}"
    todo = "Give a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens."


class TraceMalformed(ConfigError):
    what = "line {line} of the request trace {path} is not a request: {reason}"
    todo = "Correct the line or ask for fewer requests."


class RequestTooLong(ConfigError):
    what = "request {request} has {num_tokens} tokens in all, but {limited_by} holds {limit}"
    todo = "Lower the length scale or raise that limit."


class TooLarge(ConfigError):
    what = "the model, its KV cache or its metadata do not fit into memory: {reason}"
    todo = "Choose a smaller model, fewer blocks or smaller limits."


class OutputNotWritten(ConfigError):
    what = "{path} cannot be written: {reason}"
    todo = "Choose another file, or free space on its disk."


class ToolMissing(ConfigError):
    what = "{name} is not installed"
    todo = "Install it with `pip install -e '.[{extra}]'` in the checkout of piecegraph."


class BenchmarksMissing(ConfigError):
    what = "this installation of piecegraph has no benchmarks"
    todo = "Run `piecegraph bench` in a checkout of the repository; wheels leave them out."


class ToolFailed(RunError):
    what = "{name} failed: {reason}"
    todo = "Its own message is above."


class NoSuchEntry(ConfigError):
    what = "the cache at {path} has no entry {name!r}"
    todo = "List what it has with `piecegraph cache list`; the first digits of a key are enough."


class MissingMetadata(RunError):
    what = "layer {layer_name} was run without attention metadata"
    todo = "Pass metadata= with every step, or give capture() a function that builds it."
