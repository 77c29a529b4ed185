"""The table of docs/families.md: released configurations through the adapter.

python -m tests.compile.released_table RESULTS.json [NAME…] [--compiler inductor]

Each configuration of released.json is proved as it is published. A copy with its widths reduced and
all else as published is then prepared on the replay backend with poisoned memory, and requests in
PIECEWISE steps are compared with its own `forward(input_ids)`, alone and without position ids.
Pieces are kept as text, or by Inductor. A second process does so again from the bundle, with other
weights (`warm`).
Each start has a process of its own, forked from this one, which prepares nothing. Rows are added
to a JSON file as they come; the program may be started again, and several at once with a file of
their own. `--beside` prepares all copies of a file in one process, one after the other.
`--table FILE…` prints the table.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import pickle
import re
import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once for all processes
import transformers
import transformers.integrations.flash_attention
import transformers.integrations.moe

import piecegraph as pg
from piecegraph.compile.ir import registered_compilers as compilers
from piecegraph.errors import PiecegraphError
from piecegraph.tools.integrations.transformers import PackedModel, PackedRequests, proof
from piecegraph.tools.integrations.transformers.rope import settle_rope
from piecegraph.tools.integrations.transformers.routing import errors_of
from piecegraph.tools.integrations.transformers.small import (
    build_calm,
    counterparts,
    small_configs,
)
from tests.text_compiler import EntryPoint

from .released import RELEASED, released_model

STEPS = ((1,), (7,), (33,), (64,), (3, 1, 20), (40, 5, 12))


@dataclass(frozen=True)
class Copy:
    """A published configuration with its widths reduced, and what was proved of the published one.

    It is kept beside its cache, from which later starts prepare it."""

    kind: type
    config: Any
    dtype: str
    compiler: str
    proof: proof.Requirements
    cache: Path

    def model(self, others=False):
        """With random weights, or `others`, and buffers as transformers casts them."""
        model = build_calm(self.kind, self.config)
        for weight in model.parameters() if others else ():
            weight.data = weight.data.roll(1, 0)
        buffers = (b for name, b in model.named_buffers() if "freq" not in name)
        for tensor in (*model.parameters(), *buffers):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(getattr(torch, self.dtype))
        model.config.dtype = getattr(torch, self.dtype)
        settle_rope(model)
        return model

    def prepared(self, others=False):
        """The model, the one for steps, and that prepared."""
        own = self.model(others)
        proof.prove = lambda model: self.proof
        packed = PackedModel(copy.deepcopy(own), config=pg.Config(cache_dir=self.cache))
        config = pg.Config(
            **packed.settings, max_num_tokens=64, max_num_reqs=4, capture_sizes=(4, 64),
            graph_mode="PIECEWISE", compiler=self.compiler, cache_dir=self.cache,
        )  # fmt: skip
        options = pg.ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True)
        backend = pg.ReplayBackend(options)
        return own, packed, pg.prepare(packed, config, backend=backend, layers=packed.layers)


def cold(name, dtype, compiler, folder):
    """The proof of a published configuration, and one cold start of its copy with its steps."""
    began = time.perf_counter()
    published = released_model(name, getattr(torch, dtype))
    try:
        with errors_of(published):  # once for all compilers
            known = proof.proven(published, pg.Config(cache_dir=folder.parent / "proofs"))
    except PiecegraphError as error:
        seconds = round(time.perf_counter() - began, 1)
        return {"outcome": "refused", "reason": str(error), "seconds": seconds}
    row = {"seconds": known.seconds, "offset": known.offset, "padding": known.padding}
    *_, config = small_configs(published)
    mixers = counterparts(known.mixers, type(published), published.config, config)
    known = replace(known, mixers=mixers)
    small = Copy(type(published), config, dtype, compiler, known, folder)
    try:
        row |= compared(small)
    except PiecegraphError as error:
        return {**row, "outcome": "refused", "reason": str(error)}
    (folder / "copy").write_bytes(pickle.dumps(small))
    return row


def compared(small, others=False):
    """One start and its steps."""
    own, packed, prepared = small.prepared(others)
    dtype = small.dtype
    prepared.capture(lambda descriptor, mode: PackedRequests((descriptor.num_tokens,)))
    exact = copy.deepcopy(own).float() if dtype != "float32" else own
    torch.manual_seed(0)
    modes, reasons, worst, right = set(), set(), 0.0, True
    vocabulary = own.get_input_embeddings().num_embeddings
    for lengths in STEPS:
        requests = [torch.randint(3, min(vocabulary, 500), (length,)) for length in lengths]
        positions = torch.cat([torch.arange(length) for length in lengths])
        decision = prepared.dispatch(pg.Batch(sum(lengths), len(lengths)))
        modes.add(decision.mode.name)
        if decision.mode.name == "NONE":
            reasons.add(decision.reason.value)
        result = prepared.run(
            decision, torch.cat(requests), positions, metadata=PackedRequests(lengths)
        )
        want = torch.cat([exact(input_ids=ids[None])[0][0] for ids in requests])
        alone = torch.cat([own(input_ids=ids[None])[0][0] for ids in requests])
        errors = proof.row_errors(result, want)
        limits = torch.full_like(errors, 1e-4)
        if dtype != "float32":
            limits = proof.row_limits(errors, proof.row_errors(alone, want), result.dtype)
        right &= bool((errors <= limits).all())
        worst = max([worst, *errors[limits.isfinite()].tolist()])
    outcome = "equal" if right else "wrong"
    alone = [mixer.module for mixer in packed.layers.values() if not mixer.by_row]
    mixers = sorted({type(module).__name__ for module in alone})
    mixed = prepared.report()["rows_mixed"]
    why = {"reason": f"no graph: {', '.join(sorted(reasons))} {mixed or ''}"} if reasons else {}
    return {
        **why,
        "outcome": outcome if modes == {"PIECEWISE"} else f"{outcome} (NONE)",
        "difference": worst,
        "mixers": mixers,
        "hit": bool(prepared.compiled.from_bundle),
        "kept": not prepared.report()["cache"]["not_cacheable"],
    }


def hit(folder):
    """Whether a start is warm."""
    small = pickle.loads((folder / "copy").read_bytes())
    return bool(small.prepared()[2].compiled.from_bundle)


def warm(folder):
    """Whether a start with other weights is warm, and its steps are equal."""
    row = compared(pickle.loads((folder / "copy").read_bytes()), others=True)
    return row["hit"] and row["outcome"].startswith("equal")


def beside(folders):
    """Whether each start is warm in one process, after those before it."""
    results = []
    for folder in folders:
        try:
            results.append(hit(folder))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}"[:300])
        torch.compiler.reset()
    return results


def apart(function, *args):
    """What `function` returns in a forked process, or a RuntimeError with its error."""
    with tempfile.NamedTemporaryFile() as file:
        pid = os.fork()
        if pid == 0:
            try:
                answer = True, function(*args)
            except BaseException as error:
                first = (str(error).strip().splitlines() or [""])[0]
                answer = False, f"{type(error).__name__}: {first}"[:400]
            Path(file.name).write_bytes(pickle.dumps(answer))
            os._exit(0)
        os.waitpid(pid, 0)
        content = Path(file.name).read_bytes()
    done, result = pickle.loads(content) if content else (False, "the process ended")
    if not done:
        raise RuntimeError(result)
    return result


def row_of(name, dtype, compiler, root):
    """One row of the table."""
    row = {"name": name, "dtype": dtype, "compiler": compiler}
    row["family"] = RELEASED[name]["model_type"]
    folder = root / re.sub(r"\W", "_", f"{name} {dtype} {compiler}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        row |= apart(cold, name, dtype, compiler, folder)
        if (folder / "copy").exists():
            row |= {"warm": apart(warm, folder), "folder": str(folder)}
    except RuntimeError as error:
        row |= {"outcome": row.get("outcome", "failed"), "reason": str(error)}
    return row


def table(rows):
    """The rows as Markdown: one line for each configuration."""
    by = {}
    for row in rows:
        by.setdefault(row["name"], {})[row["dtype"], row["compiler"]] = row
    text = [row for found in by.values() for row in found.values() if row["compiler"] == "text"]
    kinds = ("equal", "equal (NONE)", "refused", "wrong", "wrong (NONE)", "failed")
    counts = {kind: sum(row["outcome"] == kind for row in text) for kind in kinds}
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    warm = [row["warm"] for row in text if "warm" in row]
    beside = [row["beside"] is True for row in text if "beside" in row]
    compiled = [row for row in rows if row["compiler"] == "inductor" and row["outcome"] == "equal"]
    names = "configuration | family | float32 | bfloat16 | warm | beside | proof"
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}: {len(by)} released configurations, {len(text)} rows "
        f"of a dtype: {counted}, {counts['wrong'] + counts['wrong (NONE)']} wrong. "
        f"{sum(warm)} of {len(warm)} are warm in a second process, {sum(beside)} of "
        f"{len(beside)} in one process after the others. {len(compiled)} were compared under "
        "Inductor too.",
        "",
        f"| {names} | mixers, or why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in sorted(by.items(), key=lambda item: item[0].lower()):
        lines.append(_line(name, found))
    return "\n".join(lines)


def _line(name, found):
    parts = [found.get((dtype, "text"), {}) for dtype in ("float32", "bfloat16")]
    cells = [
        " ".join(
            [
                part.get("outcome", ""),
                *(f"{part[key]:.0e}" for key in ("difference",) if key in part),
            ]
        )
        for part in parts
    ]
    if found.get(("float32", "inductor"), {}).get("outcome") == "equal":
        cells[0] += ", Inductor"
    for key in ("warm", "beside"):
        known = [("yes" if part[key] is True else "no") for part in parts if key in part]
        cells.append(", ".join(dict.fromkeys(known)))
    cells.append(f"{max((part.get('seconds', 0.0) for part in parts), default=0.0):.0f} s")
    mixers = dict.fromkeys(mixer for part in parts for mixer in part.get("mixers", ()))
    why = [", ".join(mixers), *(part["reason"] for part in parts if "reason" in part)]
    padding = {part["padding"] for part in parts if part.get("padding") is not None}
    why += [f"no token {token}" for token in padding]
    text = "; ".join(part for part in dict.fromkeys(why) if part)
    text = re.sub(r"(?<=at )/\S*?/(?=transformers/|tools/)", "", text)
    family = next(iter(found.values()))["family"]
    text = text.replace("|", "/").replace("\n", " ")
    return f"| {name} | {family} | {' | '.join(cells)} | {text} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--compiler", default="text")
    parser.add_argument("--root", type=Path, help="where caches of the copies are kept")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")
    compilers.entry_points = lambda group: [EntryPoint()]
    transformers.logging.set_verbosity_error()
    if given.table:
        files = [given.results, *map(Path, given.names)]
        print(table([row for file in files for row in json.loads(file.read_text())]))
        return
    rows = json.loads(given.results.read_text()) if given.results.exists() else []
    done = {(row["name"], row["dtype"], row["compiler"]) for row in rows}
    root = given.root or Path(tempfile.mkdtemp())
    if given.beside:
        kept = [row for row in rows if row.get("warm")]
        results = apart(beside, [Path(row["folder"]) for row in kept])
        for row, result in zip(kept, results, strict=True):
            row["beside"] = result
        given.results.write_text(json.dumps(rows, indent=1))
        print(sum(result is True for result in results), "of", len(results))
        return
    for name in given.names or RELEASED:
        for dtype in ("float32", "bfloat16"):
            key = (name, dtype, given.compiler)
            if key in done and not given.names:
                continue
            row = row_of(*key, root)
            rows = [r for r in rows if (r["name"], r["dtype"], r["compiler"]) != key]
            rows.append(row)
            given.results.write_text(json.dumps(rows, indent=1))
            shown = (row.get(k, "") for k in ("outcome", "difference", "warm", "seconds"))
            print(name, dtype, *shown, row.get("reason", "")[:300], flush=True)


if __name__ == "__main__":
    main()
