"""The local engine against transformers' own greedy generation with the real SmolLM2."""

from __future__ import annotations

import pytest
import torch

from components.models.paths import model_dir
from components.models.smollm2 import smollm2
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM.<|im_end|>\n"
TURNS = {
    "facts": ["What is the capital of France?", "And of Italy?", "Which of the two is larger?"],
    "fruit": ["Name three fruits.", "Which of them is yellow?", "Spell it backwards."],
}
MAX_NEW_TOKENS = 24


def theirs(model, context: list[int], stop: int) -> list[int]:
    out = model.generate(
        torch.tensor([context]),
        attention_mask=torch.ones(1, len(context), dtype=torch.long),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=stop,
        pad_token_id=stop,
    )
    return out[0, len(context) :].tolist()


@pytest.mark.model
def test_greedy_turns_equal_transformers_token_by_token():
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    directory = model_dir("smollm2-135m-instruct")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    stop = tokenizer.token_to_id("<|im_end|>")
    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    engine = LocalEngine(smollm2(directory, dtype=torch.float32), max_tokens=512, max_batch_size=4)
    system = tokenizer.encode(SYSTEM).ids
    contexts = {name: list(system) for name in TURNS}
    for turn in range(3):
        requests = []
        for name, questions in TURNS.items():
            text = f"<|im_start|>user\n{questions[turn]}<|im_end|>\n<|im_start|>assistant\n"
            contexts[name] += tokenizer.encode(text).ids
            requests.append(
                SampleRequest(
                    rollout_id=name,
                    context=tuple(contexts[name]),
                    shared_len=len(system),
                    max_new_tokens=MAX_NEW_TOKENS,
                    stop_ids=frozenset({stop}),
                    temperature=0.0,
                    seed=0,
                )
            )
        for name, result in zip(TURNS, engine.generate(requests), strict=True):
            assert list(result.ids) == theirs(reference, contexts[name], stop), (name, turn)
            with torch.no_grad():
                logits = reference(torch.tensor([contexts[name] + list(result.ids)])).logits[0]
            logprobs = logits[len(contexts[name]) - 1 : -1].log_softmax(-1)
            expected = logprobs[torch.arange(len(result.ids)), list(result.ids)].tolist()
            assert result.logprobs == pytest.approx(expected, abs=1e-4)
            contexts[name] += [*result.ids, *tokenizer.encode("\n").ids]
    assert engine.stats.shared_tokens == len(system)
