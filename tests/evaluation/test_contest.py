"""Base and LoRAs side by side: the same noises, honest intervals, nothing drawn twice."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from flowrl.api import align
from flowrl.backbones.lora_files import FILE
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.evaluation.contest import BASE, DIVERSITY, OVERALL, hold_contest, short_name
from flowrl.evaluation.leaderboard import (
    caption,
    comparisons,
    kinds,
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
def held(tiny_config, tmp_path_factory):
    """A contest of the base, a LoRA and its copy, with its folder and its recipe."""
    root = tmp_path_factory.mktemp("contest")
    one, copy = write_lora(root / "one", 0.3), write_lora(root / "copy", 0.3)
    config = tiny_config(evaluation=EVALUATION, rewards=REWARDS)
    return hold_contest(config, [one, copy], root / "out"), root, config


def test_all_draw_the_same_prompts_from_the_same_noises_and_copies_do_not_differ(held):
    contest, _, _ = held
    by_name = {own.name: own for own in contest.contestants}
    assert set(by_name) == {BASE, "one", "copy"} and len(contest.prompts) == 12
    assert list(contest.number) == [0, 1] * 6
    assert [p.uid for p in contest.prompts[::2]] == [p.uid for p in contest.prompts[1::2]]
    pictures = {n: [p.read_bytes() for p in contest.images(own)] for n, own in by_name.items()}
    assert pictures["one"] == pictures["copy"] != pictures[BASE]
    assert by_name["one"].folder != by_name["copy"].folder  # each was drawn
    copies = [p for p in contest.pairs if {p.first, p.second} == {"one", "copy"}]
    assert {p.measure for p in copies} == {OVERALL, "brightness", "tiny_colors", DIVERSITY}
    for pair in copies:
        assert (pair.contrast.mean, pair.contrast.low, pair.contrast.high) == (0, 0, 0)
        assert pair.contrast.p == pair.corrected == 1 and not pair.differs
    assert rank(contest, by_name["one"]) == rank(contest, by_name["copy"])


def test_an_interrupted_contest_goes_on_and_the_base_is_drawn_once(held, monkeypatch):
    contest, root, config = held
    before = {path: path.read_bytes() for path in sorted((root / "out").rglob("*.png"))}
    lost = contest.images(contest.contestants[0])[5]
    lost.unlink()
    drawn = []
    draw = Evaluator.images

    def counted(*args):
        drawn.append(args)
        return draw(*args)

    monkeypatch.setattr(Evaluator, "images", counted)
    third = write_lora(root / "third", 0.1, seed=1)
    loras = [str(root / "one"), str(root / "copy"), third]
    again = hold_contest(config, loras, root / "out")
    assert len(drawn) == 1 + 3  # the batch that lost an image, and the new LoRA's three
    assert all(path.read_bytes() == data for path, data in before.items())
    new = {own.name: own for own in again.contestants}
    for own in contest.contestants:
        assert torch.equal(own.measures[OVERALL], new[own.name].measures[OVERALL])


def test_pages_and_tables_say_what_was_measured(held, tmp_path):
    contest, _, _ = held
    page = write_leaderboard(contest, tmp_path)
    html = page.read_text()
    assert "tiny_colors (held out)" in html and html.count("data:image/") == 6 * 3
    assert (tmp_path / "leaderboard.png").stat().st_size > 10_000
    with open(tmp_path / "comparisons.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(contest.pairs) == 3 * 4
    assert float(rows[0]["change"]) == comparisons(contest)[0]["change"]
    with open(tmp_path / "scores.csv") as file:
        assert len(list(csv.DictReader(file))) == 3 * 12
    table = ranking(contest)
    assert [row["overall"] for row in table] == sorted((r["overall"] for r in table), reverse=True)
    assert sum(len(rows) for rows in contest.kinds().values()) == 12 and len(contest.kinds()) == 6
    for row in kinds(contest):
        (own,) = (c for c in contest.contestants if c.name == row["name"])
        images = [i for i, p in enumerate(contest.prompts) if p.metadata["tag"] == row["prompts"]]
        assert row["images"] == len(images) == 2
        assert row["brightness"] == pytest.approx(own.measures["brightness"][images].mean().item())
    with open(tmp_path / "kinds.csv") as file:
        assert len(list(csv.DictReader(file))) == len(kinds(contest)) == 18


def test_a_lora_of_another_network_is_refused_before_the_base_is_drawn(held, tmp_path):
    _, root, config = held
    tensors = load_file(root / "one" / FILE)
    save_file({k.replace("blocks.1", "blocks.9"): t for k, t in tensors.items()}, tmp_path / FILE)
    with pytest.raises(UserError, match=r"lacks 1, transformer_blocks\.9\.attn\.to_v"):
        hold_contest(config, [str(root / "one"), str(tmp_path / FILE)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_paraphrase_gap_is_what_a_reward_loses_in_other_words(tiny_config, tmp_path):
    rows = [{"prompt": "a red star", "paraphrases": ["a star that is red"]}, {"prompt": "a ring"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "prompts": str(tmp_path / "rows.jsonl"), "num_images": 4, "num_inference_steps": 2,
        "batch_size": 4, "paraphrases": True,
    }  # fmt: skip
    config = tiny_config(evaluation=own)
    contest = hold_contest(config, [], tmp_path / "out")
    (base,) = contest.contestants

    def brightness(path):
        with Image.open(path) as image:
            return np.asarray(image).mean() / 255

    gap = base.measures["paraphrase_gap/brightness"]
    for row, prompt in enumerate(contest.prompts):
        drawn, worded = base.folder / f"{row:05d}.png", base.folder / f"reworded/{row:05d}.png"
        if prompt.paraphrases:
            expected = brightness(drawn) - brightness(worded)
            assert gap[row].item() == pytest.approx(expected, abs=1e-6) and expected
        else:
            assert gap[row].isnan() and not worded.exists()


def test_prompts_that_were_trained_on_are_refused_before_anything_is_drawn(
    held, tiny_config, tmp_path
):
    seen = EVALUATION | {"prompts": "tiny:geneval:train"}
    config = tiny_config(
        prompts={"train": "tiny:geneval:train", "allow_overlap": False},
        evaluation=seen,
        rewards=REWARDS,
    )
    with pytest.raises(UserError, match="prompts.train"):
        hold_contest(config, [str(held[1] / "one")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_few_prompts_are_said_to_tell_nothing_apart(held):
    contest, _, _ = held
    assert "6 prompts are too few for any of them: it takes 9" in caption(contest)


def test_a_lora_is_called_by_what_tells_it_apart():
    assert short_name("me/SD3.5M-FlowGRPO-GenEval") == "SD3.5M-FlowGRPO-GenEval"
    assert short_name("runs/a/checkpoints/step-000012") == "a/checkpoints/step-000012"
    assert short_name("me/x/checkpoint-3/lora") == "x/checkpoint-3/lora"
    assert short_name("files/style.v2.safetensors") == "style.v2"


# --- a real training ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_training_is_ranked_alike_over_three_seeds_and_a_copy_does_not_differ(tmp_path):
    """Tiny SANA: the base, a third of a training, its end, that with noise of its own norm, and a
    copy of the end. 600 images tell them apart; the noise costs the end 0.001 to 0.004."""
    changes = ["run.iterations=48", "run.checkpoint_every=16", "run.keep_checkpoints=3"]
    changes += [f"run.output_dir={tmp_path / 'run'}", "run.trackers=[]"]
    changes += ["evaluation.every=0", "evaluation.num_images=24", "run.sample_every=0"]
    align(load_config("quickstart-sana", [*changes, "pipeline.device=cpu"]))
    third = tmp_path / "run" / "checkpoints" / "step-000016"
    finished, copy, noisy = (tmp_path / name for name in ("finished", "copy", "noisy"))
    source = tmp_path / "run" / FILE
    for folder in (finished, copy, noisy):
        folder.mkdir()
        (folder / FILE).write_bytes(source.read_bytes())
    spoil(noisy / FILE)
    orders: list[list[str]] = []
    for seed in (11, 22, 33):
        config = load_config(
            "quickstart-sana",
            [f"evaluation.seed={seed}", "evaluation.num_images=600", "pipeline.device=cpu"],
        )
        loras = [str(path) for path in (third, finished, noisy, copy)]
        contest = hold_contest(config, loras, tmp_path / f"seed{seed}")
        write_leaderboard(contest, tmp_path / f"seed{seed}")
        for row in ranking(contest):
            print(seed, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        orders.append([row["name"] for row in ranking(contest)])
        means = {own.name: own.mean(OVERALL) for own in contest.contestants}
        (early,) = (name for name in means if name.endswith("step-000016"))
        assert means[BASE] < means[early] < means["noisy"] <= means["finished"] == means["copy"]
        same = [p for p in contest.pairs if {p.first, p.second} == {"finished", "copy"}]
        assert same and not any(pair.differs for pair in same)
        assert all(pair.contrast.mean == 0 for pair in same)
    assert orders[0] == orders[1] == orders[2]


def spoil(file) -> None:
    """Add noise to each tensor, as long as the tensor itself."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        kept = opened.metadata()[
            "lora_adapter_metadata"
        ]  # the digest is of the tensors as they were
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(file).items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor + noise * (tensor.norm() / noise.norm())
    save_file(tensors, file, {"lora_adapter_metadata": kept})
