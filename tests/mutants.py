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
READS, OBSERVER, BINDING = f"{CHECKS}/step_reads.py", f"{CHECKS}/observer.py", f"{CORE}/binding.py"
STEP_READS, CALL_FORM = f"{LIVE}/test_step_reads.py", f"{LIVE}/test_call_form.py"
PADDING, SAVED = f"{CORE}/padding.py", f"{CORE}/preserved.py"
CLASSES, POLICY = "dispatch/batch_class.py", f"{LIVE}/test_policy.py"
CAPTURER, MODEL = f"{STRATEGY}/capturer.py", "runtime/core_model.py"
LIMITED, SERVICE = f"{STRATEGY}/memory_limit.py", f"{STARTS}/part.py"
PART = f"{CHECKS}/part.py"
PADDED = f"{LIVE}/test_padding_forms.py"
QUEUED, DELAYED = f"{REPLAY}/work_queue.py", "tests/runtime/test_delayed_work.py"
DELAYED_STEP, DELAYED_GRAPH = f"{REPLAY}/delayed_code.py", f"{REPLAY}/delayed_graph.py"
TAPE, BACKENDS = f"{REPLAY}/tape_graph.py", "tests/runtime/test_backends.py"
DEVICES = "tests/torch_compat/test_devices.py"
BLOCKS, DEFRAGMENTER = "tools/engine/block_manager.py", "tests/tools/test_defragmenter.py"
WRITES = f"{CORE}/writes.py"
ATTENTION, KERNEL = "tools/engine/triton_attention.py", "tests/tools/test_triton_attention.py"
SAMPLER, DRAWS = "tools/engine/sampler.py", "tests/tools/test_sampler.py"

PLANNED, LOOKED_UP, FROM_FILE = (f"dispatch/buckets/{n}.py" for n in ("ranges", "lookup", "file"))
MISSION = "tests/mission"
BUCKETS, SHARES = "tests/dispatch/test_buckets.py", f"{STRATEGIES}/test_shares.py"

TAPED, OWNERSHIP = f"{REPLAY}/tape.py", "runtime/backends/ownership.py"
FORMS, TOLD = "compile/plan/result_forms.py", f"{LIVE}/test_result_forms.py"
PROOF, TRIALS = (f"runtime/parts/proof/{n}.py" for n in ("part", "row_trials"))
FIRST, SET_UP = f"{CAPTURE}/first_use.py", f"{LIVE}/test_first_use.py"
BREAKS, MISUSE = f"{CAPTURE}/breaks.py", f"{LIVE}/test_misuse.py"
PARTITION, CUT = "torch_compat/compiling/partition.py", "tests/compile/test_partitions.py"
TOLD_AT_START = "tests/runtime/test_told_at_start.py"
FIRST_STEPS = "runtime/parts/log/first_steps.py"
CUT_LIVE = f"{LIVE}/test_partitions.py"

OF_CACHE, OF_DISPATCH = "tests/cache/test_", "tests/dispatch/test_"
OF_COMPILE, OF_COMPAT = "tests/compile/test_", "tests/torch_compat/test_"
OF_TOOLS = "tests/tools/test_"

IN_WORKERS, WORKERS = "compile/backends/in_workers.py", "tests/compile/test_workers.py"

# A comment is the row of docs/failures.md that the protection belongs to.
MUTANTS = [
    (
        "tools/serve/hugging_face.py",
        'if missing := sorted(loading["missing_keys"])',
        'if missing := sorted(loading["error_msgs"])',
        "tests/tools/test_hugging_face_run.py -k folder",
    ),
    ("events.py", "outer.own -= span.seconds", "pass", "tests/test_events.py -k own_seconds"),
    ("events.py", "self._open.phase = outer", "pass", "tests/test_events.py -k own_seconds"),
    ("dispatch/uncovered.py", "end = min(end, query_len * (key.num_reqs or end))", "pass",
     f"{TOLD_AT_START} -k dispatcher_says"),
    ("dispatch/uncovered.py", "if size not in captured and", "if",
     f"{TOLD_AT_START} -k dispatcher_says"),
    ("runtime/setup/remarks.py", "isinstance(value, Enum)", "False", f"{TOLD_AT_START} -k right"),
    (FIRST_STEPS, "or 2 * steps < self.steps", "", f"{TOLD_AT_START} -k first_steps"),
    (FIRST_STEPS, "> decision.mode:", "> 9:", f"{TOLD_AT_START} -k first_steps"),
    ("runtime/parts/log/part.py", "self._first_steps = None", "pass",
     f"{TOLD_AT_START} -k first_steps"),
    (CAPTURER, "self.queue.left([sum(of_graph)", "self.queue.left([of_graph[0]",
     f"{QUEUE} -k ranks_bring"),
    (CAPTURER, "self.memory.pool_freed()\n        self._refresh_active()", "self._refresh_active()",
     f"{QUEUE} -k limit_holds"),
    ("runtime/parts/strategies/wanted.py", "self._by_size.sort(key=lambda i: -self.states[i].hits)",
     "pass", f"{QUEUE} -k idle_time_the_most"),
    (MODEL, "if keep_plan:", "if False:", f"{QUEUE} -k idle_time_the_most"),
    # capabilities: what deletes one fails its test in tests/mission
    (PLANNED, 'LINEAR = "linear"', 'LINEAR = "none"', f"{MISSION}/test_bucketing.py -k linear"),
    ("tools/serve/options.py", "return Path(text)", "raise OSError",
     f"{MISSION}/test_bucketing.py -k file"),
    ("tools/serve/run.py", "Defragmenter(", "None and (", f"{MISSION}/test_warmup.py -k moved"),
    (SAMPLER, '            "sampler",', '            "other",',
     f"{MISSION}/test_warmup.py -k warmed_up"),
    ("compile/ir/plan.py", "cut_at: tuple[str, ...] = ()", "other: tuple[str, ...] = ()",
     f"{MISSION}/test_torch_compile.py -k inductor"),
    ("torch_compat/compiling/inductor.py", '["::".join(names) for names in called]', "[]",
     "tests/compile/test_passes.py -k lowers"),
    (PARTITION, '"force_pointwise_cat": True', '"force_pointwise_cat": False',
     f"{CUT} -k parts_of"),
    (PARTITION, '"reorder_for_locality": False', '"reorder_for_locality": True',
     f"{CUT} -k elementwise"),
    (PARTITION, "if calls != expected:", "if False:", f"{CUT} -k refused"),
    (PARTITION, "scheduler.nodes = calls_together(scheduler.nodes)", "pass",
     f"{CUT} -k elementwise"),
    (PARTITION, "if isinstance(node.node, ir.MultiOutput)", "if False", f"{CUT} -k elementwise"),
    (PARTITION, "hook(partial(_on_a_copy, each))", "hook(each)", f"{CUT_LIVE} -k decoder"),
    ("compile/pieces/contexts.py", "if AUTOCAST in node.meta:", "if False:", f"{CUT} -k autocast"),
    ("compile/pieces/contexts.py", "bool(splits(node))", "True", f"{CUT} -k refused"),
    ("compile/pieces/fingerprint.py", '"called op" if', '"op" if', f"{CUT} -k digest"),
    ("config.py", '(self.compiler != "inductor" or cpp)', "False", f"{CUT} -k only"),
    ("runtime/setup/switches.py", 'settings |= SWITCHES["inductor"]',
     'settings["compiler"] = "eager"', f"{CUT} -k only"),
    ("compile/guards/numerics_check.py",
     "calls[op] = calls[op.overloadpacket] = partial(without_step, op)", "pass",
     "tests/compile/test_numerics_check.py"),
    ("compile/ahead.py", "if request.config.partition is Partition.INDUCTOR:", "if False:",
     f"{CUT_LIVE} -k library"),
    ("runtime/parts/proof/without_breaks.py", "if storage_id(tensor) not in given:", "if False:",
     f"{CUT_LIVE} -k mix"),
    ("runtime/parts/proof/without_breaks.py", "with without_modes():\n            result",
     "if True:\n            result",
     f"{CUT_LIVE} -k decoder"),
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
    ("tools/engine/engine.py", "self.prepared.reads_done().synchronize()", "pass",
     "tests/tools/test_overlap.py -k blocks_move"),
    (BLOCKS, "table[:] = [moved.get(block, block) for block in table]", "pass", DEFRAGMENTER),
    (BLOCKS, "if not self._in_use[block])", "if block)", DEFRAGMENTER),
    ("tools/engine/defragmenter.py", "{part.data_ptr(): part", "{id(part): part", DEFRAGMENTER),
    ("tools/engine/defragmenter.py", "*SIZES[: len(SIZES) % 2]", "", DEFRAGMENTER),
    (SAMPLER, 'f"{seed}/{place}"', 'f"{seed}"', DRAWS),
    (SAMPLER, 'f"{seed}/{place}"', 'f"{place}"', DRAWS),
    (SAMPLER, "places >= top_k", "places > top_k", DRAWS),
    (SAMPLER, "(before >= top_p)", "(before > top_p)", DRAWS),
    (SAMPLER, " & (top_p < 1)", "", DRAWS),
    (SAMPLER, "scores - scores.amax(dim=-1, keepdim=True)", "scores", DRAWS),
    (SAMPLER, "scores / temperature.masked_fill(temperature == 0, 1)", "scores", DRAWS),
    (SAMPLER, "if batch != self._batch:", "if self._batch is None:", DRAWS),
    (f"{CAPTURE}/warmup.py", "if kind in empty or (shapes and kind in skip):", "if kind in empty:",
     f"{STRATEGIES}/test_warmup.py"),
    ("tools/engine/engine.py", "self.copied.synchronize()", "pass",
     "tests/tools/test_overlap.py -k changes_no_token"),
    ("compile/verify.py", "if before.digest != after.digest:", "if False:",
     f"{LIVE}/test_verification.py -k serves_until"),
    (PLANNED, "limits.total_blocks and contexts[-1]", "0 and contexts[-1]",
     f"{BUCKETS} -k filters"),
    (PLANNED, "room if is_edge and 0 <= room < most else context", "context", f"{BUCKETS} -k edge"),
    (PLANNED, "for bucket in every if bucket.phase is phase", "for bucket in every",
     f"{BUCKETS} -k filters"),
    (PLANNED, "if least[0] * least[1] > limits.max_num_tokens", "if True",
     f"{BUCKETS} -k fall_back"),
    ("dispatch/buckets/bucket.py", "if bucket.batch > self.max_num_reqs:", "if False:",
     f"{BUCKETS} -k filters"),
    ("dispatch/buckets/coverage.py", "min(limits.max_num_reqs, limits.max_num_tokens)",
     "limits.max_num_reqs", "tests/dispatch/test_coverage.py -k proof"),
    (LOOKED_UP, "if not rounded.holds(shape):", "if False:", f"{BUCKETS} -k beyond_the_limits"),
    (LOOKED_UP, "rounded if rounded.batch * rounded.query <= self.limits.max_num_tokens else shape",
     "rounded", f"{BUCKETS} -k fall_back"),
    (FROM_FILE, "len(line) - len(code) + invalid.column", "invalid.column",
     f"{BUCKETS} -k bad_line"),
    (FROM_FILE, "if not values or values[MOST_VALUES:]:", "if not values:",
     f"{BUCKETS} -k bad_line"),
    ("dispatch/plan.py", "tuple(index[i] for i in phase.order if i in index)", "phase.order",
     f"{BUCKETS} -k one_full_graph"),
    (f"{STRATEGY}/shares.py", "max(0, taken(i) or 0)", "(taken(i) or 0)", f"{SHARES} -k both_ways"),
    (f"{STRATEGY}/shares.py", "if all(taken(i) is not None for i in others):", "if True:",
     f"{SHARES} -k golden"),
    (f"{STRATEGY}/graph_memory.py", "= dict.fromkeys(self.impossible, 0)", "= {}",
     f"{SHARES} -k beyond"),
    (CAPTURER, "if self._by_phase:\n            groups", "if False:\n            groups",
     "tests/tools/test_features.py -k share_the_memory"),
    ("runtime/capture/warmup.py", "'released' if growth < 0 else 'taken'", "'taken'",
     f"{STRATEGIES}/test_warmup.py -k gives_back"),
    ("tools/engine/buckets.py", "if table.fallbacks[shape] == 1:", "if table.fallbacks[shape]:",
     "tests/tools/test_features.py -k steps_in_buckets"),
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
    (ADDRESSES, "if read(*facts) == places:", "if True:", f"{WEIGHTS} -k at_once"),
    (ADDRESSES, "_without_rows(_place(now)) == _without_rows(then)",
     "_place(now)[0] == then[0]", f"{WEIGHTS} -k another_form"),
    (PART, "relied.addresses.moved() + layers", "relied.addresses.moved()",
     f"{WEIGHTS} -k takes_another_place"),
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
    (CODE, "if self._laid_out(*tensors):", "if True:", f"{STRIDES} -k relies"),
    (INPUTS, "if any_layout or (laid_out and whole):", "if True:", f"{STRIDES} -k copied"),
    (INPUTS, "if not _same_places(tensor, strides):", "if False:", f"{STRIDES} -k first_byte"),
    (INPUTS, "every_step if others_write else padding", "padding", f"{STATIC} -k any_loads"),  # 25
    (INPUTS, "else rows_and_padding:", "else rows:", f"{STATIC} -k failure_25"),
    (INPUTS, "last is not None and extent.covers(last)", "last is not None",
     f"{STATIC} -k any_loads"),
    (WRITES, "writes.append(lambda _: zero_all(zeros))", "pass", f"{STATIC} -k real_rows"),
    (WRITES, "targets += [part for part, _ in self.constants]", "pass", f"{STATIC} -k failure_29"),
    (ATTENTION, "end = tl.minimum(end, begin + size)", "end = end", f"{KERNEL} -k random"),
    (ATTENTION, "if WIDENED:", "if True:", f"{KERNEL} -k tensor_cores"),
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
    (PART, "[*checks, self._addresses(name, relied.addresses)]", "checks",
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
    ("runtime/parts/proof/row_mixing.py", "if found := tried(trial, trial.mixes, *(sized or ())):",
     "if found := None:",
     f"{LIVE}/test_row_mixing.py -k never_padded"),
    ("runtime/parts/proof/row_mixing.py", "if not decide or any(", "if False and any(",
     f"{PADDED} -k six"),
    (TRIALS, "(found := self.differs(first, size))", "False",
     f"{PADDED} -k kernel"),
    (TRIALS, "(found := self.differs(end, first))", "False",
     f"{PADDED} -k uncaptured"),
    (TRIALS, "found[name] = _beyond(first, second, limit)",
     "found[name] = torch.zeros(1)", f"{PADDED} -k expert"),
    (TRIALS, "if moved is not None and found[name].any():", "if False:",
     f"{PADDED} -k slots"),
    (TRIALS, "extreme=True, moved=True)) if pads", "extreme=True)) if pads",
     f"{PADDED} -k slots"),
    (PROOF, "step.attributes.restore()", "pass", f"{LIVE}/test_shadow.py -k sees_python"),
    (PROOF, "            if not repairs:\n                held.restore()",
     "            pass",
     f"{LIVE}/test_shadow.py -k sees_python"),
    (PROOF, "(is_covered and coverage.left > 0)", "coverage.left > 0",
     f"{LIVE}/test_shadow.py -k first_steps"),
    ("runtime/parts/proof/coverage.py", "self.seconds + expected <=",
     "self.seconds + expected > 0 *",
     f"{LIVE}/test_shadow.py -k within_the_share"),
    (PROOF, "synchronize()  # a copy", "pass  # a copy",
     "tests/tools/test_overlap.py -k changes_no_token"),
    (BATCH, ", **held}", "}", f"{PADDED} -k loose"),
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
    (READS, "*map(type, v), ", "", f"{STEP_READS} -k kind_of_change"),
    (READS, "if type(now) is not kind:", "if False:", f"{STEP_READS} -k kind_of_change"),
    (OBSERVER, "observer.missing(obj, name)", "pass", f"{STEP_READS} -k kind_of_change"),
    (OBSERVER, 'self._observer.fact(self, "({key} in {})", key, found)', "pass",
     f"{STEP_READS} -k kind_of_change"),
    (OBSERVER, 'self._noting.bound(f"{path}.{name}", value)', "pass", f"{STEP_READS} -k bound"),
    (OBSERVER, "observer.wrote(obj, name)", "pass", f"{STEP_READS} -k writes"),
    (BINDING, "if {_differs(each, value)}:", "if False:", f"{CALL_FORM} -k names_the_path"),
    (BINDING, "(*{value},) != {keys!r}", "{{*{value}}} != {{*{keys!r}}}", f"{CALL_FORM} -k path"),
    (BINDING, "_pg_type({value}) is not _pg_type(k{index}) or ", "", f"{CALL_FORM} -k path"),
    (TRIALS, "and at not in unwritten", "and True",
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
    ("runtime/capture/recorder.py", "            self._session.agreement.before(name)\n", "",
     f"{STRATEGIES}/test_ranks.py -k beside_a_collective"),
    ("tools/bisect/rerun.py", "self._step.batch.num_tokens, decision.descriptor.num_tokens",
     "self._step.batch.num_tokens, self._step.batch.num_tokens",
     "tests/tools/test_bisect_engine.py -k fast"),
    ("tools/bisect/observe.py", "        return [*self.results, *self.state]",
     "        return [*self.results]", "tests/tools/test_bisect_faults.py -k loses"),
    ("runtime/parts/checks/address_checks.py",
     "        self._trusted = -1\n        self", "        self",
     "tests/runtime/test_addresses.py -k for_its_turn"),
    ("tools/testing.py", "            if place[0] in read and", "            if False and",
     "tests/tools/test_testing.py -k missed"),
    ("runtime/parts/proof/lockstep.py", "            self._perform(turn)\n", "            pass\n",
     f"{STRATEGIES}/test_ranks.py -k wrong_on_one_rank"),
    (CLASSES, "            return Reason.AXIS\n", "            pass\n",
     f"{POLICY} -k in_the_key"),  # 5
    ("tools/engine/metadata.py", "array[:size] = value", "pass",
     "tests/tools/test_attention.py -k failure_29"),
    (CLASSES, "        return Reason.LORA_CASE_MISSING\n", "        pass\n",
     f"{POLICY} -k lora_batches"),  # 8
    (PART, "self._registrations.watch(compiled.model)", "pass",
     f"{WEIGHTS} -k noticed_by_the_next"),
    (PART, "not core.environment.backend.runs_python", "True",
     f"{WEIGHTS} -k noticed_by_the_next"),
    (PART, "register_again(self._core.code.compiled.model)", "pass", f"{WEIGHTS} -k refresh_tells"),
    (PART, "self._registrations.close()", "pass", f"{WEIGHTS} -k torchs_hooks"),
    (TAPED, "if reads and count() > before:", "if False:", f"{FAITHFUL} -k host_read"),
    (TAPED, "if reads and count() > before:", "if reads:", "tests/runtime/test_replay_backend.py"),
    (f"{REPLAY}/host_copies.py", "raise value_read(func)", "pass", f"{FAITHFUL} -k value_read"),
    (OWNERSHIP, "if left := self.left.get(storage_id(tensor)):", "if left := None:",
     f"{LIVE}/test_breakable.py -k leaves_a_break"),
    (TAPED, "self.ownership.refuse_left((args, kwargs))", "pass", f"{FAITHFUL} -k op_left"),
    (FORMS, "if got != dtype or now != dims:", "if now != dims:", f"{TOLD} -k wider"),
    (FORMS, "if got != dtype or now != dims:", "if got != dtype:", f"{TOLD} -k columns"),
    (FORMS, "matter, strict=True)]:", "matter, strict=True)] and False:", f"{TOLD} -k strides"),
    (FORMS, "if found := _FAILED_OP.search(str(error)):", "if found := None:",
     f"{TOLD} -k assertion"),
    (CODE, "if num_tokens in self._ran", "if self._ran", f"{TOLD} -k splitting_op"),
    (BREAKS, "checked_link(compiled, _record_hooks)", "compiled.link(_record_hooks)",
     f"{TOLD} -k splitting_op"),
    (TRIALS, "CheckedOps() if real == padded", "nullcontext() if True",
     f"{TOLD} -k in_a_piece"),
    (QUEUED, "            self._end_watch()\n            raise", "            raise",
     f"{DELAYED} -k disturb_a_start"),
    ("runtime/prepare.py", "without_modes(),", "", f"{DELAYED} -k disturb_a_start"),
    ("runtime/prepared_model.py", "if not isinstance(tensor, torch.Tensor):", "if False:", MISUSE),
    ("runtime/prepared_model.py", "raise NotCopyable()", "return super().__reduce_ex__(protocol)",
     MISUSE),
    ("runtime/parts/log/part.py", "if not callable(getattr(observer, name, None)):", "if False:",
     MISUSE),
    (STEPS, "self._must_fit(args, kwargs, error)", "pass", MISUSE),
    ("compile/trace/dynamo.py", "id(value) not in references:", "False:", MISUSE),
    ("dispatch/batch.py", "raise BatchInvalid(batch=self, fault=fault)", "pass", MISUSE),
    (FIRST, "first, again())", "first, (set(), set()))", f"{SET_UP} -k each_run"),
    (FIRST, "        if written:", "        if False:", f"{SET_UP} -k fills"),
    (FIRST, "        before.restore()\n        raise", "        raise", f"{SET_UP} -k fills"),
    (FIRST, "if self.op is None and is_custom(func) and self._changed():", "if False:", SET_UP),
    (FIRST, "    if set_up:\n", "    if False:\n", f"{SET_UP} -k are_kept"),
    (BATCH, 'error.facts["left"] == STAYS', "False", f"{SET_UP} -k fills"),
    (BATCH, "            metadata.restore()", "            pass", f"{SET_UP} -k derived"),
    ("runtime/capture/recorder.py", "metadata.restore()", "pass", f"{SET_UP} -k derived"),
    (PROOF, "set(due.attributes.changed()) - self._changing", "set()", f"{SET_UP} -k proof"),
    (PROOF, "self.proved.clear()", "pass", f"{SET_UP} -k proof"),
    (DELAYED_STEP, "if compiled.traced else _named_tensors(compiled.model)", "",
     f"{DELAYED} -k without_a_trace"),
    # packages in which the protections above are few
    ("cache/directory.py", "if read_file(path, ref.size) != content:", "if False:",
     f"{OF_CACHE}damage.py {OF_CACHE}disk.py"),
    ("cache/directory.py", 'if not intact and is_intact(name, kept / "file"):', "if False:",
     f"{OF_CACHE}damage.py {OF_CACHE}processes.py"),
    ("cache/evict.py", "fits = entry.whole and total", "fits = total", f"{OF_CACHE}evict.py"),
    ("cache/evict.py", "if fits or entry.idle < limits.grace:", "if fits:", f"{OF_CACHE}evict.py"),
    ("cache/evict.py", "if name not in kept and _idle(root / name) >= grace", "if name not in kept",
     f"{OF_CACHE}evict.py"),
    ("cache/files.py", "if status.st_uid != os.geteuid():", "if False:", f"{OF_CACHE}trust.py"),
    ("cache/files.py", "if status.st_mode & OTHERS_ANY:", "if False:",
     f"{OF_CACHE}trust.py {OF_CACHE}disk.py"),
    ("cache/keys/factors.py", "if not math.isfinite(value):", "if False:", f"{OF_CACHE}factors.py"),
    ("cache/keys/factors.py",
     "sorted((plain(name, item, depth + 1) for item in value), key=canonical)",
     "[plain(name, item, depth + 1) for item in value]", f"{OF_CACHE}factors.py"),
    ("cache/layers.py", "if (manifest.kind, manifest.key.digest) != (kind, key_digest):",
     "if False:", f"{OF_CACHE}damage.py"),
    ("cache/layers.py", "if distrust := layer.refuses(manifest, signature):",
     "if distrust := None:", f"{OF_CACHE}layers.py -k untrusted"),
    ("cache/lease.py", "if is_there and not was_there:", "if False:", f"{OF_CACHE}lease.py"),
    ("cache/lease.py", "elif now - changed > EXPIRES_SECONDS:", "elif False:",
     f"{OF_CACHE}lease.py -k dead_machine"),
    ("cache/manifest.py",
     "len(content) == self.size and hashlib.sha256(content).hexdigest() == self.sha256",
     "len(content) == self.size", f"{OF_CACHE}damage.py"),
    ("cache/signing.py", "if mode & OTHERS_ANY:", "if False:", f"{OF_CACHE}signing.py"),
    ("cache/signing.py", "int(parts[2]) < key.epoch", "False", f"{OF_CACHE}signing.py"),
    ("cache/signing.py", "if parts[1] in self.revoked:", "if False:", f"{OF_CACHE}signing.py"),
    ("cache/signing.py", "        if key.expired:", "        if False:", f"{OF_CACHE}signing.py"),
    ("compile/guards/prover.py", "if not holds(*point):", "if False:", f"{OF_COMPILE}prove.py"),
    ("compile/guards/prover.py",
     'return Proof(True, "trial") if exhaustive else Proof(None, "too many sizes to try")',
     'return Proof(True, "trial")', f"{OF_COMPILE}prove.py"),
    ("compile/pieces/fingerprint.py", '"grad" if tensor.requires_grad else "",', '"",',
     f"{OF_COMPILE}fingerprint.py"),
    ("compile/plan/codegen.py", 'if name.startswith("t") and name not in kept:', "if False:",
     f"{OF_COMPILE}codegen.py"),
    ("dispatch/capture_sizes.py", "        elif reach > end:\n", "        elif False:\n",
     f"{OF_DISPATCH}sizes.py"),
    ("dispatch/capture_sizes.py", "if size < before:", "if False:", f"{OF_DISPATCH}sizes.py"),
    ("dispatch/decision_table.py", "if num_tokens < self.preference.least_tokens[graph_index]:",
     "if False:", f"{OF_DISPATCH}dispatcher.py"),
    ("dispatch/decision_table.py", "if key.num_reqs is not None and num_reqs > key.num_reqs:",
     "if False:", f"{OF_DISPATCH}dispatcher.py"),
    ("dispatch/decision_table.py", "            key.lora_case,\n", "",
     f"{OF_DISPATCH}dispatcher.py"),
    ("dispatch/decision_table.py", "            not key.for_decode,\n", "",
     f"{OF_DISPATCH}dispatcher.py"),
    ("dispatch/decision_table.py", "        max_reqs = min(max_reqs, key.num_reqs)", "        pass",
     f"{OF_DISPATCH}dispatch_properties.py {OF_DISPATCH}dispatcher.py"),
    ("dispatch/dispatcher.py", "            self._drop_fast_path()\n", "            pass\n",
     f"{OF_DISPATCH}dispatcher.py"),
    ("dispatch/dispatcher.py", "            if len(self.above) >= _CACHE_SIZE:\n",
     "            if False:\n", f"{OF_DISPATCH}dispatcher.py"),
    ("dispatch/dispatcher.py", "(longest is not None and longest < query_len)", "False",
     f"{OF_DISPATCH}dispatcher.py -k wrong_type"),
    ("dispatch/resolve.py", "return least >= AttentionSupport.UNIFORM_BATCH", "return True",
     f"{OF_DISPATCH}resolve.py"),
    ("dispatch/resolve.py", "if mode.needs_pieces and not pieces:", "if False:",
     f"{OF_DISPATCH}resolve.py"),
    ("events.py", "self.dropped += len(self.events) == self.events.maxlen", "pass",
     "tests/test_events.py -k bound"),
    ("tools/cli/app.py", "return _fail(str(error), BAD_VALUE if bad_value else FAILED)",
     "return _fail(str(error), FAILED)", f"{OF_TOOLS}cli.py"),
    ("tools/cli/app.py", "if error.errno == errno.EPIPE:", "if False:",
     f"{OF_TOOLS}cli_failures.py -k reader"),
    ("tools/engine/block_manager.py", "if missing > len(self._free):", "if False:",
     f"{OF_TOOLS}block_manager.py"),
    ("tools/engine/scheduler.py", "if num_tokens > self.blocks.capacity:", "if False:",
     f"{OF_TOOLS}scheduler.py"),
    ("tools/explain/advice.py", 'if row["share"] > MUCH_PADDING', "if False",
     f"{OF_TOOLS}explain.py"),
    ("tools/explain/advice.py", 'if not guard["proved"]:', "if False:", f"{OF_TOOLS}explain.py"),
    ("tools/integrations/prometheus.py", "if now < self._due:", "if False:",
     f"{OF_TOOLS}metrics.py"),
    ("torch_compat/basics/ops.py",
     "[value for value, written in given_arguments(op, args, kwargs) if written]",
     "[value for value, written in given_arguments(op, args, kwargs)]", f"{OF_COMPAT}ops.py"),
    ("torch_compat/basics/ops.py", 'if "int" in str(argument.type) else', "if False else",
     f"{OF_COMPAT}ops.py"),
    ("torch_compat/basics/symbolic.py",
     "return decided.is_singleton() and decided.lower is sympy.true", "return True",
     f"{OF_COMPAT}symbolic.py"),
    (IN_WORKERS, "if future.done() or silent:", "if future.done():", f"{WORKERS} -k says_nothing"),
    (IN_WORKERS, "reversed(self._futures.items())", "tuple(self._futures.items())",
     f"{WORKERS} -k taken_back"),
    ("compile/backends/worker.py", "if difference := diff(machine.key.factors, own.factors):",
     "if difference := ():", f"{WORKERS} -k refuses"),
    ("torch_compat/basics/settings.py", "used.callback(before._set)", "pass",
     "tests/torch_compat/test_settings.py -k for_a_while"),
    ("torch_compat/basics/modules.py", "            tensors[name] = tensor\n", "            pass\n",
     "tests/torch_compat/test_modules.py -k for_a_while"),
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
