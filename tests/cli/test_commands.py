"""What commands list, print and refuse."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import torch

from flowrl.cli.info import examine
from flowrl.cli.recipes import METHODS
from flowrl.config import load_config, parse_config
from flowrl.config.load import merge, parse_overrides, preset_names
from flowrl.training.checkpoint import STATE
from flowrl.training.ledger import Ledger
from flowrl.trees.presets import PRESETS
from flowrl.utils.files import save_state
from flowrl.utils.journal import append_line


def test_only_needed_packages_that_are_missing_or_old_are_problems(monkeypatch):
    wanted = ["flowrl-none>=2", "pydantic>=99", "typer>=0.1", 'wandb>=99; extra == "wandb"']
    monkeypatch.setattr("importlib.metadata.requires", lambda _: wanted)
    monkeypatch.setattr("flowrl.cli.info.OPTIONAL", {"wandb": "a tracker"})
    versions = {"pydantic": "2.9", "typer": "0.15"}
    monkeypatch.setattr("flowrl.cli.info._installed", versions.get)
    found = {result.topic: result for result in examine()}
    missing, old, optional = (found[name] for name in ("flowrl-none", "pydantic", "wandb"))
    assert missing.state == old.state == "problem" and "expected >=99" in old.detail
    assert missing.remedy == 'pip install "flowrl-none>=2"'
    assert optional.state == "missing" and "expected >=99: a tracker" in optional.detail
    assert found["packages"].detail == "typer 0.15"


NAMES = [name for name in preset_names() if not name.startswith(METHODS)]


def test_every_recipe_is_listed_with_what_decides_a_choice(flowrl):
    code, out, _ = flowrl("recipes", "--json")
    rows = {row["recipe"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and list(rows) == NAMES
    row = rows["sd3.5-medium-nft-24gb"]
    assert (row["method"], row["GPU"], row["ran"]) == ("DiffusionNFT", "24 GB", "no")
    assert rows["quickstart"]["GPU"] == "none" and rows["quickstart"]["ran"] == "yes"
    assert rows["quickstart"]["trained rewards"] == "geneval"
    _, some, _ = flowrl("recipes", "FLUX", "gdro", "--json")
    assert [json.loads(line)["recipe"] for line in some.splitlines()] == ["flux.1-dev-gdro-80gb"]
    assert flowrl("recipes", "nonesuch")[0] == 1
    methods = [name for name in preset_names() if name not in NAMES]
    out = flowrl("recipes", "methods")[1]
    assert methods and all(name in out for name in methods)


def test_runs_are_listed_with_their_state_and_size(tmp_path, flowrl):
    recipe = {"run": {"iterations": 3}}
    for name in ("done", "half"):
        folder = tmp_path / name
        (folder / "set-aside" / "old").mkdir(parents=True)
        (folder / "set-aside" / "old" / STATE).write_bytes(bytes(500_000))
        (folder / "config.yaml").write_text("run: {iterations: 3}")
        for step in (1, 2, 3):
            path = folder / "checkpoints" / f"step-{step:06d}" / STATE
            save_state(path, {"weights": torch.zeros(250_000)})
        ledger = Ledger(folder)
        ledger.append("start", flowrl="0", step=None, recipe=recipe, facts={}, changed={})
        if name == "done":
            ledger.append("stop", step=3, reason="done", complete=True)
    code, out, _ = flowrl("runs", str(tmp_path), "--json")
    rows = {row["run"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and rows["done"]["state"] == "finished" and rows["half"]["state"] == "killed"
    assert rows["done"]["MB"] == 3.5 and rows["done"]["step"] == rows["done"]["iterations"] == 3
    assert flowrl("runs", str(tmp_path / "none"))[0] == 1


def test_every_preset_shows_itself_and_says_what_works(flowrl):
    for name in sorted(PRESETS.keys() - {"custom"}):
        # Every preset says which leaves work when it does not.
        code, out, err = flowrl("tree", name, "--leaves", "11")
        assert ("11 images" in out) if code == 0 else ("group_size is 11" in err)
        # Every preset shows itself and what it says of recipes works.
        code, out, _ = flowrl("tree", name)
        assert code == 0
        words = shlex.split(re.search(r"In a recipe: (.*)", out)[1])  # type: ignore[index]
        if credit := PRESETS[name].credit:
            assert f'Its published credit: "objective.advantage={credit}"' in out
            words.append(f"objective.advantage={credit}")
            assert f"| `{name}` |" in PAGE and f"| `{credit}` |" in PAGE
        if name == "ode":  # nothing to learn from but the images
            words.append("objective={kind: nft}")
        config: Any = parse_config(merge(SMALLEST, parse_overrides(words)))
        assert f"{config.rollout.group_size} images from" in out
        on_quickstart: Any = load_config("quickstart-grpo", words)
        assert on_quickstart.rollout.tree == config.rollout.tree
        if credit:
            assert on_quickstart.objective.advantage.scale == config.objective.advantage.scale


SMALLEST = {"prompts": {"train": "p.txt"}, "rewards": [{"name": "ocr"}]}
PAGE = (Path(__file__).parents[2] / "docs" / "trees.md").read_text(encoding="utf-8")


def test_votes_are_exported_without_a_recipe_and_trained_on_with_one(
    tmp_path, monkeypatch, flowrl, write_images
):
    monkeypatch.chdir(tmp_path)
    folder = write_images(tmp_path / "votes", ["a star"], images=2)
    first, second = (f"00000/samples/{k:04d}.png" for k in range(2))
    vote = {"prompt": "a star", "first": first, "second": second, "choice": "second"}
    append_line(folder / "votes.jsonl", vote)
    code, out, _ = flowrl("vote", "votes", "--export", "pairs.jsonl")
    assert code == 0 and "1 pairs" in out and "chosen" in (tmp_path / "pairs.jsonl").read_text()
    code, _, err = flowrl("vote", "votes", "--train")
    assert code == 1 and "No recipe given" in err
    code, _, err = flowrl(
        "vote", "quickstart", "-o", "votes", "--train", "run.output_dir=runs/mine"
    )
    assert code == 1 and "run.output_dir" in err
