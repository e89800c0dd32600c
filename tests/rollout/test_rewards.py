"""Tests rollout/rewards.py and rollout/tasks.py: what counts as the answer, and scorers that fail."""

import subprocess
import sys

import pytest

from rollout.prompts import Prompt
from rollout.rewards import (
    ExactMatchReward,
    ReasoningGymReward,
    Score,
    extract_answer,
    judge,
    require_scorable,
    reward_from_config,
)
from rollout.sources import TaskSource, read_prompts
from rollout.tasks import TASK_KEY, Task
from sampling.errors import ConfigError, PromptError
from tests.rollout import scorers


def task_prompts(name, size=4, **config):
    tasks = [{"name": name, "size": size, "config": config}]
    return list(read_prompts(TaskSource.model_validate({"source": "reasoning_gym", "tasks": tasks})))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 is <answer> 7 </answer>, I think: 8", "7"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("cut off: <answer>12", "12"),
        ("<answer></answer>", None),
        ("so 3 + 4 = 7.", "7"),
        ("The sum is 1,204.", "1204"),
        ("1, 2", "2"),
        ("It is 12.50!", "12.50"),
        ("9 - 4", "4"),
        ("9-4", "4"),
        ("9 - 4 = -5", "-5"),
        ("9-4=-5", "-5"),
        ("(9) - 4", "4"),
        ("9 -4", "4"),
        ("The answer is -4.", "-4"),
        ("covid-19", "19"),
        ("x = \N{MINUS SIGN}12", "-12"),
        ("**-7**", "-7"),
        ("-5", "-5"),
        (r"\boxed{-3}", "-3"),
        ("Paris\n\n", "Paris"),
        ("I think\nit is Paris", "it is Paris"),
        ("version v2", "version v2"),
        ("", None),
        (" \n", None),
    ],
)
def test_the_answer_within_a_completion(text, answer):
    assert extract_answer(text) == answer


def test_a_right_answer_scores_one_and_a_wrong_one_less():
    reward = ReasoningGymReward()
    for prompt in task_prompts("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1):
        answer = prompt.metadata[TASK_KEY]["answer"]
        assert judge(reward, prompt, f"The answer is {answer}.") == Score(1.0)
        assert judge(reward, prompt, "The answer is 1234.").value < 1, "some scorers give credit for a part"
        assert judge(reward, prompt, "") == Score(0.0)


@pytest.mark.parametrize("name", ["arc_agi", "graph_color", "basic_arithmetic", "countdown"])
def test_a_task_scores_as_if_its_entry_had_never_been_stored(name):
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, size=2, seed=0)
    for prompt, entry in zip(task_prompts(name, size=2), dataset, strict=True):
        task = Task.from_metadata(prompt.metadata)
        for answer in (entry["answer"], "7", None):
            assert task.score(answer) == dataset.score_answer(answer, entry)


def test_another_release_of_the_tasks_cannot_score_against_another_question():
    (prompt,) = task_prompts("chain_sum", size=1)
    changed = {TASK_KEY: {**prompt.metadata[TASK_KEY], "question": "What is 1 + 1?"}}
    with pytest.raises(PromptError, match=r"chain_sum-0: expected question 'What is 1 \+ 1\?'"):
        Task.from_metadata(changed).score("2")


def test_a_prompt_without_a_task_is_a_recorded_failure():
    score = judge(ReasoningGymReward(), Prompt("p", text="hi", metadata={"a": 1}), "7")
    assert score.value is None
    assert score.error.startswith("PromptError: metadata.reasoning_gym: expected a task with dataset, config")


def broken(prompt, text):
    raise ZeroDivisionError("no samples")


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (broken, "ZeroDivisionError: no samples"),
        (lambda prompt, text: float("nan"), "expected a finite reward, got nan"),
        (lambda prompt, text: float("-inf"), "expected a finite reward, got -inf"),
        (lambda prompt, text: "good", "ValueError: could not convert string to float: 'good'"),
        (lambda prompt, text: None, "TypeError: "),
    ],
)
def test_a_scorer_that_fails_is_data(reward, error):
    score = judge(reward, Prompt("p", text="hi"), "x")
    assert score.value is None and score.error.startswith(error)


def test_numbers_of_any_kind_become_floats():
    assert judge(lambda prompt, text: True, Prompt("p", text="hi"), "x") == Score(1.0)


def test_scorers_are_found_by_name():
    assert reward_from_config("none") is None
    assert isinstance(reward_from_config("reasoning_gym"), ReasoningGymReward)
    assert reward_from_config("tests.rollout.scorers:length") is scorers.length
    assert reward_from_config("tests.rollout.scorers:keyed") is scorers.keyed
    assert reward_from_config("tests.rollout.scorers:keyed.__call__") == scorers.keyed.__call__


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "expected one of none, reasoning_gym, exact_match, or package.module:name of your own, got 'math'"),
        ("a.b:", "expected one of none, .*, got 'a.b:'"),
        (":c", "expected one of none, .*, got ':c'"),
        ("a-b:c", "expected one of none, .*, got 'a-b:c'"),
        ("nowhere.at_all:f", "nowhere.at_all cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("tests.rollout.scorers:lenght", "tests.rollout.scorers has no lenght; check the name after the colon"),
        ("tests.rollout.scorers:keyed.nothing", "tests.rollout.scorers has no keyed.nothing"),
        ("tests.rollout.scorers:not_callable", r"expected a function of \(prompt, text\), got 5"),
        ("tests.rollout.scorers:one_argument", r"got one of \(text\): too many positional arguments"),
        ("tests.rollout.scorers:Keyed", "got the class Keyed; name an object of it"),
        ("tests.rollout.scorers:asynchronous", "got one that is async"),
    ],
)
def test_a_name_that_leads_to_no_scorer_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"^reward: .*{message}"):
        reward_from_config(name)


def test_a_module_of_the_current_folder_is_found_and_hides_no_package(tmp_path, monkeypatch):
    (tmp_path / "my_scorer_of_today.py").write_text("def score(prompt, text):\n    return 2\n")
    (tmp_path / "colorsys.py").write_text("def rgb_to_hsv(prompt, text):\n    return 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("colorsys", None)
    assert reward_from_config("my_scorer_of_today:score")(None, "") == 2
    with pytest.raises(ConfigError, match=r"got one of \(r, g, b\)"):
        reward_from_config("colorsys:rgb_to_hsv")


def test_a_module_that_raises_is_refused_in_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "scorer_of_no_use.py").write_text("raise OSError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="module scorer_of_no_use cannot be imported: OSError: no licence"):
        reward_from_config("scorer_of_no_use:score")


def test_a_config_loads_no_more_than_it_names():
    code = (
        "import sys; from rollout.config_file import parse_config; model = {'checkpoint': 'x'};"
        "parse_config({'model': model, 'prompts': {'source': 'jsonl', 'path': 'x'}, 'reward': sys.argv[1]});"
        "from rollout.rewards import reward_from_config; reward_from_config(sys.argv[2]);"
        "print(*(name in sys.modules for name in ('reasoning_gym', 'wave')))"
    )
    for names, loaded in ((["none", "none"], "False False"), (["wave:open", "exact_match"], "False False")):
        done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == loaded


def test_a_prompt_that_cannot_be_scored_is_named():
    plain, answered = Prompt("p", text="hi", where="file, line 3"), Prompt("q", text="hi", metadata={"answer": "7"})
    for reward in (None, scorers.length):
        require_scorable(reward, plain)
    require_scorable(ExactMatchReward(), answered)
    require_scorable(ReasoningGymReward(), task_prompts("chain_sum", size=1)[0])
    with pytest.raises(PromptError, match=r"file, line 3: prompt 'p': metadata.answer: expected text, got None"):
        require_scorable(ExactMatchReward(), plain)
    with pytest.raises(PromptError, match=r"prompt 'q': metadata.reasoning_gym: expected a task with dataset, config"):
        require_scorable(ReasoningGymReward(), answered)
