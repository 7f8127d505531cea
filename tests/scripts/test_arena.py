"""The arena: methods that parse, choices that are frozen, intervals over worlds, runs, requests."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors import safe_open

from flowrl.config import load_config
from flowrl.config.load import preset_names
from flowrl.config.objectives import Objective
from flowrl.errors import UserError
from flowrl.trees.presets import Tree
from scripts.arena.chooser import write_chooser
from scripts.arena.gamed import changes
from scripts.arena.methods import GAMED, METHODS, TRIALS, load_arms, recipe
from scripts.arena.plant import CLEAN, planted_weights, write_prompts
from scripts.arena.recipes import PREFIX, write_recipes
from scripts.arena.report import (
    REMARKS,
    Scores,
    crossed,
    p_value,
    render,
    resampled,
)
from scripts.arena.runs import FROZEN, RATES, RUNS, TUNING, chosen, collect, frozen_methods, ranking
from scripts.arena.world import world
from scripts.compare.data import read_rows, write_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    write_prompts(world(2), folder / "world-2")
    return folder


@pytest.mark.parametrize("path", [METHODS, GAMED])
def test_every_trial_of_every_method_is_a_recipe(worlds, path):
    arms = load_arms(path)
    for arm in arms.values():
        assert len(arm.trials()) <= TRIALS and (not arm.like or arm.like in arms)
        for trial in arm.trials():
            config = recipe(
                arm, worlds / "world-2", seed=3, folder=worlds / "run", iterations=7, changes=trial
            )
            assert (config.run.seed, config.run.iterations) == (3, 7)
            trained = [r for r in config.rewards if not r.held_out]
            kl_on = getattr(config.objective, "kl_on", None)  # its reward is asked in rollouts, too
            measured = [
                r for r in config.rewards if r.held_out and r.name != (kl_on and kl_on.reward)
            ]
            assert trained and all(r.when == "evaluation" for r in measured)


def test_a_test_has_as_many_prompts_of_both_splits_and_none_of_words(worlds):
    lines = (worlds / "world-2" / "test.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    assert {p["split"] for p in prompts} == {"new requests", "new families"}
    assert sum(p["split"] == "new requests" for p in prompts) == len(prompts) / 2
    assert "ocr" not in {p["tag"] for p in prompts}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_worlds_of_the_gallery_come_with_the_clone_planted(number):
    with safe_open(planted_weights(number), "pt") as planted, safe_open(CLEAN, "pt") as clean:
        assert set(planted.keys()) == set(clean.keys())
        name = "proj_out.weight"
        assert planted.get_slice(name).get_shape() == clean.get_slice(name).get_shape()
        assert not torch.equal(planted.get_tensor(name), clean.get_tensor(name))


def test_choices_are_frozen_by_the_first_ranking(worlds, tmp_path):
    arms = {"nft": load_arms()["nft"]}
    with pytest.raises(UserError, match="nft was not tuned"):
        ranking(arms, worlds, tmp_path, tmp_path, 120, numbers=[2], seeds=1)
    write_rows(tmp_path / RATES, [{"arm": "nft", "core_seconds": "4"}])
    trials = [" ".join(trial) for trial in arms["nft"].trials()]
    rows = [{"arm": "nft", "options": t, "score": f"{i}"} for i, t in enumerate(trials)]
    write_rows(tmp_path / TUNING, rows)
    assert " ".join(chosen(arms, tmp_path)["nft"]) == trials[-1]

    def runs(budget: float):
        return ranking(arms, worlds, tmp_path / "runs", tmp_path, budget, numbers=[2], seeds=2)

    assert [run.config.run.iterations for run in runs(120)] == [30, 30]
    write_rows(tmp_path / RUNS, [{"arm": "nft", "world": "2", "seed": "0"}])
    assert [run.seed for run in runs(120)] == [1]  # the other one has its data
    with pytest.raises(UserError, match="nft: its recipe, its trials or the budget changed"):
        runs(60)
    changed = {"nft": dataclasses.replace(arms["nft"], options=("objective.kind=nft",))}
    with pytest.raises(UserError, match="nft: its recipe"):
        ranking(changed, worlds, tmp_path, tmp_path, 120, numbers=[2], seeds=1)
    write_rows(tmp_path / TUNING, rows[:1])
    with pytest.raises(UserError, match="nft: its recipe"):
        runs(120)


def test_a_method_that_joins_later_leaves_the_others_frozen(worlds, tmp_path):
    arms = {name: load_arms()[name] for name in ("nft", "random_reward", "dpo")}
    write_rows(tmp_path / RATES, [{"arm": name, "core_seconds": "4"} for name in arms])
    write_rows(tmp_path / TUNING, [
        {"arm": name, "options": " ".join(arms[name].trials()[0]), "score": "1"}
        for name in ("nft", "dpo")
    ])  # fmt: skip

    def rank(*names: str):
        chosen_arms = {name: arms[name] for name in names}
        ranking(chosen_arms, worlds, tmp_path, tmp_path, 120, numbers=[2], seeds=1)
        return {row["arm"]: row for row in read_rows(tmp_path / FROZEN)}

    first, second = rank("nft"), rank("random_reward", "dpo")
    assert second["nft"] == first["nft"] and len(second) == 3
    assert second["random_reward"]["values"] == second["nft"]["values"]


def test_runs_that_are_not_here_keep_their_data(tmp_path):
    kept = {"arm": "nft", "world": "2", "seed": "0", "options": "", "core_seconds": "118.0"}
    write_rows(tmp_path / RUNS, [kept])
    collect([], tmp_path)
    assert read_rows(tmp_path / RUNS) == [kept]


def test_an_interval_is_as_wide_as_the_level_that_varies():
    """Resampled together; what is equal everywhere adds nothing."""
    counts = np.ones((4, 400))
    equal = [(np.full((4, 400), 0.3), counts)] * 3
    found = crossed(equal)
    assert (found.low, found.mean, found.high) == pytest.approx((0.3, 0.3, 0.3))
    between = [(np.full((4, 400), level), counts) for level in (0.0, 0.3, 0.6)]
    assert crossed(between).high == pytest.approx(0.6) and crossed(between).low == pytest.approx(0)
    rng = np.random.default_rng(0)
    requests = [(np.tile(rng.normal(0.3, 1, 400), (4, 1)), counts)] * 3
    # Requests differ and runs do not: the spread of a mean of 3 draws of worlds, each resampled.
    assert crossed(requests).high - crossed(requests).low == pytest.approx(
        2 * 1.96 / (3 * 400) ** 0.5, rel=0.1
    )


def test_p_is_small_where_an_interval_is_far_from_zero():
    counts, rng = np.ones((3, 60)), np.random.default_rng(0)

    def p(shift: float) -> float:
        return p_value(resampled([(rng.normal(shift, 1, (3, 60)), counts) for _ in range(3)]))

    assert p(0.5) == pytest.approx(2 / 4001) and p(0.0) > 0.1


@pytest.mark.slow
def test_the_page_and_the_chooser_are_what_their_data_say(tmp_path):
    """Every figure of both is computed anew; recipes and values are those that were frozen."""
    gallery, chooser = ROOT / "gallery", ROOT / "docs" / "objectives.md"
    data = gallery / "arena"
    for path in (*data.glob("*.csv"), data / REMARKS):
        shutil.copy(path, tmp_path)
    assert render(tmp_path).read_text() == (data / "README.md").read_text()
    page = tmp_path / "objectives.md"
    page.write_text(chooser.read_text())
    assert write_chooser(data, gallery / "gamed", page).read_text() == chooser.read_text()
    frozen = {row["arm"]: row for row in read_rows(data / FROZEN)}
    arms = {name: load_arms()[name] for name in frozen}
    assert frozen_methods(arms, data, 20) == frozen


def test_at_least_twenty_methods_ran_on_every_world_with_three_seeds():
    runs = read_rows(ROOT / "gallery" / "arena" / RUNS)
    worlds = {row["world"] for row in runs}
    wanted = sorted((world, seed) for world in worlds for seed in "012")
    places = {row["arm"]: [] for row in runs}
    for row in runs:
        places[row["arm"]].append((row["world"], row["seed"]))
    assert len(places) >= 20 and len(worlds) >= 3
    assert all(sorted(one) == wanted for one in places.values())


def test_choices_on_gamed_rewards_are_those_that_were_frozen():
    page = ROOT / "gallery" / "gamed"
    frozen = {row["arm"]: row for row in read_rows(page / FROZEN)}
    assert set(frozen) == {row["arm"] for row in read_rows(page / RUNS)}
    arms = {name: load_arms(GAMED)[name] for name in frozen}
    assert frozen_methods(arms, page, 120) == frozen


@pytest.mark.parametrize("proxy", ["vivid", "named_color"])
def test_a_gate_lets_gold_rise_where_the_sum_lets_it_fall(proxy):
    data = ROOT / "gallery" / "gamed"
    summed, gated = (f"nft on {proxy} {how} geneval" for how in ("plus", "gated by"))
    assert changes(data, summed)[1].high < 0 < changes(data, gated)[1].mean
    scores = Scores.read(data)
    every = {world: np.ones(len(rows), bool) for world, rows in scores.images.items()}
    assert scores.interval(scores.gains(gated, summed), every).low > 0


@pytest.mark.parametrize("proxy", ["vivid", "named_color"])
@pytest.mark.parametrize("method", ["nft", "grpo", "sft"])
def test_gold_falls_while_a_reward_with_a_loophole_rises(method, proxy):
    """Over five runs of each; on the default rewards gold rises at the same rate."""
    data = ROOT / "gallery" / "gamed"
    proxies, gold = changes(data, f"{method} on {proxy}")
    assert proxies[proxy].low > 0 and gold.high < 0
    assert changes(data, f"{method} on the default rewards")[1].mean > 0
    assert sum(row["arm"] == f"{method} on {proxy}" for row in read_rows(data / RUNS)) == 5


def test_every_tree_and_objective_has_a_recipe_that_is_the_list_s(tmp_path):
    data = ROOT / "gallery" / "arena"
    written = {path.name: path.read_text() for path in write_recipes(load_arms(), data, tmp_path)}
    folder = ROOT / "configs"
    assert written == {path.name: path.read_text() for path in folder.glob(f"{PREFIX}*.yaml")}
    recipes = [load_config(name) for name in preset_names()]
    kinds = {recipe.objective.kind for recipe in recipes} | {"custom"}
    assert kinds == {kind.model_fields["kind"].default for kind in get_args(get_args(Objective)[0])}
    trees = {recipe.rollout.tree.kind for recipe in recipes} | {"custom"}
    assert trees == {tree.model_fields["kind"].default for tree in get_args(get_args(Tree)[0])}
