"""The command line: help that a stranger can read, and errors that name the option."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import small_runs

from train import recipes
from train.config import Data, Grpo, Model, Run, from_json, to_json
from train.main import main

ROOT = Path(__file__).parents[1]
ALL = (recipes.tiny, recipes.qwen3_4b, recipes.qwen3_30b_a3b)


def fails(capsys, *arguments: str) -> str:
    """What the user reads on the way out."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code not in (0, None)
    printed = capsys.readouterr()
    return f"{stop.value.code} {printed.out} {printed.err}"


def shows(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_lists_the_commands_and_options(capsys):
    text = shows(capsys, "--help")
    for word in ("tiny", "qwen3-4b", "qwen3-30b-a3b", "resume", "report", "last checkpoint"):
        assert word in text
    text = shows(capsys, "qwen3-30b-a3b", "--help")
    for option in (
        "--model.checkpoint",
        "--model.quantization {all-linears,experts-only,last-15-percent-bf16,none}",
        "--data.path",
        "--data.tokenizer",
        "--grpo.group-size",
        "--loss.clip-high",
        "--optimizer.learning-rate",
    ):
        assert option in text
    assert "(default: last-15-percent-bf16)" in text


def test_every_option_has_a_help_text():
    """Outside the architecture and the arithmetic task, whose fields their own classes explain."""

    def check(kind):
        source = Path(ROOT, "train", "config.py").read_text()
        for field in dataclasses.fields(kind):
            if kind.__module__ == "train.config" and not dataclasses.is_dataclass(field.type):
                after = source.split(f"class {kind.__name__}:")[1].split(f"    {field.name}: ")[1]
                text = after.split("\n", 1)[1].lstrip()
                known = ("model", "data", "sampling", "grpo", "loss", "optimizer", "supervised",
                         "evaluation", "checkpoints")  # fmt: skip
                assert text.startswith('"""') or field.name in known, f"{kind}.{field.name}"

    run = recipes.tiny()
    for part in (run, *vars(run).values()):
        if dataclasses.is_dataclass(part):
            check(type(part))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "--grpo.group-size", "1"], ["grpo.group-size=1", "at least 2"]),
        (["tiny", "--grpo.micro-batch", "0"], ["grpo.micro-batch=0", "at least 1"]),
        (["tiny", "--sampling.top-p", "0.9"], ["sampling.top-p=0.9", "log-probs", "evaluation"]),
        (["tiny", "--sampling.top-k", "5"], ["sampling.top-k=5", "whole vocabulary"]),
        (["tiny", "--sampling.temperature", "0"], ["sampling.temperature=0", "above 0"]),
        (["tiny", "--sampling.temperature", "-1"], ["sampling.temperature=-1.0", "0 or more"]),
        (["tiny", "--sampling.micro-batch", "4"], ["sampling.micro-batch=4", "group-size=8"]),
        (["tiny", "--evaluation.temperature", "-1"], ["evaluation.temperature=-1.0", "0 or more"]),
        (["tiny", "--evaluation.top-p", "0"], ["evaluation.top-p=0.0", "at most 1"]),
        (["tiny", "--optimizer.learning-rate", "nan"], ["optimizer.learning-rate=nan", "above 0"]),
        (
            ["tiny", "--loss.sampler-ratio-cap", "2"],
            ["loss.sampler-ratio-cap=2.0", "grpo.old-logprob='sampler'", "'recompute'"],
        ),
        (["tiny", "--data.path", "x.jsonl"], ["data.path=x.jsonl", "arithmetic has no use"]),
        (["tiny", "--data.tokenizer", "x"], ["data.tokenizer=x", "arithmetic has no use"]),
        (["tiny", "--supervised.accuracy", "0.9"], ["supervised.accuracy=0.9", "at most 0.6"]),
        (["tiny", "--loss.clip-low", "2"], ["loss.clip-low=2.0", "between 0 and 1"]),
        (["tiny", "--grpo.overlong-buffer", "99"], ["grpo.overlong-buffer=99", "at most"]),
        (["tiny", "--model.quantization", "fp8"], ["--model.quantization", "all-linears"]),
        (["tiny", "--grpo.stepz", "3"], ["--grpo.stepz", "--grpo.steps"]),
        (["tiny", "--grpo.prompts", "99999"], ["grpo.prompts=99999", "training problems"]),
        (["tiny", "--sampling.max-new-tokens", "1"], ["sampling.max-new-tokens=1", "needs"]),
        (["tiny", "--supervised.batch", "9999"], ["supervised.batch=9999", "must be at most"]),
        (["tiny", "--data.reward", "no.such:thing"], ["no.such:thing", "cannot be imported"]),
        (["qwen3-4b"], ["model.checkpoint", "not given", "config.json"]),
        (["qwen3-4b", "--model.checkpoint", "/nowhere"], ["data.path", "not given", "gsm8k"]),
        (["tiny", "--data.task", "chain_sum"], ["data.task=chain_sum", "reasoning-gym"]),
        (
            ["qwen3-4b", "--data.kind", "reasoning-gym", "--model.checkpoint", "/nowhere"],
            ["data.task", "not given"],
        ),
        (["resume"], ["FOLDER"]),
        (["resume", "/nowhere"], ["/nowhere", "not the folder of a run", "recipe.json"]),
        (["report", "/nowhere"], ["/nowhere", "does not exist"]),
        ([], ["tiny", "resume"]),
    ],
)
def test_errors_name_the_option_and_what_is_legal(capsys, tmp_path, arguments, words):
    if arguments[:1] == ["tiny"]:
        arguments = [*arguments, "--folder", str(tmp_path / "run")]
    message = " ".join(fails(capsys, *arguments).replace("│", " ").split())
    for word in words:
        assert word.lower() in message.lower()


def test_paths_that_are_not_there_are_named(capsys, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    given = ["--model.checkpoint", "/nowhere", "--data.path", str(data)]
    assert "model.checkpoint=/nowhere: there is no such" in fails(capsys, "qwen3-4b", *given)


def test_a_folder_that_holds_a_run_is_left_alone(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    message = fails(capsys, "tiny", "--folder", str(tmp_path))
    assert str(tmp_path) in message
    assert "already exists" in message
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "recipe.json").exists()


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Model, {"quantization": "fp8"}, "model.quantization='fp8': must be one of 'all-linears'"),
        (Model, {"remat": "full"}, "model.remat='full': must be one of 'none', 'block'"),
        (Data, {"kind": "gsm"}, "data.kind='gsm': must be one of 'arithmetic'.*'ifeval'"),
        (
            Grpo,
            {"steps": 1, "prompts": 1, "group_size": 2, "old_logprob": "learner"},
            "grpo.old-logprob='learner': must be one of 'sampler', 'recompute'",
        ),
    ],
)
def test_a_recipe_in_python_is_held_to_the_choices(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_a_checkpoint_and_an_architecture_exclude_each_other():
    with pytest.raises(ValueError, match="one of them, not both"):
        Model(checkpoint=Path("x"), architecture=small_runs.architecture(16))


@pytest.mark.parametrize("recipe", ALL)
def test_recipes_survive_json(recipe):
    run = recipe()
    text = json.dumps(to_json(run))
    assert from_json(Run, json.loads(text)) == run


def test_a_changed_recipe_file_is_refused():
    values = to_json(recipes.tiny())
    values["grpo"]["bananas"] = 3
    with pytest.raises(ValueError, match=r"run\.grpo must have the fields .*bananas"):
        from_json(Run, values)
    values = to_json(recipes.tiny())
    values["grpo"]["steps"] = 0
    with pytest.raises(ValueError, match=r"grpo\.steps=0"):
        from_json(Run, values)


def test_python_m_train_runs():
    done = subprocess.run(
        [sys.executable, "-m", "train", "tiny", "--grpo.steps", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "grpo.steps=0" in " ".join(done.stdout.split() + done.stderr.split())
    assert "Traceback" not in done.stderr
