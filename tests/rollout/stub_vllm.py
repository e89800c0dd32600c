"""A module that stands for vLLM where only the protocol is under test: it draws nothing, and counts what it is asked.

`stub_vllm` puts it where peers of the test find it; no real vLLM runs.
"""

from __future__ import annotations

import os
import textwrap

import pytest

STUB = """
    import os
    from types import SimpleNamespace as Names

    __version__ = "stub"

    class SamplingParams:
        def __init__(self, *, n, max_tokens, ignore_eos, detokenize, temperature, top_k, top_p):
            assert ignore_eos and not detokenize and max_tokens > 0
            self.n, self.max_tokens = n, max_tokens

    class LLM:
        def __init__(self, *, model, dtype, max_model_len, max_num_seqs, seed, skip_tokenizer_init):
            assert os.path.isfile(os.path.join(model, "config.json")) and skip_tokenizer_init
            self.fresh, self.longest = False, max_model_len
            self.llm_engine = Names(vllm_config=Names(model_config=Names(enforce_eager=False, dtype=dtype)))

        def reset_prefix_cache(self):
            self.fresh = True

        def generate(self, prompts, params, use_tqdm):
            assert self.fresh and not use_tqdm, "an earlier run's prompts are still in the cache"
            self.fresh = False
            print("vLLM writes to standard output, too")
            less = int(os.environ["STUB_VLLM_TOKENS_LESS"])
            for prompt, wanted in zip(prompts, params, strict=True):
                ids = prompt["prompt_token_ids"]
                assert len(ids) + wanted.max_tokens <= self.longest
                samples = [Names(token_ids=[0] * (wanted.max_tokens - less)) for _ in range(wanted.n)]
                yield Names(outputs=samples)
"""


@pytest.fixture
def stub_vllm(tmp_path, monkeypatch):
    """Makes peers import the stub; the function it gives sets how many tokens too few each sample gets."""

    def tokens_less(tokens_less: int) -> None:
        monkeypatch.setenv("STUB_VLLM_TOKENS_LESS", str(tokens_less))

    (tmp_path / "vllm.py").write_text(textwrap.dedent(STUB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    tokens_less(0)
    return tokens_less
