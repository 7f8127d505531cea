"""From votes to a LoRA, with a scripted voter."""

import numpy as np
import pytest
from PIL import Image

from flowrl.config import load_config
from flowrl.voting.ballot import Ballot, Vote
from flowrl.voting.learn import draw_candidates, train_on_votes, training_config


def test_the_recipes_own_rewards_are_only_measured(tmp_path):
    config = training_config(load_config("quickstart-sana"), tmp_path)
    assert [r.name for r in config.rewards if not r.held_out] == ["preference"]
    assert {r.name for r in config.rewards if r.held_out} == {"geneval", "tiny_quality"}
    assert config.objective.kind == "dpo" and config.rollout.store is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_votes_become_a_lora_that_diffusers_loads(tmp_path):
    changes = [
        "pipeline.device=cpu",
        "evaluation.num_images=6",
        "run.iterations=2",
        "run.trackers=[]",
    ]
    config = load_config("quickstart-sana", changes)
    draw_candidates(config, tmp_path, prompts=4, per_prompt=2, lora=None, seed=0)
    ballot = Ballot(tmp_path)
    for place in sorted(tmp_path.glob("0*")):
        names = [f"{place.name}/samples/000{k}.png" for k in (0, 1)]
        dark = [np.asarray(Image.open(tmp_path / name)).mean() for name in names]
        choice = "first" if dark[0] > dark[1] else "second"
        ballot.cast(Vote(prompt=place.name, first=names[0], second=names[1], choice=choice))
    trained = train_on_votes(config, tmp_path)
    assert trained.lora is not None and trained.gallery is not None
    assert "geneval" in {row.name for row in trained.comparisons}
