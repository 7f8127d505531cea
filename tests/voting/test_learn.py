"""From votes to a LoRA, with a scripted voter."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.voting.ballot import Ballot, Vote
from flowrl.voting.candidates import Candidates
from flowrl.voting.learn import (
    draw_candidates,
    expected_votes,
    train_on_votes,
    training_config,
)


def test_dpo_and_kto_keep_the_options_of_the_recipe(tmp_path):
    for kind, beta in (("dpo", 7.0), ("kto", 9.0)):
        changes = [f"objective={{kind: {kind}, implicit_beta: {beta}}}"]
        config = training_config(load_config("quickstart-sana", changes), tmp_path, tmp_path, None)
        objective = config.objective
        assert (objective.kind, objective.implicit_beta) == (kind, beta)
    recipe = load_config("quickstart-vote")
    assert training_config(recipe, tmp_path, tmp_path, None).objective == recipe.objective


def test_training_starts_from_the_lora_that_drew_the_images(tmp_path):
    recipe = load_config("quickstart-vote")
    config = training_config(recipe, tmp_path, tmp_path, "runs/mine")
    assert config.lora.init_from == "runs/mine" and recipe.lora.init_from is None
    (tmp_path / "drawn.json").write_text(json.dumps({"lora": "0123abcd"}))
    with pytest.raises(UserError, match="drawn with a LoRA: name it with --lora"):
        train_on_votes(recipe, tmp_path)


def test_images_are_expected_to_be_liked_as_the_votes_say_and_only_where_these_are_clear(tmp_path):
    features = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
    features[:, 2] = 0.01 * features[:, 1]  # of a direction that no vote tells about
    names = tuple(f"{row // 4:05d}/samples/{row % 4:04d}.png" for row in range(80))
    candidates = Candidates(
        folder=tmp_path, files=names, texts=tuple(f"prompt {row // 4}" for row in range(80)),
    )  # fmt: skip
    liking = features[:, 0]

    def vote(a, b, choice=None):
        choice = choice or ("first" if liking[a] > liking[b] else "second")
        return Vote(prompt="", first=names[a], second=names[b], choice=choice)

    pairs = [(4 * k, 4 * k + 1) for k in range(20)]
    predicted = expected_votes(candidates, features, [vote(*pair) for pair in pairs])
    rows = [(names.index(v.first), names.index(v.second)) for v in predicted]
    assert len(rows) >= 15 and len({a // 4 for a, _ in rows}) == len(rows)
    assert sum(bool(liking[a] > liking[b]) for a, b in rows) >= len(rows) - 1
    assert all(v.prompt == f"prompt {a // 4}" for v, (a, _) in zip(predicted, rows, strict=True))
    few = expected_votes(candidates, features, [vote(*pairs[0])])
    assert len(few) < len(predicted)
    assert expected_votes(candidates, features, [vote(*pair, "tie") for pair in pairs]) == []


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
    assert "geneval_strict" in {row.name for row in trained.comparisons}
    assert train_on_votes(config, tmp_path).folder == trained.folder  # of the same votes
    ballot.undo()
    again = train_on_votes(config, tmp_path)
    assert again.folder.name == "run-2" and again.lora is not None
