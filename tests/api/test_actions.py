"""The commands' work on the tiny pipeline: images, scores, galleries, a whole training."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrl.api import align, evaluate, gallery, named_rewards
from flowrl.api import sample as sample_images
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.evaluation.drawing import Drawing
from flowrl.export.hub import stage
from flowrl.scoring.spec import closing
from flowrl.utils.images import to_tensor


@pytest.fixture(scope="module")
def run_dir(tiny_config, tmp_path_factory):
    """A finished run of three iterations with an evaluation before and after."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    config = tiny_config(
        run={"output_dir": str(folder), "iterations": 3, "sample_every": 2, "push_to_hub": True},
        evaluation={
            "prompts": "tiny:geneval:test",
            "num_images": 2,
            "num_inference_steps": 2,
            "batch_size": 2,
        },
    )
    with pytest.MonkeyPatch.context() as patch:  # the Hub is a folder beside the run's
        patch.setattr("flowrl.api.open_repository", lambda name: f"me/{name}")
        upload = lambda run, to: str(stage(run, run.parent / to, to))  # noqa: E731
        patch.setattr("flowrl.export.hub.push", upload)
        rows = align(config).comparisons
    assert [row.name for row in rows] == ["brightness"]
    return folder


def test_what_a_run_uploads_is_public_and_names_no_path_of_this_machine(
    run_dir, tiny_pipeline_path
):
    uploaded = run_dir.parent / "me" / "small"
    names = {p.relative_to(uploaded).as_posix() for p in uploaded.rglob("*") if p.is_file()}
    images = {name for name in names if name.startswith("card/")}
    assert names == {"pytorch_lora_weights.safetensors", "README.md", "config.yaml"} | images
    assert {"card/before-after.png", "card/aligned-1.png"} <= images
    for name in ("checkpoints", "samples/step-000002.png", "metrics.jsonl", "gallery/index.html"):
        assert (run_dir / name).exists()  # there, and not uploaded
    for name in ("README.md", "config.yaml"):
        text = (uploaded / name).read_text()
        for private in (str(run_dir.parent), tiny_pipeline_path, str(Path.cwd())):
            assert private not in text
    card = (uploaded / "README.md").read_text()
    assert "pipe.load_lora_weights('me/small', " in card


@pytest.fixture
def sample(tiny_pipeline_path, tmp_path):
    """Sample one image of a prompt, as bytes."""
    usual = {"lora": None, "negative": "", "guidance": 1.0, "steps": 3, "seed": 0}
    usual |= {"count": 1, "max_sequence_length": 12, "device": "cpu"}

    def make(**changes):
        options = usual | changes
        drawn = {"seed": options.pop("seed"), "count": options.pop("count")}
        drawing = Drawing(tiny_pipeline_path, **options)
        ((path, _),) = sample_images(
            drawing, ["a red circle"], output_dir=tmp_path, **drawn
        ).items()
        return Image.open(path).tobytes()

    return make


def test_samples_follow_the_seed_the_lora_and_its_strength(run_dir, sample):
    run = str(run_dir)
    base, aligned = sample(), sample(lora=run)
    assert base == sample() and base != aligned and base != sample(seed=1)
    assert sample(lora=run, rlg=0.0) == base and sample(lora=run, rlg=1.0) == aligned
    assert sample(lora=run, rlg=3.0) not in (base, aligned)


def test_a_transfer_between_equal_pipelines_is_the_lora_at_each_strength(
    run_dir, sample, tiny_pipeline_path
):
    run = {"lora": str(run_dir), "transfer": tiny_pipeline_path}
    assert sample(**run, rlg=0.0) == sample()
    aligned = sample(lora=str(run_dir))
    shades = zip(sample(**run), aligned, strict=True)
    assert max(abs(a - b) for a, b in shades) <= 1 and aligned != sample()


def test_a_gallery_shows_the_base_and_the_lora_of_a_run_side_by_side(run_dir, tmp_path):
    options = {"prompts": None, "count": 2, "seed": None, "output_dir": tmp_path / "pages"}
    html = gallery(run_dir, base=None, lora=None, **options).read_text()
    names, images = zip(*re.findall(r'alt="([^:"]+): [^"]*"[^>]* src="([^"]+)"', html), strict=True)
    assert names == ("base", "aligned") * 2 and len(set(images)) == 4
    assert (tmp_path / "pages" / "grid.png").is_file()


def brightness(path: Path) -> float:
    return to_tensor([Image.open(path)]).mean().item()


def test_the_best_of_several_seeds_is_the_one_that_the_reward_prefers(tiny_pipeline_path, tmp_path):
    drawing = Drawing(
        tiny_pipeline_path, lora=None, negative="", guidance=1.0, steps=3, max_sequence_length=12,
        device="cpu",
    )  # fmt: skip
    prompts = ["a red circle", "two blue stars"]

    def images(folder, **options):
        out = tmp_path / folder
        return sample_images(drawing, prompts, seed=3, count=2, output_dir=out, **options)

    (spec,) = named_rewards(["brightness"])
    with closing([spec]):
        kept = images("best", best_of=3, reward=spec)
        worst = images("worst", best_of=3, reward=dataclasses.replace(spec, weight=-1.0))
        every = [
            sample_images(drawing, prompts, seed=s, count=1, output_dir=tmp_path / "all")
            for s in range(3, 9)
        ]
    means = [[brightness(path) for path in paths] for paths in every]  # (seeds, prompts)
    for chosen, best in ((kept, max), (worst, min)):
        expected = [best(means[s][p] for s in range(a, a + 3)) for p in (0, 1) for a in (0, 3)]
        assert list(chosen.values()) == pytest.approx(expected, abs=1e-4)
        assert [brightness(path) for path in chosen] == pytest.approx(expected, abs=1e-4)
    assert all(math.isnan(score) for score in every[0].values())
    (geneval,) = named_rewards(["geneval"])
    with pytest.raises(UserError, match="geneval cannot score the prompt 'a red circle'"):
        images("none", best_of=2, reward=geneval)


def test_samples_of_a_run_are_generated_as_it_was_evaluated(run_dir, sample):
    evaluation = load_config(run_dir / "config.yaml").evaluation
    unsaid = {"lora": str(run_dir), "guidance": None, "max_sequence_length": None}
    steps, guidance = evaluation.num_inference_steps, evaluation.guidance_scale
    said = {"steps": steps, "guidance": guidance, "max_sequence_length": 12}
    plain = sample(**unsaid, steps=None)
    assert plain == sample(**unsaid | said)
    assert plain != sample(**unsaid, steps=steps + 1)


def test_an_evaluation_measures_what_is_asked_of_it_or_refuses(tiny_config, tmp_path):
    small = {"prompts": "tiny:geneval:test", "num_images": 2, "num_inference_steps": 2}
    quality = {"name": "tiny_quality", "held_out": True}
    rewards = [{"name": "brightness"}, quality]
    prompts = tmp_path / "worded.jsonl"
    prompts.write_text('{"prompt": "a red circle"}\n')
    worded = small | {"prompts": str(prompts)}
    rows = evaluate(tiny_config(evaluation=worded, rewards=rewards))
    means = {row["reward"]: row["mean"] for row in rows}
    assert set(means) == {"brightness", "tiny_quality"}
    assert not any(math.isnan(mean) for mean in means.values())
    nowhere = {"path": str(tmp_path / "nowhere")}  # the refusal comes before it is loaded
    config = tiny_config(pipeline=nowhere, evaluation=small | {"prompts": None}, rewards=rewards)
    with pytest.raises(UserError, match="evaluation.prompts"):
        evaluate(config)
    rule = {"held_out": "tiny_quality"}  # nothing is asked of training
    options = {"run": {"on_hacking": rule}}
    (row,) = evaluate(tiny_config(**options, evaluation=small | {"every": 1}))
    assert row["reward"] == "brightness" and 0 <= row["mean"] <= 1


def test_objects_of_the_caller_replace_what_the_recipe_names(tiny_config, load_tiny, tmp_path):
    seen = []

    def redness(images, prompts, metadata):
        seen.extend(prompts)
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))

    config = tiny_config(run={"output_dir": str(tmp_path / "run"), "iterations": 1})
    pipeline = load_tiny()
    before = pipeline.transformer.state_dict()["proj_out.weight"].clone()
    align(config, pipeline=pipeline, prompts=["a dog", "a cat"], rewards={"redness": redness})
    assert set(seen) == {"a dog", "a cat"}
    assert torch.equal(pipeline.transformer.state_dict()["proj_out.weight"], before)
