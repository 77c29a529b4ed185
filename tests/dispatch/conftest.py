"""The engine limits of the worked examples."""

from __future__ import annotations

from piecegraph.dispatch import BucketLimits

EXP_4096 = BucketLimits(128, 2048, 4096, max_num_reqs=64, max_prefill_reqs=16)
