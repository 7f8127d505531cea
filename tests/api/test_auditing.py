"""`flowrl audit`: what each preview says of the exact images; nothing is left behind."""

import pytest

from flowrl.api import audit
from flowrl.config import config_yaml

EXPLORE = {"candidates": 6, "num_inference_steps": 2, "precision": "bf16", "min_dim": 0}


@pytest.fixture(scope="module")
def recipe(tiny_config, tmp_path_factory):
    """A recipe file of a small run that explores, made for NFT."""
    config = tiny_config(
        rollout={"tree": {"kind": "ode"}, "explore": EXPLORE},
        objective={"kind": "nft"},
        rewards=[{"name": "brightness"}, {"name": "compressibility", "held_out": True}],
        run={"output_dir": "runs/never", "seed": 1},
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(config_yaml(config))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_a_row_for_each_pair_and_one_of_exact_images(recipe, load_tiny, here):
    rows = audit(
        recipe, prompts=2, steps=[3, 4], precisions=["bf16", "nvfp4-emulated"], pipeline=load_tiny()
    )
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
    assert not list(here.iterdir())
