"""The parts of a prepared model, and their order. The only importer of parts.

The order is that of `parts_of`. What it decides:

- around a step: a proof compares what an engine is given, so it is outermost. The lock under which
  code is replaced covers one run of a step, not the runs of its proof. Observers are innermost:
  the time of a step is not that of its proof.
- before a step: code is replaced before a strategy captures for it.
- around the capture of the startup set: ranks agree first, so that a rank that differs is named
  before any of them captures; a model that is served uncompiled captures later; what regions have
  compiled is stored at the end.
- checks come in their own order in each graph's tuple; no other part has any.

Elsewhere the order does not matter, which `tests/runtime/test_parts.py` shows by permutations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..cache import Cache
from ..cache.keys.environment import parts_off
from ..compile.eager_model import as_it_is
from ..compile.ir.compilation import CompileRequest
from ..compile.pipeline import compile_model
from ..compile.plan.compiled_model import CompiledModel
from ..config import Config
from .core.exchange import Exchange
from .core.records import Records
from .core_model import CoreModel
from .part import Part
from .parts.checks.part import ChecksPart
from .parts.log.part import LogPart
from .parts.log.step_log import LoggedStep as LoggedStep
from .parts.log.step_log import StepObserver as StepObserver
from .parts.proof import row_mixing
from .parts.proof.part import ProofPart
from .parts.ranks.part import RanksPart
from .parts.ranks.ranks import Ranks as Ranks
from .parts.regions.part import RegionsPart
from .parts.seal.part import SealPart
from .parts.starts.background import Background
from .parts.starts.part import StartsPart, first_code
from .parts.starts.verification import Verification
from .parts.strategies.ledger import MemoryPlan as MemoryPlan
from .parts.strategies.part import StrategiesPart
from .prepared_model import PreparedModel
from .setup.model_policy import FindMixedRows, ModelPolicy
from .setup.open_cache import cache_root

PARTS: tuple[type[Part], ...] = (
    ProofPart, RanksPart, StartsPart, RegionsPart, StrategiesPart, LogPart, ChecksPart, SealPart,
)  # fmt: skip
"""All parts in their order. `PIECEGRAPH_OFF=<part>` turns one off."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The code that a start begins with, what runs beside its steps, and the policy of code.

    `look` is what a thread does beside steps for the policy of other code.
    """

    compiled: CompiledModel
    beside: Background | Verification | None = None
    policy_of: ModelPolicy | None = None
    look: ModelPolicy | None = None
    ranks: Ranks | None = None


def exchange_of(ranks: Ranks | None) -> Exchange | None:
    """How this process exchanges facts with other ranks, if there are any."""
    return None if ranks is None or "ranks" in parts_off() else ranks.exchange


def mixed_rows_finder(cache: Cache) -> FindMixedRows | None:
    """What finds the pieces in which padding reaches real rows; None if nothing looks."""
    return None if "proof" in parts_off() else partial(row_mixing.known_mixed_rows, cache)


def look_beside_steps(policy_of: ModelPolicy, cache: Cache) -> ModelPolicy:
    """What a thread does beside steps, so that `policy_of` need not run pieces between two steps.

    Its records are apart: what is found is recorded where the code begins to serve.
    """
    finder = None if "proof" in parts_off() else partial(row_mixing.keep_beside_steps, cache)
    return replace(policy_of, records=Records(), find_mixed_rows=finder)


def begin(
    request: CompileRequest,
    config: Config,
    records: Records,
    policy_of: ModelPolicy,
    ranks: Ranks | None,
) -> Beginning:
    look = look_beside_steps(policy_of, request.cache)
    if "starts" in parts_off():
        compiled, beside = compile_model(request), None
    else:
        compiled, beside = first_code(request, config, records, look)
    return Beginning(compiled, beside, policy_of, look, ranks)


def assemble(core: CoreModel, beginning: Beginning) -> PreparedModel:
    """The prepared model of `core` with all parts that are not switched off."""
    off = parts_off()
    parts = [part for part in parts_of(core, beginning) if part.name not in off]
    core.parts.set(parts, PARTS)
    core.start_parts()
    prepared = PreparedModel(core)
    for part in parts:
        if isinstance(part, StartsPart):
            part.start()
    return prepared


def parts_of(core: CoreModel, beginning: Beginning) -> Iterator[Part]:
    """The parts that the settings ask for, in their order."""
    config = core.environment.config
    if config.shadow is not None:
        folder = config.codegen.dump_dir or cache_root(config)
        proof = ProofPart(
            core, config.shadow, as_it_is(beginning.compiled.model), folder and folder / "shadow"
        )
        yield proof
    if beginning.ranks is not None:
        yield RanksPart(core, beginning.ranks)
    if beginning.policy_of is not None and beginning.look is not None:
        yield StartsPart(core, beginning.policy_of, beginning.beside, beginning.look)
    yield RegionsPart(core)
    yield StrategiesPart(core)
    yield LogPart(core)
    yield ChecksPart(core)
    yield SealPart(core)
