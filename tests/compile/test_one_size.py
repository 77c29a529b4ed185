"""Code for one size of the reference decoder: sizes of weights stay numbers."""

import pytest

from piecegraph import Config, Events, prepare
from piecegraph.tools.engine.decoder_config import DecoderConfig
from piecegraph.tools.engine.model import Decoder

pytestmark = pytest.mark.compile


def test_code_for_one_size_has_no_guard_on_weights():
    events = Events()
    config = Config(
        inputs={"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"},
        splitting_ops=("piecegraph_reference::paged_attention",),
        max_num_tokens=64,
        max_num_reqs=64,
        codegen={"sizes": (16,)},
        graph_mode="NONE",
        cache=False,
    )
    prepare(Decoder(DecoderConfig(layers=1, hidden=256), seed=0).eval(), config, events=events)
    ranges = [event.facts["range"] for event in events.named("compile.end")]
    assert [16, 16] in ranges
