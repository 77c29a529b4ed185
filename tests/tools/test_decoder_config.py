"""Model sizes as text."""

import pytest

from piecegraph.tools.engine.decoder_config import PRESETS, DecoderConfig, parse_decoder_config
from piecegraph.tools.engine.model import Decoder


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_consistent(name):
    config = parse_decoder_config(name)
    assert config.hidden % config.heads == 0
    assert config.heads % config.kv_heads == 0


def test_the_weights_are_counted():
    config = DecoderConfig(2, 16, 4, 2, 24, 50)
    weights = Decoder(config, seed=0).parameters()
    assert config.num_weights == sum(weight.numel() for weight in weights)


def test_sizes_differ_from_a_preset():
    assert parse_decoder_config("small, layers = 2").layers == 2
    assert parse_decoder_config("small,layers=2").hidden == PRESETS["small"].hidden


def test_sizes_alone_differ_from_the_tiny_preset():
    assert parse_decoder_config("layers=3") == DecoderConfig(layers=3)
