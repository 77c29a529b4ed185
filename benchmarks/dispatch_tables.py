"""Write the measured tables of benchmarks/README.md: `python benchmarks/dispatch_tables.py [NAME]`.

`drift` is computed from the excerpt of a trace that ships with the package. `features` serves it
with the reference engine, each step verified against the eager model: a minute.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import piecegraph
from piecegraph.dispatch import BucketStrategy
from piecegraph.tools.cli.app import main
from piecegraph.tools.serve.fitted_sizes import fit_trace
from piecegraph.tools.serve.trace import EXCERPT, read_trace

PAGE = Path(piecegraph.__file__).parent / "benchmarks" / "README.md"
MODEL = "layers=1,hidden=16,heads=2,kv_heads=1,intermediate=32,vocab=32"  # decisions do not differ
RATES, GRAPHS = (1.0, 2.0, 3.0, 6.0), (48, 24)

FEATURES = (
    (),
    ("--lora", "4"),
    ("--speculate", "3"),
    ("--lora", "4", "--speculate", "3"),
    *(("--buckets", strategy) for strategy in BucketStrategy),
)


def drift_table() -> list[str]:
    requests = read_trace(EXCERPT)
    rows = [
        "| graphs | rate | fitted on | chosen on | held out | drift: default | drift: fitted |"
        " fitted / default |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for graphs in GRAPHS:
        for rate in RATES:
            result = fit_trace(requests, rate=rate, max_graphs=graphs)
            drift = result["drift"]
            parts = (
                f"{part['default']:.1%} / {part['fitted']:.1%}" for part in result["parts"].values()
            )
            met = (f"{drift[name]:.1%}" for name in ("default", "fitted"))
            ratio = f"{drift['fitted'] / drift['default']:.2f}"
            rows.append(" | ".join([f"| {graphs}", f"{rate:g} x", *parts, *met, f"{ratio} |"]))
    return rows


def features_table() -> list[str]:
    return [
        "| options | steps | FULL | PIECEWISE | padding | speculation | LoRA cases |",
        "|---|---|---|---|---|---|---|",
        *map(features_row, FEATURES),
    ]


def features_row(options: tuple[str, ...]) -> str:
    report = run(*options)
    steps = Counter[str]()
    for row in report["dispatch"]:
        steps[row["mode"]] += row["count"]
    shares = (f"{steps[mode] / steps.total():.0%}" for mode in ("FULL", "PIECEWISE"))
    computed = sum(row["count"] * row["num_tokens"] for row in report["dispatch"])
    padding = sum(row["padded_tokens"] for row in report["dispatch"]) / computed
    title = f"`{' '.join(options)}`" if options else "none of these"
    cells = [title, f"{steps.total()}", *shares, f"{padding:.1%}", *features(report)]
    return f"| {' | '.join(cells)} |"


def features(report: dict[str, Any]) -> list[str]:
    speculation, lora = report["speculation"], report["lora"]
    drafts = adapters = ""
    if speculation:
        accepted, proposed = speculation["accepted"], speculation["proposed"]
        drafts = f"{accepted} of {proposed} accepted, {speculation['steps_saved']} steps saved"
    if lora:
        adapters = ", ".join(f"{each['case']}: {each['steps']}" for each in lora["cases_used"])
    return [drafts, adapters]


def run(*options: str) -> dict[str, Any]:
    """The report of a run that verified each of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = ["run", "--model", MODEL, "--backend", "eager", "--no-cache", "--verify", "all"]
        with redirect_stdout(io.StringIO()):
            failed = main([*command, "--json", str(path), *options])
        report: dict[str, Any] = json.loads(path.read_text())
    assert not failed
    assert report["verification"]["ok"]
    assert report["verification"]["steps"] == report["serving"]["steps"]
    return report


TABLES = {"drift": drift_table, "features": features_table}


def with_table(page: str, name: str, rows: list[str]) -> str:
    """`page` with the lines between the two comments `name` replaced."""
    before, start, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    return before + start + "\n" + "\n".join(rows) + "\n\n" + end + after


if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        PAGE.write_text(with_table(PAGE.read_text(), name, TABLES[name]()))
