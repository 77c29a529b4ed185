"""Configurations of released models: their `config.json`, written down from memory.

What a published file leaves at the default of its class is left out here too. Weights are never
used: the table of docs/families.md is about configurations.
"""

import json
from pathlib import Path

RELEASED = json.loads(Path(__file__).with_suffix(".json").read_text())
"""By the name under which it is published."""


def released_model(name, dtype):
    """The model class and configuration, without memory for weights."""
    import torch
    import transformers

    settings = {"dtype": dtype, **RELEASED[name]}
    kind = settings.pop("class", None)
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        if kind is not None:
            return getattr(transformers, kind)(config).to(dtype)
        return transformers.AutoModel.from_config(config, dtype=dtype)
