"""The error catalog: every error that piecegraph raises, in one tree.

PiecegraphError
├── ConfigError          a setting or an option is invalid
├── CompileError         the model cannot be traced, split or compiled
├── CacheError           the cache cannot be used
├── DispatchError        sizes, modes or batches contradict each other
└── RunError             a step, a capture or a replay failed

Only the base and the five branches end in `Error`; they are what callers catch. A leaf names the
fact and has no suffix: `NoModeLeft`, `InputMismatch`.

A leaf has two templates: `what` happened, and what to do about it (`todo`). The code that raises it
fills in the facts, in names the user knows (`num_tokens`, never a generated symbol). `where` is the
file:line of the user's code, if there is one. Errors pickle, so that they cross process borders.
"""

from __future__ import annotations

import pickle
import string
from typing import Any, ClassVar


class PiecegraphError(Exception):
    """Base of the tree. `facts` are the values that the templates were filled with."""

    what: ClassVar[str] = ""
    todo: ClassVar[str] = ""

    def __init__(self, *, where: str | None = None, **facts: Any) -> None:
        self.where = where
        self.facts = facts
        super().__init__(self._render())

    def _render(self) -> str:
        place = f" (at {self.where})" if self.where else ""
        advice = f" {self.todo.format(**self.facts)}" if self.todo else ""
        what = self.what.format(**self.facts).removesuffix(".")  # a fact may be another error
        return f"{what}{place}.{advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {name: v if _pickles(v) else repr(v) for name, v in self.facts.items()}
        return _rebuild, (type(self), str(self), self.where, facts)

    @classmethod
    def fields(cls) -> frozenset[str]:
        """Names of the facts that the templates need."""
        templates = string.Formatter().parse(cls.what + cls.todo)
        return frozenset(name.split(".")[0].split("[")[0] for _, name, _, _ in templates if name)


def _rebuild(
    cls: type[PiecegraphError], message: str, where: str | None, facts: dict[str, Any]
) -> PiecegraphError:
    error = cls.__new__(cls, message)
    error.where, error.facts = where, facts
    return error


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # a user's object may raise anything
        return False
    return True


class ConfigError(PiecegraphError):
    """A setting or an option is invalid."""


class CompileError(PiecegraphError):
    """The model cannot be traced, split or compiled."""


class CacheError(PiecegraphError):
    """The cache cannot be used."""


class DispatchError(PiecegraphError):
    """Sizes, modes or batches contradict each other."""


class RunError(PiecegraphError):
    """A step, a capture or a replay failed."""


class InvalidSetting(ConfigError):
    what = "invalid setting {name} = {value!r}: {reason}"
    todo = "Choose {expected}."


class UnknownSetting(InvalidSetting):
    what = "Config has no setting {name!r}{guess}"
    todo = "See help(piecegraph.{config}) for all settings."


# dispatch


class FullModeUnsupported(DispatchError):
    what = "graph mode FULL was requested, but {reason}"
    todo = (
        "Choose PIECEWISE, which runs attention between the graphs, or NONE. If its ops read what "
        "changes between steps from tensors at fixed addresses, or the model has no attention and "
        "needs no splitting, set attention={{'support': 'ALWAYS'}}."
    )


class CaptureSizeInvalid(DispatchError):
    what = "capture size {value!r} at position {position} of capture_sizes {fault}"
    todo = "Use distinct whole numbers from 1 to {limit} (max_num_tokens), ascending."


class PlanInvalid(DispatchError):
    what = "invalid dispatch plan: {fault}"
    todo = "Build the plan with make_plan, from distinct sizes, query lengths and LoRA cases."


class BatchInvalid(DispatchError):
    what = "invalid Batch: {fault} (got {batch})"
    todo = "Correct the facts that the engine passes for this step, or a setting that it names."


class NoModeLeft(DispatchError):
    what = "no allowed runtime mode can serve {batch}: allowed are {allowed}, but {reason}"
    todo = "Allow NONE, which serves every batch, or a mode that has a graph for this batch."


class DecisionNotPossible(DispatchError):
    what = "cannot follow the decision for graph_index {graph_index} with {batch}: {reason}"
    todo = "Make sure that all ranks have the same plan digest and the same captured graphs."


class DecisionOfAnother(DispatchError):
    what = "{decision!r} is no decision of this prepared model"
    todo = "Pass what its `dispatch` returned for this step."


class NoBuckets(DispatchError):
    what = "the limits exclude every bucket; rejected (batch, query, context): {rejected}"
    todo = "Widen the ranges, or raise max_num_tokens or max_model_len."


class BucketFileInvalid(DispatchError):
    what = "invalid buckets: {listed}"
    todo = "Write (batch, query, context), each an int, a list of ints or range(start, stop)."


class BeyondLimits(DispatchError):
    what = "no bucket can hold (batch, query, context) = {shape}: the limits allow {allowed}"
    todo = "Keep batches within the BucketLimits that the buckets were planned for."


# cache


class InvalidFactor(CacheError):
    what = "key factor {name} cannot be part of a cache key: {reason}"
    todo = "{remedy}."


class InvalidName(CacheError):
    what = "{name!r} is not a valid name for a {thing} in the cache"
    todo = "Use at most 128 letters, digits, '.', '_' and '-'; start with a letter or digit."


class InvalidEntry(CacheError):
    what = "entry {entry} cannot be stored: {reason}"
    todo = "Pass meta as numbers, strings, lists and dicts, and large contents as blobs."


class UntrustedDirectory(CacheError):
    what = "loading code from cache directory {path} is not safe: {problem}"
    todo = "Run `{command}`, or choose another directory."


class CacheNotWritable(CacheError):
    what = "cannot write to cache directory {path}: {reason}"
    todo = "Choose another directory, pass this one as a read-only layer, or turn the cache off."


class LayerFailed(CacheError):
    what = "cache layer {layer} failed: {reason}"
    todo = "Repair the layer, or set it to ignore failures."


class InvalidKeyFile(CacheError):
    what = "key file {path} cannot be used: {reason}"
    todo = "Make one with `piecegraph cache keygen`; see docs/cache.md."


class KeysMissing(CacheError):
    what = "layer {layer} trusts signed entries, and there is no key to check them with"
    todo = "Set {variable} to a file with the public keys of its builders; see docs/cache.md."


class EntryUnusable(CacheError):
    what = "cache entry {entry} in {path} cannot be used: {reason}"
    todo = "Run `piecegraph cache verify` for details, and build the entry again."


class BundleRefused(CacheError):
    what = "image {path} was rejected: {reason}"
    todo = "Export it again from a cache that passes `piecegraph cache verify`."


class BundleMissing(CacheError):
    what = "no usable bundle for {model}, and bundle='force' forbids compiling: {reason}"
    todo = "{remedy} See docs/cache.md."


class BundleStale(CacheError):
    what = "the bundle of {model} is of another program: {difference}"
    todo = "Deploy a bundle built from this program; with bundle='use' it is compiled instead."


# compile


class TraceFailed(CompileError):
    what = "the model cannot be traced as one graph: {reason}"
    todo = "Rewrite that line, or move it into a custom op and list the op in splitting_ops."


class HostRead(CompileError):
    what = "the model reads a tensor's value on the host with {op}"
    todo = "Compute it on the device, or read it in a custom op and list the op in splitting_ops."


class StateChanged(CompileError):
    what = (
        "the model keeps tensors in {name} for its next forward, which a compiled step does not do"
    )
    todo = (
        "Keep it in a tensor that is a buffer and is changed in place, or change it outside of "
        "the forward."
    )


class SettingsChanged(CompileError):
    what = "another thread changed settings of torch while the model was compiled: {changed}"
    todo = "Prepare it when no other thread does, such as one that loads a model."


class TransformInForward(CompileError):
    what = "the model uses a function transform in its forward, as torch.vmap and flex_attention do"
    todo = "Use batched operations there, move the line into a custom op, or set compile=False."


class FakeMissing(CompileError):
    what = "op {op} has no fake implementation, so it cannot be traced"
    todo = (
        "Register one with torch.library.register_fake: it returns empty tensors of the right form."
    )


class Specialized(CompileError):
    what = "the trace is valid only for {symbol} = {value}: the model specializes on that size"
    todo = "Do not use {symbol} as a Python number, or declare that dimension static."


class GuardUnproved(CompileError):
    what = "the trace is valid only if {expression}, which is false for {symbol} = {sizes}"
    todo = (
        "Make the model independent of that condition, {remedy}or set tracing.guards to 'check', "
        "which refuses steps of these sizes."
    )


class IntervalsDiffer(CompileError):
    what = "the trace for {low} to {high} tokens has other {part}: {change}"
    todo = "Let the model read the same inputs and return results of one form for every size."


class ShapesDiffer(CompileError):
    what = "at {sizes} the model returns {actual}, but the trace has {expected}"
    todo = "Look for squeeze() or a branch on a size of 1: they leave no guard."


class ContextSplit(CompileError):
    what = "a splitting op is inside a context manager that cannot be split ({name})"
    todo = "End the context before the op, or enter it inside the op."


class NotPartitioned(CompileError):
    what = "Inductor cannot partition its code at the splitting ops: {reason}"
    todo = "Set codegen={{'partition': 'graph'}}, which splits the graph before it is compiled."


class UnknownSplittingOp(CompileError):
    what = "splitting op {name!r} does not occur in the traced graph"
    todo = "The graph contains these custom ops: {known}."


class InputNotTraceable(CompileError):
    what = (
        "the graph reads a value ({source}) that is neither an argument nor a tensor which can be "
        "reached by name from the model, a closure or a global"
    )
    todo = "{remedy}Pass it as an argument, or make it a tensor and register it as a buffer."


class ReturnsWeight(CompileError):
    what = "the model returns {name}, which it reads and does not compute"
    todo = "Return a clone of it, or read it from the model after the step."


class ReturnsShape(CompileError):
    what = "the model returns the shape of an argument, {sizes} in the trace, not its sizes"
    todo = "Return them one by one: tuple(x.shape)."


class ReturnedUnread(CompileError):
    what = "the model only returns argument {name!r}: no input has the size of its dimension {dim}"
    todo = "Declare that dimension with a name that another input has, or do not return it."


class ModelNotAdaptable(CompileError):
    what = "{family} cannot be adapted: {reason}"
    todo = "{advice}."


class ArgumentClassUnknown(CompileError):
    what = "argument {name!r} is an object of class {kind}, whose parts are not known"
    todo = (
        "Make it a dataclass and call torch.export.register_dataclass, or pass a dict, a tuple, or "
        "the parameter's default: each step's is compared with that of the trace."
    )


class ExampleInputsMissing(CompileError):
    what = "cannot build an example for argument {name!r}"
    todo = "Describe it in Config.inputs, for example {name}='int64[num_tokens]', or pass examples."


class UnknownInput(CompileError):
    what = "Config.inputs names {name!r}, which is not a parameter of the model's forward"
    todo = "Its parameters are: {known}."


class ExampleMismatch(CompileError):
    what = "example input {name!r} is {actual}, but Config.inputs says {expected}"
    todo = "Correct one of the two."


class UndeclaredDynamicShape(CompileError):
    what = "cannot infer which dimensions of {shapes} are dynamic"
    todo = "Declare them in Config.inputs, for example input_ids='int64[num_tokens]'."


class UnboundSymbol(CompileError):
    what = "the size {expression} does not follow from the sizes of the inputs"
    todo = "Move the op with the data-dependent size into a splitting op."


class GradientsNeeded(CompileError):
    what = "torch.compile(backend='piecegraph') is given a graph whose gradients are needed"
    todo = "Call the model under torch.no_grad(), or turn requires_grad off for its weights."


class NothingToCompile(CompileError):
    what = "tracing {model} found no tensor operation"
    todo = "Prepare the module whose forward computes the result."


class NotPortable(CompileError):
    what = "a plan cannot store {value} of type {kind}"
    todo = (
        "Pass arguments of ops as tensors, numbers, strings, slices, dtypes, devices or enum "
        "members; return tensors and numbers in tuples, lists, dicts, dataclasses or named tuples."
    )


class IllegalOrder(CompileError):
    what = "invalid plan: step {step} uses {value} {fault}"
    todo = "Report this with the traced graph. Until it is fixed, use fewer splitting ops."


class PieceFailed(CompileError):
    what = "compiler {compiler!r} failed on piece {piece} ({digest}): {reason}"
    todo = "Run with compiler='eager' to find out whether the piece itself is the problem."


class PrepareFailed(CompileError):
    what = "{model} cannot be prepared: {reason}"
    todo = "The error that is the cause of this one has the details."


class LibraryUnusable(CompileError):
    what = "the ahead-of-time library of a piece cannot be used: {reason}"
    todo = "Inductor's standalone artifact is used for this piece instead."


class UnknownCompiler(CompileError):
    what = "unknown compiler {name!r}"
    todo = "Known compilers: {known}."


class CompilerUnversioned(CompileError):
    what = "compiler {name!r}, an entry point of {group}, stores code and states no version"
    todo = "Set Compiler(version=...) to what changes with the code that it generates."


class ModelMismatch(CompileError):
    what = "the model does not match the plan: {reason}"
    todo = "Use the model that the plan was made for, or prepare this one again."


class ResultFormUnknown(CompileError):
    what = "a run on fake tensors cannot determine the form of the model's result: {reason}"
    todo = (
        "Decorate functions that need a running step with break_graph, and pass fake= "
        "if they return tensors."
    )


# runtime


class InvalidArgument(RunError):
    what = "{call} was called with {name} = {value}"
    todo = "Pass {expected}."


class NotCopyable(RunError):
    what = "a prepared model can be neither copied nor pickled: it has graphs of this process"
    todo = "Call prepare in the other process or thread, with the same cache it loads the bundle."


class OutsideStep(RunError):
    what = "there is no forward context: no step is running in this thread"
    todo = "Call the model through its PreparedModel, or inside `forward_context(...)`."


class UnknownBackend(RunError):
    what = "unknown graph backend {name!r}"
    todo = "Known backends: {known}. Others register in the entry-point group {group!r}."


class BackendUnavailable(RunError):
    what = "graph backend {name!r} is not available: {reason}"
    todo = "Use the backend 'replay' to test without a device."


class NoCaptureSession(RunError):
    what = "a capture was started outside a capture session"
    todo = "Open `capture_session(...)` around the capture."


class NestedCapture(RunError):
    what = "cannot capture {name} while another capture is running in this thread"
    todo = "Capture one after the other."


class CaptureFailed(RunError):
    what = "capturing {name} failed: {reason}"
    todo = "The partial capture was discarded; the batch can run in a lower mode."


class CaptureOutOfMemory(CaptureFailed):
    what = "capturing {name} ran out of memory: {reason}"
    todo = "The partial capture was discarded. Remove the largest capture sizes or free memory."


class DummyStepFailed(RunError):
    """A dummy step lacks something that the caller must pass, or writes where it must not. This is
    not a failed capture."""


class LayerMissing(DummyStepFailed):
    what = "the forward context has no layer {layer!r}; it has {known}"
    todo = "Pass all layers to prepare(layers={{...}}), by the names that the splitting ops use."


class MetadataFailed(DummyStepFailed):
    what = "metadata_for raised for {mode} {num_tokens}: {reason}"
    todo = "metadata_for must return metadata for every descriptor it is called with."


class SetUpOnFirstUse(DummyStepFailed):
    what = (
        "{op} sets up {names} when it first runs, and a dummy batch has no real rows for it; {left}"
    )
    todo = "Run a step before the first capture or warm-up, or set it up when the model is made."


class OtherRowsWritten(DummyStepFailed):
    what = (
        "a dummy batch wrote to rows {rows} of dimension {dim} of a buffer of shape {shape}, to "
        "which no input points"
    )
    todo = "Write to large buffers where an integer input says; reserve a row for its padding."


class RefusedInCapture(RunError):
    """What a graph cannot hold ran inside a captured region."""


class GeneratorInCapture(RefusedInCapture):
    what = "{op} draws from a torch.Generator of the model inside a captured region"
    todo = (
        "Draw from torch's own generator, which graphs know (leave the argument out), or put the "
        "code into a splitting op."
    )


class HostReadInCapture(RefusedInCapture):
    what = "{op} reads a tensor's value on the host inside a captured region"
    todo = "Compute it on the device, or put the code into a splitting op."


class HostCopyInCapture(RefusedInCapture):
    what = "{op} makes a tensor on the host, which is copied to the device inside a captured region"
    todo = (
        "Make it on the device (device=x.device), make it once and keep it as a buffer, or put the "
        "code into a splitting op."
    )


class ResultNotAsTraced(RunError):
    what = "op {op} {got}, but {told}"
    todo = "Correct the op, its schema or its fake kernel (register_fake), and prepare again."


class TensorLeftBreak(RunError):
    what = (
        "a graph reads a {form} tensor that {op} made{called} and left elsewhere than in its "
        "result: its next call makes another one, which no graph reads"
    )
    todo = "Return the tensor too, or write to a tensor that the model keeps: kept[:n].copy_(new)."


class OwnOperators(RunError):
    what = "a result of {name} is a {kind}, a class of tensors with operators of its own"
    todo = "Return the tensors that it holds: a graph leaves memory, and no class."


class NotReplayed(RunError):
    what = "{name}, which breaks and Python inside graphs share, {fact}: a replay runs only breaks"
    todo = "Let the break return it, or write to a tensor that the model keeps."


class ArgumentWritten(RunError):
    what = "{op} changes a list or dict that it is given, which a graph would not see"
    todo = "Return what it adds, or let it write to tensors."


class EagerResultChanged(RunError):
    what = "splitting op {op} returned {got} at replay, but {expected} at capture"
    todo = "The results of a splitting op must have the same form at each padded size."


class StepInProgress(RunError):
    what = "a step or a change of graphs was started while a step of the same prepared model runs"
    todo = (
        "A prepared model serves one step at a time: prepare another one for a second thread, or "
        "for a step inside a splitting op."
    )


class RecordingReleased(RunError):
    what = "recording {name} was released"
    todo = "Capture it again."


class MovedTensor(RunError):
    what = "{name} {change} after graphs were captured: {recorded} at capture, {now} now"
    todo = "Update it in place, or call refresh() to capture again the graphs that read it."


class MovedWeight(MovedTensor):
    what = "{name} {change} after the model was prepared: {recorded} then, {now} now"
    todo = "Update it in place, or call refresh() to follow it."


class RewrittenEarly(RunError):
    what = "{by} rewrote {buffer} before {step} had read it"
    todo = (
        "Wait for reads_done() of that step first, copy in the order of the steps with "
        "copy_(..., non_blocking=True), or write to memory that no step in flight reads."
    )


class ResultOverwritten(RunError):
    what = "a result of {step} is read after {by} has overwritten it"
    todo = "Copy what must outlive the next step before that step runs."


class ModelChanged(RunError):
    what = "the model is not what it was when it was prepared: {changes}"
    todo = "Prepare it again, or undo the change: the compiled code holds what it was."


class HostValueChanged(RunError):
    what = "{name} is on the host, and graphs have the value that it had when they were captured"
    todo = (
        "Move it to the model's device, or call refresh() to capture again the graphs that use it."
    )


class InputsShareMemory(RunError):
    what = "input {name!r} shares memory with {other}, and the model writes to one of them"
    todo = (
        "Pass a clone of the input: compiled code and graphs cannot let one see the other change."
    )


class InputMismatch(RunError):
    what = "input {name!r} is {got}, but the model was prepared for {expected}"
    todo = "Pass the input in that form."


class ArgumentFixed(RunError):
    what = "argument {name!r} is {value}, but the model was traced with {traced!r}"
    todo = "Pass the traced value, or trace with examples that have a tensor there."


class SizeOutOfRange(RunError):
    what = "{name} = {size} is outside the served range [{low}, {high}]"
    todo = "Split the batch, or raise the limit in Config and prepare again."


class BatchExceeded(RunError):
    what = "the inputs have {name} = {size}, but the dispatched batch has at most {most}"
    todo = "Dispatch a Batch with the counts of these inputs."


class BatchMismatch(RunError):
    what = "the batch states {stated} tokens, but the inputs have {actual}"
    todo = "State in the Batch what the inputs of the step have."


class CallFormUnknown(RunError):
    what = "the call {fault}"
    todo = (
        "Call it as one of its forms and state that one in Batch.axes, or add a form to"
        " Config.inputs. The forms are {forms}."
    )


class GuardBroken(RunError):
    what = "the compiled model is not valid for this size: it requires {expression}"
    todo = "Pad the batch to a size that satisfies it, or run the model eagerly."


class AutocastActive(RunError):
    what = "{action} runs under torch.autocast, which compiled code and graphs ignore"
    todo = "Leave autocast around it, or enter it inside the model's forward."


class ModeActive(RunError):
    what = "{action} runs under {mode}, which compiled code and graphs ignore"
    todo = "Leave the mode around it, or enter it inside the model's forward."


class StaleContext(RunError):
    what = (
        "{reader} read {fact} of the forward context inside a graph, which keeps the value of its "
        "capture: {recorded!r}, and {now!r} in this step"
    )
    todo = (
        "Add the op that it belongs to to splitting_ops, so that it runs between graphs, or read a "
        "tensor. If the graph does not depend on the value, name the field in `graph_constants` of "
        "the metadata's class."
    )


class ReadNotKept(RunError):
    what = "{reader} read {fact} of the forward context inside a graph: {reason}"
    todo = (
        "Read what the graph needs in another way, or put the code into a splitting op, which "
        "runs between graphs."
    )


class AllCapturesFailed(RunError):
    what = "all {count} captures failed; the first one: {reason}"
    todo = "If attention needs metadata, pass capture(metadata_for); else see the reason."


class CaptureAfterSeal(RunError):
    what = "cannot capture {name} after seal()"
    todo = "Capture before seal(), or choose the strategy DELAYED or LAZY."


class ModelClosed(RunError):
    what = "the prepared model is closed"
    todo = "Prepare it again."


class WorkAfterSeal(RunError):
    what = "{kind} after seal(): {detail}, {place}"
    todo = "Cover that shape in warm_up(), or set steps.after_seal to 'log' or 'count'."


class RankLost(RunError):
    what = "rank {ranks} did not respond within {seconds} s at {topic!r}: {reason}"
    todo = (
        "Check the error of a rank that has ended. If one is late, give Ranks a longer timeout_s. "
        "Restart all ranks."
    )


class RanksDisagree(RunError):
    what = "rank {ranks} disagrees at {topic!r} on {fact}: {stated}, but most ranks have {usual}"
    todo = "Start all ranks with the same model, settings and capabilities."


# tools


class TraceUnreadable(ConfigError):
    what = "the request trace {path} cannot be used: {reason}"
    todo = "Use a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens."


class RequestTooLong(ConfigError):
    what = "request {request} has {num_tokens} tokens in total, but {limited_by} holds {limit}"
    todo = "Lower the length scale, or raise that limit."


class TooLarge(ConfigError):
    what = "the model, its KV cache or its metadata do not fit into memory: {reason}"
    todo = "Choose a smaller model, fewer blocks or smaller limits."


class OutputNotWritten(ConfigError):
    what = "cannot write {path}: {reason}"
    todo = "Choose another file, or free disk space."


class ToolMissing(ConfigError):
    what = "{name} is not installed"
    todo = "Install it with `pip install 'piecegraph[{extra}]'`, or '.[{extra}]' in a checkout."


class NoSuchEntry(ConfigError):
    what = "the cache at {path} has no entry {name!r}"
    todo = "List the entries with `piecegraph cache list`; the first digits of a key are enough."


class MissingMetadata(RunError):
    what = "layer {layer_name} ran without attention metadata"
    todo = "Pass metadata= with every step, and pass capture() a function that builds it."
