"""Every family with adapters, end to end: the engine's tokens against Hugging Face's and PEFT's own, in fp32.

All requests run in one mixed batch, in a pool of pages so small that sequences are preempted.
"""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_decoder import one_thread  # noqa: F401
from tiny_engine import TinyEngine
from tiny_families import VOCAB, save_model

from engine.core.types import SamplingParams

NUM_TOKENS, NUM_PROMPTS, NUM_PAGES = 32, 8, 60
CASES = ("qwen2_window", "qwen3", "smollm3", "granite", "olmo2")
PROMPTS = [[random.Random(seed).randrange(VOCAB) for _ in range(5 + 2 * seed)] for seed in range(NUM_PROMPTS)]


def save_adapter(family, folder, **options):
    """Saves a random adapter of all linear layers, as PEFT does, and returns the model that has it."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)
    model = get_peft_model(save_model(family, folder / "model"), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder / "adapter")
    return model.eval()


@torch.inference_mode()
def continuation(model, prompt, tokens):
    """Returns the tokens that the model finds likeliest after the prompt and each part of `tokens`."""
    return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("family", CASES)
def test_tokens_equal_hugging_faces_and_pefts(family, tmp_path):
    peer = save_adapter(family, tmp_path)
    engine = TinyEngine(tmp_path / "model", tmp_path / "adapter", num_pages=NUM_PAGES)
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.ask(f"{index}", prompt, greedy, "adapter" if index % 2 else "base")
    engine.finish()
    assert engine.engine.state.counters.preemptions > 0
    for index, prompt in enumerate(PROMPTS):
        tokens = engine.texts[f"{index}"]
        assert len(tokens) == NUM_TOKENS
        if index % 2:
            assert tokens == continuation(peer, prompt, tokens)
        else:
            with peer.disable_adapter():
                assert tokens == continuation(peer, prompt, tokens)
