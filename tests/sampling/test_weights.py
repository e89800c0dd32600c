"""Weights that arrive while an engine runs.

1. What is drawn afterwards has the bits of an engine made with them; nothing compiles, nothing of the old ones stays.
2. In flight: rows go on, each token says its version, and a row of one version has that version's bits.
3. Sequences being scored are scored with one version each.
4. Weights of another form, or not finite, are refused by the name of the leaf, and the old ones stay in use.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import Engine, Request, SamplingParams, load_checkpoint
from sampling.errors import CheckpointError, ConfigError
from sampling.weights import CANARY_LEN, canary_logprobs, canary_tokens
from tests.sampling.test_engine import GEOMETRY, MIXED, prompt, request, rows
from tests.tiny_models import TOKENIZER_LEN, tiny_llama

COLUMNS = ("completion_tokens", "behaviour_logprobs", "model_logprobs", "log_kept_mass", "entropy")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return [load_checkpoint(tiny_llama(folder / str(seed), seed=seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engines(checkpoints):
    """What the two checkpoints draw, each in an engine of its own."""
    return [Engine(checkpoint, GEOMETRY) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def changing(checkpoints):
    return Engine(checkpoints[0], GEOMETRY)


@pytest.fixture
def engine(changing, checkpoints):
    """An engine in which the first checkpoint is version 0."""
    changing.load_weights(checkpoints[0].params, 0)
    return changing


def bits(completion, upto=None):
    return [getattr(completion, name)[:upto].tobytes() for name in COLUMNS]


def work():
    return [request(i, params.replace(n=1 + i % 5, max_new_tokens=20 + i)) for i, params in enumerate(MIXED)]


def test_what_is_drawn_afterwards_has_the_bits_of_an_engine_made_with_them(engine, engines, checkpoints, compilations):
    old, new = (rows(other.generate(work())) for other in engines)
    before = len(compilations)
    for version, expected in ((7, new), (8, old)):
        engine.load_weights(checkpoints[version - 7 == 0].params, version)
        found = rows(engine.generate(work()))
        for name, completion in found.items():
            assert bits(completion) == bits(expected[name])
            assert set(completion.policy_versions.tolist()) == {version}
    assert len(compilations) == before


def test_rows_in_flight_go_on_and_each_token_says_its_version(engine, engines, checkpoints):
    references = [rows(other.generate(work())) for other in engines]
    for each in work():
        engine.submit(each)
    finished = engine.step()
    engine.load_weights(checkpoints[1].params, 1)
    while not engine.idle:
        finished += engine.step()
    kinds = set()
    for name, completion in rows(finished).items():
        versions = completion.policy_versions
        kinds.add(tuple(np.unique(versions).tolist()))
        assert np.all(np.diff(versions) >= 0)
        old = int(np.sum(versions == 0))
        if old:
            assert bits(completion, old) == bits(references[0][name], old)
            later = slice(old, old + 1)
            undisturbed = references[0][name].model_logprobs[later]
            assert old == versions.size or completion.model_logprobs[later] != undisturbed
        else:
            assert bits(completion) == bits(references[1][name])
    assert kinds == {(0, 1), (1,)}


def test_a_prompt_of_which_samples_wait_is_read_again(engine, engines, checkpoints):
    large = request(3, MIXED[-1].replace(n=12))
    reference = rows(engines[1].generate([large]))
    engine.submit(large)
    finished = engine.step()
    engine.load_weights(checkpoints[1].params, 1)
    while not engine.idle:
        finished += engine.step()
    late = [c for c in rows(finished).values() if c.policy_versions[0] == 1]
    assert len(late) == 4
    for completion in late:
        assert bits(completion) == bits(reference[completion.prompt_id, completion.sample_index])


def test_a_sequence_is_scored_with_one_version(engine, engines, checkpoints):
    rng = np.random.default_rng(0)
    known = [rng.integers(4, TOKENIZER_LEN, 44).astype(np.int32) for _ in range(12)]
    asked = [Request(f"p{i}", prompt(1, 3), SamplingParams(n=1), given=(k,), forward=True) for i, k in enumerate(known)]
    references = [rows(other.generate(asked)) for other in engines]
    for each in asked:
        engine.submit(each)
    finished = engine.step()
    engine.load_weights(checkpoints[1].params, 1)
    while not engine.idle:
        finished += engine.step()
    found = rows(finished)
    assert {int(c.policy_versions[0]) for c in found.values()} == {0, 1}
    for name, completion in found.items():
        (version,) = set(completion.policy_versions.tolist())
        assert bits(completion) == bits(references[version][name])


def test_nothing_of_the_old_weights_stays(engine, checkpoints):
    def held():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    fresh = [jax.tree.map(jnp.array, checkpoint.params) for checkpoint in checkpoints]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(fresh[0]))
    engine.load_weights(fresh.pop(), 1)
    before = held()
    engine.load_weights(fresh.pop(), 2)
    assert held() == before - size  # of the two sets one is in use, and the other nobody's


def test_arrays_that_are_written_to_afterwards_change_nothing(engine, engines, checkpoints):
    mine = jax.tree.map(np.array, checkpoints[1].params)
    engine.load_weights(mine, 1)
    for leaf in jax.tree.leaves(mine):
        leaf[:] = 0
    (expected,), (found,) = (list(rows(e.generate([request(1)])).values()) for e in (engines[1], engine))
    assert bits(found) == bits(expected)


def changed(params, path, value):
    """The same weights with one leaf replaced, or without it if there is no value."""
    first, *rest = path.split("/")
    others = {key: leaf for key, leaf in params.items() if key != first}
    inner = changed(params.get(first, {}), "/".join(rest), value) if rest else value
    return others if inner is None else {**others, first: inner}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("final_norm/scale", None, r"expected float32 \[32\] at final_norm/scale, found nothing"),
        ("final_norm", np.zeros(3), r"expected float32 \[32\] at final_norm/scale, found nothing"),
        ("extra/kernel", np.zeros((2, 3)), r"the model has no parameter extra/kernel, got float64 \[2, 3\]"),
        (
            "embedding",
            np.zeros((272, 31), np.float32),
            r"embedding: expected float32 \[272, 32\], got float32 \[2",
        ),
        ("embedding", np.zeros((272, 32), np.float16), r"embedding: expected float32 \[272, 32\], got float16"),
        ("embedding", "text", r"embedding: expected float32 \[272, 32\], got str that is no array"),
        (
            "final_norm/scale",
            np.array([1] * 30 + [np.nan, np.inf], np.float32),
            r"scale: expected .* nan at \[30\] \(2",
        ),
    ],
)
def test_weights_of_another_form_are_refused_and_the_old_ones_stay(engine, engines, checkpoints, path, value, words):
    with pytest.raises(CheckpointError, match=words):
        engine.load_weights(changed(checkpoints[1].params, path, value), 1)
    assert engine.policy_version == 0
    (expected,), (found,) = (list(rows(e.generate([request(1)])).values()) for e in (engines[0], engine))
    assert bits(found) == bits(expected)


@pytest.mark.parametrize("version", [-1, 2**31, True, 1.0, None])
def test_a_version_that_is_none_is_refused(engine, checkpoints, version):
    with pytest.raises(ConfigError, match="version: expected a whole number"):
        engine.load_weights(checkpoints[1].params, version)
    with pytest.raises(CheckpointError, match="expected a nested dict of arrays, got int"):
        engine.load_weights(5, 1)


def test_the_canary_is_what_the_engine_scores(engine, checkpoints):
    staged = engine.stage_weights(checkpoints[1].params)
    said = staged.canary_logprobs()
    text = canary_tokens(TOKENIZER_LEN)
    asked = Request("canary", text[:1], given=(text[1:],), forward=True)
    engine.load_weights(staged, 1)
    ((scored,),) = (group.completions for group in engine.generate([asked]))
    assert said.shape == (CANARY_LEN - 1,) and said.dtype == np.float32
    np.testing.assert_allclose(said, scored.model_logprobs, atol=1e-5)
    assert np.array_equal(said, canary_logprobs(staged.model, checkpoints[1].params, TOKENIZER_LEN))
