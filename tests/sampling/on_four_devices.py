"""An engine whose model is cut among four devices; test_mesh.py runs this file in a process that has them.

1. Each device holds its part of the weights and of the cache, and no more than the plan says.
2. Scores are those of one device, within rounding.
3. Every bit equality of one device holds among the four: a row is its own world, replays, narrow programs, weights.
4. Grammars are followed on the host as beside one device.
5. No sum between devices depends on the place: all sums on their way are of one number and zeros.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, load_checkpoint
from sampling.errors import ConfigError
from sampling.explain import explain
from tests.sampling.test_engine import MIXED, assert_same_bits, prompt, rows
from tests.tiny_models import EOS_ID, tiny_llama, tiny_qwen2

GEOMETRY = Geometry(slots=12, cache_len=48, prefill_rows=2, prefill_chunk=32)
MODELS = {  # heads, an untied head; biases, a tied head, a vocabulary of which no fourth is whole
    "llama": (tiny_llama, {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen2": (tiny_qwen2, {"num_key_value_heads": 4, "vocab_size": 274}),
}
POLICIES = [
    *MIXED,
    SamplingParams(regex="[ab]{2,5}c", max_new_tokens=12),
    SamplingParams(choices=["yes", "yes please", "no"], temperature=0.5, max_new_tokens=12),
]


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(request, tmp_path_factory):
    make, settings = MODELS[request.param]
    return load_checkpoint(make(tmp_path_factory.mktemp("tiny"), **settings))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY, devices=jax.devices())


@pytest.fixture(scope="module")
def alone(checkpoint):
    """An engine on one device."""
    return Engine(checkpoint, GEOMETRY)


def requests(**fields):
    return [
        Request(f"p{i}", prompt(i), POLICIES[i % len(POLICIES)].replace(n=2), run_seed=5, **fields) for i in range(14)
    ]


@pytest.fixture(scope="module")
def drawn(engine):
    return rows(engine.generate(requests()))


def test_each_device_holds_its_part(engine, drawn):
    assert len(jax.devices()) == 4 and engine.fingerprint["num_devices"] == 4
    plan = engine.memory_plan
    for device in jax.devices():
        assert _bytes_on(device, engine._params) == plan.weights
        assert 0 < _bytes_on(device, (engine._state.cache, engine._staging.cache)) <= plan.cache
    kernel = engine._params["layers_0"]["feed_forward"]["down_kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(kernel.shape[0], kernel.shape[1] // 4)}
    programs = engine._programs.prefill, *engine._programs.decode.values()
    assert max(program.memory_analysis().temp_size_in_bytes for program in programs) <= plan.workspace


def _bytes_on(device, tree):
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_sums_on_their_way_are_of_embeddings_alone(engine):
    """Of which all devices but one have zeros. Parts of other sums are gathered."""
    whole = engine._params["embedding"].sharding.is_fully_replicated
    for program in (engine._programs.prefill, *engine._programs.decode.values()):
        found = re.findall(r" (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", program.as_text())
        assert found.count("all-gather") >= 2 * (engine.info.config.layers - 1)  # prefill needs no hidden state
        assert found.count("all-reduce") == (0 if whole else 1) and "reduce-scatter" not in found


def test_scores_are_those_of_one_device(engine, alone, drawn):
    plain = SamplingParams(max_new_tokens=12, ignore_eos=True)
    for forward in (False, True):
        given = [
            Request(f"p{i}", prompt(i), plain, given=(drawn[f"p{i}", 0].completion_tokens,), forward=forward)
            for i in range(14)
        ]
        ours, theirs = (rows(engine.generate(given)) for engine in (engine, alone))
        assert ours.keys() == theirs.keys() and len(ours) == 14
        for key, row in ours.items():
            np.testing.assert_allclose(row.model_logprobs, theirs[key].model_logprobs, rtol=0, atol=1e-5)
            np.testing.assert_allclose(row.entropy, theirs[key].entropy, rtol=0, atol=1e-5)


def test_a_row_is_its_own_world_here_too(engine, drawn):
    assert_same_bits(drawn, rows(engine.generate(requests()[::-1])))
    by_itself = {}
    for request in requests():
        by_itself |= rows(engine.generate([request]))
    assert_same_bits(drawn, by_itself)


def test_rows_of_a_grammar_follow_it(engine, drawn):
    texts = {
        name: engine.vocabulary.text_bytes(drawn[name].completion_tokens).decode()
        for name in drawn
        if requests()[int(name[0][1:])].params.grammar
    }
    assert len(texts) == 4
    assert all(re.fullmatch("[ab]{2,5}c|yes|yes please|no", text) for text in texts.values()), texts


def test_a_narrow_program_gives_the_bits_of_the_widest_or_is_not_there(engine, drawn):
    programs = engine._programs
    assert sorted(programs.decode) in ([12], [8, 12])
    engine._programs = dataclasses.replace(programs, decode={12: programs.decode[12]})
    assert_same_bits(drawn, rows(engine.generate(requests())))
    engine._programs = programs


def test_replays_have_the_bits_that_were_drawn(engine, drawn):
    work = [
        dataclasses.replace(request, given=tuple(drawn[request.prompt_id, i].completion_tokens for i in range(2)))
        for request in requests()
    ]
    assert_same_bits(drawn, rows(engine.generate(work)))


def test_a_token_is_explained_by_the_scores_that_drew_it(engine, drawn):
    row = drawn["p5", 1]
    found = explain(engine, prompt(5), row.completion_tokens, 7, POLICIES[5], row.key)
    np.testing.assert_allclose(found.behaviour_logprob, row.behaviour_logprobs[7], rtol=0, atol=1e-6)


def test_staged_weights_are_cut_and_tried(checkpoint, engine, alone):
    staged = engine.stage_weights(checkpoint.params)
    places = [[leaf.sharding for leaf in jax.tree.leaves(params)] for params in (staged.params, engine._params)]
    assert places[0] == places[1]
    theirs = alone.stage_weights(checkpoint.params).canary_logprobs()
    np.testing.assert_allclose(staged.canary_logprobs(), theirs, rtol=0, atol=1e-5)


def test_other_weights_and_larger_policies_and_an_abort(checkpoint, engine, drawn):
    other = jax.tree.map(lambda leaf: np.asarray(leaf) * 1.5, checkpoint.params)
    engine.load_weights(other, 1)
    assert rows(engine.generate(requests()[:2])).keys() <= drawn.keys()
    engine.load_weights(engine.stage_weights(checkpoint.params), 2)
    bias = SamplingParams(logit_bias={i: 0.5 for i in range(4, 204)}, max_new_tokens=4)
    engine.submit(Request("larger", prompt(3), bias))
    engine.step()
    engine.abort()
    assert_same_bits(drawn, rows(engine.generate(requests())))


def test_grammars_that_are_stepped_on_the_host(engine):
    stepped = [
        SamplingParams(lark='start: "(" start ")" | "é"', max_new_tokens=20, grammar_mode="host"),
        SamplingParams(json_schema={"type": "array"}, max_new_tokens=20, grammar_mode="host", temperature=0.7),
    ]
    policies = [*stepped, POLICIES[-1], SamplingParams(max_new_tokens=12)]
    work = [Request(f"p{i}", prompt(i), params.replace(n=2), run_seed=5) for i, params in enumerate(policies)]
    found = rows(engine.generate(work))  # the first such row makes it grow
    for row in found.values():
        if row.params.grammar is None or row.stop_reason == StopReason.LENGTH:
            continue
        assert row.stop_reason in (StopReason.GRAMMAR_DONE, StopReason.EOS)
        text = engine.vocabulary.text_bytes([one for one in row.completion_tokens if one != EOS_ID]).decode()
        match row.prompt_id:
            case "p0":
                assert text == "(" * (len(text) // 2) + "é" + ")" * (len(text) // 2)
            case "p1":
                assert isinstance(json.loads(text), list)
            case _:
                assert text in ("yes", "yes please", "no")
    assert sum(row.stop_reason != StopReason.LENGTH for row in found.values() if row.params.grammar) > 2
    by_itself = {}
    for request in work[::-1]:
        by_itself |= rows(engine.generate([request]))
    assert_same_bits(found, by_itself)
    given = [
        dataclasses.replace(request, given=tuple(found[request.prompt_id, i].completion_tokens for i in range(2)))
        for request in work
    ]
    assert_same_bits(found, rows(engine.generate(given)))
    for name, row in rows(engine.generate(dataclasses.replace(one, forward=True) for one in given)).items():
        np.testing.assert_allclose(row.model_logprobs, found[name].model_logprobs, rtol=0, atol=1e-4)
        assert row.left_grammar_at is None and row.stop_reason == found[name].stop_reason


def test_a_model_that_cannot_be_cut_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"2 key/value heads and .* cannot be cut into 4 equal parts"):
        Engine(load_checkpoint(tiny_llama(tmp_path)), GEOMETRY, devices=jax.devices())
