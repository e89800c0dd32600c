"""An engine whose model is cut among four devices; test_mesh.py runs this file in a process that has them."""

import dataclasses

import jax
import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, load_checkpoint
from sampling.errors import ConfigError
from tests.sampling.test_engine import MIXED, assert_same_bits, prompt, rows
from tests.tiny_models import tiny_llama, tiny_qwen2

GEOMETRY = Geometry(slots=12, cache_len=48, prefill_rows=2, prefill_chunk=32)
MODELS = {  # heads, an untied head; biases, a tied head, a vocabulary of which no fourth is whole
    "llama": (tiny_llama, {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen2": (tiny_qwen2, {"num_key_value_heads": 4, "vocab_size": 274}),
}


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(request, tmp_path_factory):
    make, settings = MODELS[request.param]
    return load_checkpoint(make(tmp_path_factory.mktemp("tiny"), **settings))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY, devices=jax.devices())


def requests(**fields):
    return [Request(f"p{i}", prompt(i), MIXED[i % len(MIXED)].replace(n=2), run_seed=5, **fields) for i in range(14)]


@pytest.fixture(scope="module")
def drawn(engine):
    return rows(engine.generate(requests()))


def test_each_device_holds_its_part(engine):
    assert len(jax.devices()) == 4 and engine.fingerprint["num_devices"] == 4
    plan = engine.memory_plan
    for device in jax.devices():
        caches = jax.tree.leaves((engine._state.cache, engine._staging.cache))
        assert 0 < _bytes_on(device, caches) <= plan.cache
    kernel = engine._params["layers_0"]["feed_forward"]["down_kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(kernel.shape[0], kernel.shape[1] // 4)}


def _bytes_on(device, arrays):
    return sum(shard.data.nbytes for leaf in arrays for shard in leaf.addressable_shards if shard.device == device)


def test_scores_are_those_of_one_device(checkpoint, engine, drawn):
    alone = Engine(checkpoint, GEOMETRY)
    given = [
        Request(
            name,
            prompt(int(name[1:])),
            SamplingParams(max_new_tokens=12, ignore_eos=True),
            given=(c.completion_tokens,),
        )
        for (name, index), c in drawn.items()
        if index == 0
    ]
    for forward in (False, True):
        work = [dataclasses.replace(request, forward=forward) for request in given]
        ours, theirs = rows(engine.generate(work)), rows(alone.generate(work))
        assert ours.keys() == theirs.keys() and len(ours) == 14
        for key, row in ours.items():
            np.testing.assert_allclose(row.model_logprobs, theirs[key].model_logprobs, rtol=0, atol=1e-5)
            np.testing.assert_allclose(row.entropy, theirs[key].entropy, rtol=0, atol=1e-5)


def test_a_row_is_its_own_world_here_too(engine, drawn):
    assert_same_bits(drawn, rows(engine.generate(requests()[::-1])))
    alone = {}
    for request in requests():
        alone |= rows(engine.generate([request]))
    assert_same_bits(drawn, alone)


def test_replays_have_the_bits_that_were_drawn(engine, drawn):
    work = [
        dataclasses.replace(request, given=tuple(drawn[request.prompt_id, i].completion_tokens for i in range(2)))
        for request in requests()
    ]
    assert_same_bits(drawn, rows(engine.generate(work)))


def test_other_weights_and_larger_policies_and_an_abort(checkpoint, engine, drawn):
    other = jax.tree.map(lambda leaf: np.asarray(leaf) * 1.5, checkpoint.params)
    engine.load_weights(other, 1)
    assert rows(engine.generate(requests())).keys() == drawn.keys()
    engine.load_weights(checkpoint.params, 2)
    bias = SamplingParams(logit_bias={i: 0.5 for i in range(4, 204)}, max_new_tokens=4)
    engine.submit(Request("larger", prompt(3), bias))
    engine.step()
    engine.abort()
    assert_same_bits(drawn, rows(engine.generate(requests())))


def test_a_model_that_cannot_be_cut_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"2 key/value heads and .* cannot be cut into 4 equal parts"):
        Engine(load_checkpoint(tiny_llama(tmp_path)), GEOMETRY, devices=jax.devices())
