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
    keeps_prompt,
    score_margin,
    train_on_votes,
    training_config,
)
from flowrl.voting.taste import TastePosterior


def test_training_keeps_the_options_of_the_recipe_and_begins_with_its_lora(tmp_path):
    for kind, beta in (("dpo", 7.0), ("kto", 9.0)):
        changes = [f"objective={{kind: {kind}, implicit_beta: {beta}}}"]
        config = training_config(load_config("quickstart-sana", changes), tmp_path, tmp_path, None)
        objective = config.objective
        assert (objective.kind, objective.implicit_beta) == (kind, beta)
    recipe = load_config("quickstart-vote")
    assert training_config(recipe, tmp_path, tmp_path, None).objective == recipe.objective
    # Training starts from the LoRA that drew the images.
    config = training_config(recipe, tmp_path, tmp_path, "runs/mine")
    assert config.lora.init_from == "runs/mine" and recipe.lora.init_from is None
    (tmp_path / "drawn.json").write_text(json.dumps({"lora": "0123abcd"}))
    with pytest.raises(UserError, match="drawn with a LoRA: name it with --lora"):
        train_on_votes(recipe, tmp_path)


def test_images_are_expected_to_be_liked_as_the_taste_says_and_only_where_it_is_sure(tmp_path):
    features = torch.randn(80, 3, generator=torch.Generator().manual_seed(0)).double()
    names = tuple(f"{row // 4:05d}/samples/{row % 4:04d}.png" for row in range(80))
    candidates = Candidates(
        folder=tmp_path, files=names, texts=tuple(f"prompt {row // 4}" for row in range(80)),
    )  # fmt: skip
    sure = TastePosterior(
        mean=torch.tensor([3.0, 0.0, 0.0]).double(), covariance=torch.eye(3).double()
    )
    unsure = TastePosterior(mean=sure.mean / 50, covariance=sure.covariance)

    def rows(taste, scores):
        votes = expected_votes(candidates, features, taste, scores)
        pairs = [(names.index(v.first), names.index(v.second)) for v in votes]
        assert all(v.prompt == f"prompt {a // 4}" for v, (a, _) in zip(votes, pairs, strict=True))
        return pairs

    unknown = torch.full((80,), torch.nan)
    pairs = rows(sure, unknown)
    assert len(pairs) >= 15 and len({a // 4 for a, _ in pairs}) == len(pairs)
    assert all(features[a, 0] > features[b, 0] for a, b in pairs)
    assert rows(unsure, unknown) == []
    shows = (torch.arange(80) % 4 > 0).double()  # all but the first image of each prompt
    pairs = rows(sure, shows)
    assert all(shows[a] == 1 for a, _ in pairs)
    assert {b // 4 for _, b in pairs if shows[b] == 0} == set(range(20))  # each, however liked
    # A learned reward scores no two images alike: those within its spread are chosen by taste.
    learned = shows + 0.3 * torch.rand(80, generator=torch.Generator().manual_seed(1)).double()
    assert 0.1 < score_margin(candidates, learned) < 1 and score_margin(candidates, shows) == 0
    assert {a for a, _ in rows(sure, learned)} != {
        4 * k + learned[4 * k :][:4].argmax().item() for k in range(20)
    }
    shows[2::4] = torch.nan
    assert not {a for a, _ in rows(sure, shows)} & set(range(2, 80, 4))  # no score, not faithful


def test_a_vote_for_an_image_that_leaves_its_prompt_does_not_count():
    scores = {"right": 2.0, "wrong": 1.0}

    def counts(first, second, choice="first", margin=0.0):
        vote = Vote(prompt="", first=first, second=second, choice=choice)
        return keeps_prompt(vote, scores, margin)

    assert not counts("wrong", "right") and counts("wrong", "right", "second")
    assert counts("right", "wrong") and counts("wrong", "wrong")
    assert counts("wrong", "right", "tie") and counts("wrong", "of no score")
    assert counts("wrong", "right", margin=1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_votes_become_a_lora_that_diffusers_loads(tmp_path):
    changes = ["evaluation.num_images=6", "run.iterations=2", "run.trackers=[]"]
    config = load_config("quickstart-sana", ["pipeline.device=cpu", *changes])
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
