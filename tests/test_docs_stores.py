"""The commands on the page of stores work as they stand there."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrl.build.learner import ProvidedObjects, build_learner
from flowrl.cli import main
from flowrl.config import load_config
from flowrl.config.load import sort_arguments
from flowrl.errors import UserError
from flowrl.utils.distributed import Runtime

PAGE = (Path(__file__).parents[1] / "docs" / "stores.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    shlex.split(line)[1:] for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()
]
TRAINING = [words[1:] for words in COMMANDS if words[0] == "train"]
COLLECTING = [words[1:] for words in COMMANDS if words[0] == "collect"]


def test_every_command_is_one_of_these():
    assert len(TRAINING) == len(COLLECTING) == len(COMMANDS) // 2 == 2


@pytest.mark.parametrize("words", TRAINING, ids=lambda words: words[1])
def test_every_recipe_is_possible_and_reads_the_store_that_was_made(words):
    request = sort_arguments(words)
    config = load_config(request.recipe, request.overrides)
    made = [w[w.index("-o") + 1] for w in COLLECTING]
    assert config.rollout.store is not None and config.rollout.store.path in made


@pytest.fixture
def pairs(tmp_path, monkeypatch, tiny_pipeline_path):
    """The pairs of the page, collected as it says -> options that name the pipeline."""
    monkeypatch.chdir(tmp_path)
    (row,) = re.findall(r"```json\n(.*)\n```", PAGE)
    for name, color in zip(("chosen", "rejected"), ("red", "blue"), strict=True):
        Image.new("RGB", (64, 64), color).save(json.loads(row)[name])
    Path("pairs.jsonl").write_text(row + "\n")
    own = [f"pipeline.path={tiny_pipeline_path}", "pipeline.device=cpu"]
    with pytest.raises(SystemExit) as end:
        main(["collect", *next(words for words in COLLECTING if "--pairs" in words), *own])
    assert not end.value.code
    return own


def test_pairs_are_collected_and_learned_from(pairs, load_tiny, capsys):
    request = sort_arguments(next(words for words in TRAINING if any("pairs" in w for w in words)))
    config = load_config(request.recipe, [*request.overrides, *pairs])
    given = ProvidedObjects(pipeline=load_tiny())
    learner = build_learner(config, Runtime(device="cpu"), given)
    before = [p.detach().clone() for p in learner.policy.parameters()]
    rollout, metrics = learner.iterate(0)
    assert set(rollout.prompts) == {"a red star"} and metrics["grad/norm"] > 0
    assert any(
        not torch.equal(a, b) for a, b in zip(learner.policy.parameters(), before, strict=True)
    )
    rule = ["run.stop_when_hacking={held_out: geneval_strict}", "evaluation.every=5"]
    config = load_config(request.recipe, [*request.overrides, *pairs, *rule])
    with pytest.raises(UserError, match="run.stop_when_hacking"):
        build_learner(config, Runtime(device="cpu"), given)
