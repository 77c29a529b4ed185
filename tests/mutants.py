"""Remove one protection at a time and see a test fail: `make mutants`, not part of CI.

Each mutant is (file, text, replacement, tests). A mutant that its tests let pass is a protection
without a test. Files are restored after each run. An argument selects the mutants that contain it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIVE, STRATEGIES = "tests/runtime/live", "tests/runtime/strategies"
DUMMY, STRIDES, RESULTS = (f"{LIVE}/test_{n}.py" for n in ("dummy_batch", "strides", "results"))
WEIGHTS, FAITHFUL, FAILURES = (
    f"{LIVE}/test_{n}.py" for n in ("weights", "faithful_replay", "failures")
)
CURVES, QUEUE = f"{STRATEGIES}/test_memory_curves.py", f"{STRATEGIES}/test_strategies.py"
LOOP, LIFETIMES = "tests/runtime/test_engine_loop.py -k 24", "tests/runtime/test_lifetimes.py"
SHARED = f"{LIVE}/test_shared_memory.py"
STATIC, RECORDER = "tests/runtime/test_static_inputs.py", "tests/runtime/test_recorder.py"
POISON = "tests/runtime/test_replay_backend.py -k failure_27"
RANKS = f"{STRATEGIES}/test_late_rank.py"
CAPTURE, CORE, REPLAY = "runtime/capture", "runtime/core", "runtime/backends/replay"
CHECKS, STRATEGY, STARTS = (f"runtime/parts/{n}" for n in ("checks", "strategies", "starts"))
GRAPHS, BATCH = f"{CAPTURE}/graph_set.py", f"{CAPTURE}/dummy_batch.py"
CODE, STEPS = f"{CORE}/code.py", f"{CORE}/steps.py"
GRAPH = f"{CAPTURE}/installed_graph.py"
ADDRESSES, INPUTS = f"{CHECKS}/address_checks.py", f"{CORE}/static_inputs.py"
PADDING, SAVED = f"{CORE}/padding.py", f"{CORE}/preserved.py"
CLASSES, POLICY = "dispatch/batch_class.py", f"{LIVE}/test_policy.py"
CAPTURER, MODEL = f"{STRATEGY}/capturer.py", "runtime/core_model.py"
LIMITED, SERVICE = f"{STRATEGY}/memory_limit.py", f"{STARTS}/part.py"
PART = f"{CHECKS}/part.py"
QUEUED, DELAYED = f"{REPLAY}/work_queue.py", "tests/runtime/test_delayed_work.py"
DELAYED_STEP, DELAYED_GRAPH = f"{REPLAY}/delayed_code.py", f"{REPLAY}/delayed_graph.py"
TAPE, BACKENDS = f"{REPLAY}/tape_graph.py", "tests/runtime/test_backends.py"
DEVICES = "tests/torch_compat/test_devices.py"

# A comment is the row of docs/failures.md that the protection belongs to.
MUTANTS = [
    (QUEUED, "if rewrite is None and not any(others):", "if True:", f"{DELAYED} -k failure_37"),
    (QUEUED, "not _same_bits(*pair) for", "False for", f"{DELAYED} -k failure_37"),
    (QUEUED, "late = _non_blocking(func, args, kwargs)", "late = False",
     f"{DELAYED} -k failure_37"),  # 38
    (QUEUED, "by is not None and by != step:", "False:", f"{DELAYED} -k kept"),
    (QUEUED, "if queue is not None and func in HOST_READS:", "if False:", f"{DELAYED} -k is_read"),
    (QUEUED, "if is_composite(func):", "if False:", f"{DELAYED} -k is_read"),
    (QUEUED, "any(self._awaits(self._state, each) for each in sources)", "False",
     f"{DELAYED} -k is_read"),
    (TAPE, "self._released(self, self._made)", "pass",
     f"{DELAYED} -k graphs_change"),
    (DELAYED_GRAPH, "step.put(tape.run,", "step.put(tape.replay,", f"{DELAYED} -k graphs_change"),
    (DELAYED_STEP, "call = replace(compiled, weights=weights).link()", "pass",
     f"{DELAYED} -k what_a_device"),
    (DELAYED_STEP, "partial(self._run, run)", "run", f"{DELAYED} -k is_read"),
    ("runtime/core/steps.py", "if without_graph or each.written or each.label in owned", "",
     f"{DELAYED} -k in_place"),
    (STEPS, "each.written or ", "", f"{DELAYED} -k step_writes"),
    (DELAYED_GRAPH, "        copied()\n", "", f"{DELAYED} -k after_the_copies"),
    (DELAYED_GRAPH, "step.put(partial(load, tensors), tensors, tensors, graph.copied_inputs)\n"
     "        copied()", "copied()\n        step.put(partial(load, tensors), tensors, tensors, "
     "graph.copied_inputs)", f"{DELAYED} -k after_the_copies"),
    (STEPS, "copied()  # every input is read in place", "pass", f"{DELAYED} -k after_the_copies"),
    (f"{REPLAY}/backend.py", "return HostCopies(is_open)", "return HostCopies(lambda: False)",
     f"{FAITHFUL} -k copy_from_the_host"),
    ("runtime/parts/seal/monitor.py", "classes.setdefault(own, ", "str(", f"{BACKENDS} -k close"),
    (BATCH, "fork_rng(devices, device_type=device_type)", "fork_rng([])", f"{DEVICES} -k restored"),
    ("compile/bundle/key_factors.py", '"is": stable_text(stated)', '"is": ""', f"{DEVICES} -k f6"),
    ("tools/engine/engine.py", "self.copied.synchronize()", "pass",
     "tests/tools/test_overlap.py -k changes_no_token"),
    ("compile/verify.py", "if before.digest != after.digest:", "if False:",
     f"{LIVE}/test_verification.py -k serves_until"),
    ("dispatch/plan.py", "*(end + 1 for end in self.ends if end < size)", "1",
     f"{LIVE}/test_split_guards.py -k boundary"),
    ("compile/guards/trace_with_guards.py", "guarded.guards.forget_assumptions(*limits)", "pass",
     "tests/compile/test_split_guards.py -k knows"),
    ("compile/plan/split_model.py", "min(first, low), max(last, high)", "low, high",
     "tests/compile/test_split_guards.py -k equal_pieces"),
    (MODEL, "sealed = self.sealed\n        self.release()", "sealed = self.sealed",
     f"{LIVE}/test_verification.py -k serves_until"),
    (SERVICE, "            self._must_not_be_refused()\n", "",
     f"{LIVE}/test_verification.py -k forced_raises"),
    (f"{STARTS}/tracing_thread.py", "if not found or found == before:", "if True:",
     f"{LIVE}/test_background.py -k changed_meanwhile"),
    (f"{STARTS}/tracing_thread.py", "or not self._state.changed_in_process()", "or True",
     f"{LIVE}/test_verification.py -k switch_waits"),
    (f"{STARTS}/tracing_thread.py", "import_alone(_import_cold_half, self.checkpoint)",
     "_import_cold_half()", "tests/runtime/test_beside_an_engine.py"),
    ("compile/ir/compilation.py", "self.changed_meanwhile() or self.state.changed()", '""',
     f"{LIVE}/test_verification.py -k under_another_state"),
    ("compile/verify.py", "replace(request, copies_layers=False)", "request",
     f"{LIVE}/test_verification.py -k fault_of_the_copies"),
    ("torch_compat/basics/patch.py", "    before=_before_fork,\n", "",
     "tests/runtime/test_beside_an_engine.py -k child"),
    ("compile/pieces/fingerprint.py", "if weight else 0", "if False else 0",
     "tests/compile/test_layouts.py -k is_no_difference"),
    ("compile/plan/split_model.py", " - planner.written", "",
     "tests/compile/test_layouts.py -k unless"),
    ("compile/trace/mutations.py", "of_tensors.get(id(whole(tensor)), untouched[storage])",
     "untouched[storage]", "tests/compile/test_layouts.py"),
    (ADDRESSES, "then if is_used(storage) else None", "then", "tests/runtime/test_addresses.py"),
    ("torch_compat/basics/modules.py", "return address(t), t.shape, t.stride(), t.dtype",
     "return address(t), (), (), None", "tests/runtime/test_addresses.py"),
    (ADDRESSES, "if read(metadata) == places:", "if True:", f"{WEIGHTS} -k at_once"),
    (ADDRESSES, "if _without_rows(now := _place(tensor)) != _without_rows(then):",
     "if (now := _place(tensor))[0] != then[0]:", f"{WEIGHTS} -k another_form"),
    (ADDRESSES, "return self._bytes() != self._then", "return False", f"{FAITHFUL} -k on_the_host"),
    (BATCH, "inputs.fill_padding()", "pass", f"{DUMMY} -k between"),  # 7
    (SAVED, "    finally:\n        saved.restore()", "    finally:\n        pass",
     f"{DUMMY} -k written_twice"),
    (SAVED, "bits.view(of_size) if type(bits) is Tensor else bits", "bits",
     f"{DUMMY} -k bit_for_bit"),
    (SAVED, "if sum(part.nbytes for part in self._parts) > most:", "if False:",
     f"{DUMMY} -k too_large"),
    ("torch_compat/basics/tensors.py", "if step == 0 and tensor.size(axis):", "if False:",
     f"{DUMMY} -k bit_for_bit"),
    ("torch_compat/basics/tensors.py", "with torch.inference_mode():  # in",
     "with torch.no_grad():  # in", "tests/torch_compat/test_tensors.py -k written_back"),
    (BATCH, "*self.state]", "]", f"{DUMMY} -k True"),
    (BATCH, "[*inputs.written_in_place, ", "[", f"{DUMMY} -k True"),
    (BATCH, "context.layers = layers", "pass", f"{FAILURES} -k layers_back"),
    (CODE, "if self._laid_out(*tensors):", "if True:", f"{STRIDES} -k relies"),
    (INPUTS, "if any_layout or (laid_out and whole):", "if True:", f"{STRIDES} -k copied"),
    (INPUTS, "if not _same_places(tensor, strides):", "if False:", f"{STRIDES} -k first_byte"),
    (INPUTS, "        fill()\n    if", "        pass\n    if", f"{STATIC} -k any_loads"),  # 25
    (INPUTS, "                fill()\n", "                pass\n", f"{STATIC} -k failure_25"),
    (INPUTS, "last is None or not extent.covers(last)", "last is None", f"{STATIC} -k any_loads"),
    (PADDING, "return self.kind is Padding.REPEAT", "return False", f"{STATIC} -k any_loads"),
    (PADDING, "if self.kind is Padding.KEEP:", "if False:", f"{STATIC} -k any_loads"),
    (INPUTS, "return torch.zeros(prod(shape)", "return torch.empty(prod(shape)",
     f"{STATIC} -k failure_26"),
    (GRAPH, 'partial(attrgetter("data"), static)', "partial(_same, result)", RESULTS),
    (GRAPH, "del self._by_size[next(iter(self._by_size))]", "pass", f"{RESULTS} -k bounded"),
    (GRAPHS, "            graph.recording.release()\n", "            pass\n",
     f"{WEIGHTS} -k failure_18"),
    (GRAPHS, "self.installed[graph_index] = self.installed[graph_index], None",
     "self.installed[graph_index] = self.installed[graph_index], self.installed[graph_index]",
     f"{WEIGHTS} -k failure_18"),
    (f"{CAPTURE}/recorder.py", "        fn(*inputs)\n    except", "        pass\n    except",
     f"{FAITHFUL} -k failure_22"),
    (f"{CAPTURE}/recorder.py", "            self.segments.append(Segment(SegmentKind.GRAPH",
     "            graph.replay()\n            self.segments.append(Segment(SegmentKind.GRAPH",
     f"{RECORDER} -k not_replayed"),
    (PART, "[*checks, Check(name, relied.addresses.check_step, IN_TURN)]", "checks",
     f"{WEIGHTS} -k failure_19"),  # 13
    (GRAPH, "self.recording.outputs or ()", "self.recording.outputs", LOOP),
    (MODEL, "            self.bind()\n        if metadata_for",
     "            pass\n        if metadata_for", f"{WEIGHTS} -k before_the_capture"),  # 18
    (MODEL, "self.bind()\n        environment",
     "environment", LOOP),  # 19
    (STEPS, "if is_autocast_enabled():", "if False:", f"{RESULTS} -k autocast"),
    (MODEL, "self.steps.close()", "pass", f"{RESULTS} -k close"),
    (MODEL, "        environment.backend.synchronize()\n        self.capturer.re",
     "        self.capturer.re", f"{WEIGHTS} -k idle_before"),
    (MODEL, "        self.environment.backend.synchronize()\n        self.steps.forget",
     "        self.steps.forget", f"{WEIGHTS} -k idle_before"),
    (STEPS, "if stated is not None and stated != num_tokens:", "if False:",
     f"{RESULTS} -k states_other"),
    (STEPS, "if graph is None and decision.graph_index != NO_GRAPH:", "if False:",
     f"{RESULTS} -k freed_reports"),
    (STEPS, "if batch.num_reqs > self._max_num_reqs:", "if False:",
     f"{RESULTS} -k contradict"),
    (STEPS, "            self.running = True\n            context.metadata",
     "            context.metadata",
     f"{FAILURES} -k middle"),
    (PART, "if self._memory is not None:", "if False:", SHARED),
    (GRAPH, "if of_input:", "if False:", SHARED),
    (CODE, "result.clone() if inputs.holds(result) else result", "result",
     f"{LIVE}/test_low_end.py -k callers"),
    (f"{CORE}/binding.py", "is_neg()", "is_sparse", f"{STRIDES} -k negated"),
    (ADDRESSES, "if now is not None:", "if False:", f"{WEIGHTS} -k other_memory"),
    (ADDRESSES, "CHECKED_PER_STEP = 2", "CHECKED_PER_STEP = 1",
     "tests/runtime/test_addresses.py -k w15"),
    ("runtime/parts/proof/row_mixing.py", "if not (same and", "if False and not (same and",
     f"{LIVE}/test_row_mixing.py -k never_padded"),
    ("compile/bundle/key_factors.py", "        **of_compiler,", "",
     "tests/compile/test_compilers.py"),
    ("compile/ir/registered_compilers.py",
     "if compiler.load is not None and not compiler.version:", "if False:",
     "tests/compile/test_compilers.py"),
    ("compile/bundle/bundle.py", 'if is_own_code(name.partition(".")[2])',
     'if name.endswith(".code")', "tests/compile/test_compilers.py"),
    ("compile/warm.py", "not tried or bool(stored_digests(self.request.cache, self.key) - tried)",
     "True", "tests/compile/test_starts.py -k refused"),
    ("compile/ir/ops.py", "if not all(map(is_fake, written)):", "if False:",
     f"{LIVE}/test_breakable.py -k changes_nothing"),
    (f"{CAPTURE}/breaks.py", "(stand_in := WITHOUT_BREAKS.get()) is not None", "False",
     f"{LIVE}/test_breakable.py -k never_reaches"),
    ("torch_compat/basics/tensors.py", "never_traced(handler, with_callees=True)", "pass",
     f"{LIVE}/test_regions.py -k handler"),
    (f"{CHECKS}/step_reads.py", 'self._reads.value("layers", self._context.layers)',
     "self._context.layers", f"{LIVE}/test_step_reads.py -k of_a_layer"),
    ("runtime/parts/proof/row_mixing.py", "and at not in unwritten", "and True",
     f"{LIVE}/test_row_mixing.py -k memory_for"),
    (TAPE, "if self._poisons:", "if False:", POISON),
    (TAPE, "self._made = tuple(tape.made.values())", "self._made = ()", POISON),
    (f"{REPLAY}/backend.py", "if self._tape.host_read is not None:", "if False:",
     f"{FAITHFUL} -k swallows"),
    (f"{CAPTURE}/recorder.py", "opaque(self.in_context(fn), args)", "opaque(fn, args)",
     f"{FAITHFUL} -k failure_23"),
    (f"{CAPTURE}/recording.py", "with torch.inference_mode(False), torch.no_grad():",
     "with torch.no_grad():", f"{RECORDER} -k failure_11_fresh"),
    (f"{CAPTURE}/breaks.py", "recorder is not None and recorder.breaks", "recorder is not None",
     f"{RECORDER} -k w2"),
    (f"{CAPTURE}/recorder.py", "self._open.opaque(self.in_context(fn), args)", "fn(*args)",
     "tests/runtime/test_replay_backend.py -k opaque_piece_is_one"),  # 24
    (f"{CAPTURE}/recorder.py", "tensor = self._session.backend.weak(tensor)", "pass",
     f"{LIFETIMES} -k failure_17"),
    (f"{CAPTURE}/session.py", "self._held.append(tensor)", "pass",
     f"{LIFETIMES} -k failure_17"),  # 16, 17
    ("runtime/setup/policy.py", "return {UNDECLARED: AttentionSupport.NEVER} if breaks else {}",
     "return {}", f"{FAITHFUL} -k declares_nothing"),  # 10, W12
    (CAPTURER, "(not self.is_eager and not self.queue.complete)", "not self.queue.complete",
     f"{FAILURES} -k w14"),
    (f"{STRATEGY}/wanted.py",
     "        if self._strategy is CaptureStrategy.EAGER:\n            return\n        if",
     "        if", f"{QUEUE} -k eager_queue"),
    (LIMITED, "if captured and self.memory.exceeded:", "if False:", f"{CURVES} -k holds_on"),
    (CAPTURER, "            self.captures.evict(graph_index)\n        with",
     "            pass\n        with", f"{WEIGHTS} -k stale_graphs"),
    (CAPTURER, "if estimate > budget.ms:", "if False:", f"{QUEUE} -k idle_milliseconds"),
    ("runtime/parts/ranks/ranks.py",
     'self._store.compare_set(self._key("lost"), "", json.dumps(late))', "json.dumps(late)",
     RANKS),
    (CLASSES, "            return Reason.AXIS\n", "            pass\n",
     f"{POLICY} -k in_the_key"),  # 5
    ("tools/engine/metadata.py", "array[:size] = value", "pass",
     "tests/tools/test_attention.py -k failure_29"),
    (CLASSES, "        return Reason.LORA_CASE_MISSING\n", "        pass\n",
     f"{POLICY} -k lora_batches"),  # 8
]  # fmt: skip


def survives(file: str, text: str, replacement: str, tests: str) -> bool:
    """Whether `tests` pass with `text` replaced in `file`."""
    path = ROOT / file
    original = path.read_text()
    if original.count(text) < 1:
        raise SystemExit(f"{file} no longer has {text!r}: correct the list of mutants")
    path.write_text(original.replace(text, replacement, 1))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, *tests.split()], cwd=ROOT, capture_output=True, text=True)
        if done.returncode > 1:  # no test was selected, or none could be collected
            raise SystemExit(f"{tests}: no test ran\n{done.stdout}")
        return done.returncode == 0
    finally:
        path.write_text(original)


def main() -> None:
    survivors, only = [], " ".join(sys.argv[1:])
    for mutant in MUTANTS:
        if only not in " ".join(mutant):
            continue
        survived = survives(*mutant)
        survivors += [mutant] if survived else []
        print("survived" if survived else "caught  ", mutant[0], repr(mutant[1]), flush=True)
    raise SystemExit(len(survivors))


if __name__ == "__main__":
    main()
