"""Base and LoRAs side by side: the same noise, intervals over prompts, nothing made twice."""

import csv
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.backbones.lora_files import FILE
from flowrl.errors import UserError
from flowrl.evaluation.comparison import (
    BASE,
    EVALUATIONS,
    OVERALL,
    compare_loras,
)
from flowrl.evaluation.leaderboard import (
    pair_rows,
    rank,
    ranking,
    write_leaderboard,
)
from flowrl.training.evaluate import Evaluator

EVALUATION = {
    "prompts": "tiny:geneval:test", "num_images": 12, "num_inference_steps": 2, "batch_size": 4,
    "balance": "tag",
}  # fmt: skip
REWARDS = [{"name": "brightness"}, {"name": "tiny_colors", "held_out": True}]


def write_lora(folder, scale: float, seed: int = 0):
    """A LoRA of two layers of the tiny SD3, with random factors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for block in range(2):
        name = f"transformer.transformer_blocks.{block}.attn.to_v"
        tensors[f"{name}.lora_A.weight"] = torch.randn(2, 128, generator=generator)
        tensors[f"{name}.lora_B.weight"] = scale * torch.randn(128, 2, generator=generator)
    header = {"transformer.r": 2, "transformer.lora_alpha": 2}
    folder.mkdir()
    save_file(tensors, folder / FILE, {"lora_adapter_metadata": json.dumps(header)})
    return str(folder)


@pytest.fixture(scope="module")
def compared(tiny_config, tmp_path_factory):
    """The comparison of the base, a LoRA and its copy; folder and recipe."""
    root = tmp_path_factory.mktemp("comparison")
    for name in ("one", "copy"):
        write_lora(root / name, 0.3)
    config = tiny_config(evaluation=EVALUATION, rewards=REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return compare_loras(config, ["one", "copy"], root / "out"), root, config


@pytest.fixture
def made(monkeypatch):
    """What all evaluations that are computed are of."""
    names, call = [], Evaluator.__call__

    def counted(self, velocity, runtime, of):
        names.append(of)
        return call(self, velocity, runtime, of)

    monkeypatch.setattr(Evaluator, "__call__", counted)
    return names


def files(folder) -> dict:
    paths = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p): p.read_bytes() for p in paths}


def test_all_have_the_same_prompts_and_noise_and_copies_do_not_differ(compared):
    comparison, _, _ = compared
    by_name = {entry.name: entry for entry in comparison.entries}
    assert set(by_name) == {BASE, "one", "copy"} and len(comparison.prompts) == 12
    pictures = {name: entry.evaluation.images for name, entry in by_name.items()}
    assert torch.equal(pictures["one"], pictures["copy"])
    assert not torch.equal(pictures["one"], pictures[BASE])
    copies = [p for p in comparison.pairs if {p.first, p.second} == {"one", "copy"}]
    assert {p.measure for p in copies} == {OVERALL, "brightness", "tiny_colors"}
    for pair in copies:
        assert (pair.contrast.mean, pair.contrast.low, pair.contrast.high) == (0, 0, 0)
        assert pair.contrast.p == pair.corrected == 1 and not pair.differs
    overall = next(pair for pair in copies if pair.measure == OVERALL)
    assert (overall.contrast.images, overall.contrast.prompts) == (12, 12)
    assert rank(comparison, by_name["one"]) == rank(comparison, by_name["copy"])


def test_a_later_lora_meets_the_base_as_it_is(compared, made, monkeypatch):
    comparison, root, config = compared
    before = files(root / "out")
    write_lora(root / "third", 0.1, seed=1)
    monkeypatch.chdir(root)
    again = compare_loras(config, ["one", "copy", "third"], root / "out")
    assert made == ["third"]
    assert before.items() <= files(root / "out").items()
    new = {entry.name: entry for entry in again.entries}
    for entry in comparison.entries:
        assert torch.equal(entry.measures[OVERALL], new[entry.name].measures[OVERALL])


def test_a_flipped_byte_is_noticed_named_and_its_evaluation_made_again(compared, made, caplog):
    """77 of 77 flips in the scores of a leaderboard went unnoticed, or ended in a traceback."""
    comparison, root, config = compared
    generator, base = random.Random(0), next(e for e in comparison.entries if e.name == BASE)
    compare_loras(config, [], root / "base")  # a folder of one file
    made.clear()
    (path,) = (root / "base" / EVALUATIONS).iterdir()
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)
    (entry,) = compare_loras(config, [], root / "base").entries
    assert made == ["base"] and str(path) in caplog.text
    assert torch.equal(entry.measures[OVERALL], base.measures[OVERALL])
    made.clear()
    compare_loras(config, [], root / "base")
    assert not made


def test_tables_have_all_measures_and_the_ranking_begins_with_the_best(compared, tmp_path):
    comparison, _, _ = compared
    write_leaderboard(comparison, tmp_path)
    with open(tmp_path / "comparisons.csv", newline="") as file:
        pairs = list(csv.DictReader(file))
    assert len(pairs) == len(comparison.pairs) == 3 * 3
    assert float(pairs[0]["change"]) == pair_rows(comparison)[0]["change"]
    overall = [row["overall"] for row in ranking(comparison)]
    assert overall == sorted(overall, reverse=True)


def test_a_lora_of_another_network_and_prompts_of_training_are_refused_at_once(
    compared, tiny_config, tmp_path
):
    _, root, config = compared
    tensors = load_file(root / "one" / FILE)
    changed = {k.replace("blocks.1", "blocks.9"): t for k, t in tensors.items()}
    save_file(changed, tmp_path / FILE)
    trained_on = tiny_config(
        prompts={"train": "tiny:geneval:train", "allow_overlap": False},
        evaluation=EVALUATION | {"prompts": "tiny:geneval:train"}, rewards=REWARDS,
    )  # fmt: skip
    one, other = str(root / "one"), str(tmp_path / FILE)
    for recipe, loras, named in (
        (config, [one, other], r"transformer_blocks\.9\.attn\.to_v"),
        (trained_on, [one], "prompts.train"),
    ):
        with pytest.raises(UserError, match=named):
            compare_loras(recipe, loras, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_rewards_without_a_version_are_scored_again(tiny_config, tmp_path, made, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "def my_reward(images, prompts, metadata):\n    return images.mean((1, 2, 3)){}\n"
    options = EVALUATION | {"num_images": 4}
    config = tiny_config(evaluation=options, rewards=[{"name": "mine:my_reward"}])
    means = []
    for change, parts in (("", 1), (" * 0", 2)):
        (tmp_path / "mine.py").write_text(code.format(change))
        sys.modules.pop("mine", None)
        (base,) = compare_loras(config, [], tmp_path / "out").entries
        means.append(base.mean(OVERALL))
        assert len(made) == parts
    assert means[0] > means[1] == 0


def test_the_one_that_is_significantly_better_ranks_first():
    pair = SimpleNamespace(
        measure=OVERALL, first="a", second="b", differs=True, contrast=SimpleNamespace(mean=0.1)
    )
    comparison: Any = SimpleNamespace(pairs=[pair])
    entries: list[Any] = [SimpleNamespace(name=name, measures=[OVERALL]) for name in "ab"]
    assert [rank(comparison, entry) for entry in entries] == [2, 1]
