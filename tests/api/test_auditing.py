"""`flowrl audit`: what each preview says of the exact images; nothing is left behind."""

import pytest

from flowrl.api import audit
from flowrl.assembly.auditing import audit_configs
from flowrl.config import config_yaml

EXPLORE = {"candidates": 6, "num_inference_steps": 2, "precision": "bf16"}


@pytest.fixture(scope="module")
def recipe(tiny_config, tmp_path_factory):
    """A recipe file of a small run that explores, made for NFT."""
    config = tiny_config(
        pipeline={"min_dim": 0},
        rollout={"tree": {"kind": "ode"}, "explore": EXPLORE},
        objective={"kind": "nft"},
        rewards=[{"name": "brightness"}, {"name": "compressibility", "held_out": True}],
        run={"output_dir": "runs/never", "seed": 1},
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(config_yaml(config))
    return path


def test_there_is_a_row_for_each_pair_and_one_of_exact_images(
    recipe, load_tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    precisions = ["bf16", "nvfp4-emulated"]
    configs = audit_configs(recipe, prompts=2, steps=[3, 4], precisions=precisions)
    rows = audit(configs, pipeline=load_tiny())
    assert [(row["steps"], row["precision"]) for row in rows] == [
        (3, "bf16"), (4, "bf16"), (3, "nvfp4-emulated"), (4, "nvfp4-emulated"), (4, "exact"),
    ]  # fmt: skip
    few, same, *low_bit, exact = rows
    # As many steps in the network's own dtype are the exact images themselves.
    for row in (same, exact):
        assert [row["rho"], row["contrast"]] == pytest.approx([1, 1])
    assert few["quantised"] == same["quantised"] == 0
    assert all(0 < row["quantised"] < 1 and row["rho"] < 1 for row in low_bit)
    for row in rows:
        ratio = row["seconds_per_image"] / exact["seconds_per_image"]
        assert row["ratio_to_exact"] == pytest.approx(ratio)
        assert row["missing"] == 0
    assert not list(tmp_path.iterdir())


def test_the_recipe_is_sampled_as_it_explores_and_learns_nothing(recipe, tiny_config, tmp_path):
    (config,) = audit_configs(recipe, ["rollout.num_inference_steps=3"], prompts=3, candidates=9)
    explore = config.rollout.explore
    assert explore is not None
    assert (explore.candidates, explore.num_inference_steps, config.pipeline.min_dim) == (9, 2, 0)
    r = config.rollout
    assert (r.prompts_per_iteration, r.num_inference_steps, config.objective.kind) == (3, 3, "sft")
    # A recipe that does not explore gets the defaults.
    plain = tmp_path / "plain.yaml"
    plain.write_text(config_yaml(tiny_config(rollout={"num_inference_steps": 8})))
    for options, steps in (({}, 6), ({"steps": [2]}, 2)):
        (config,) = audit_configs(plain, prompts=1, **options)
        explore = config.rollout.explore
        assert explore and (explore.candidates, explore.num_inference_steps) == (96, steps)
