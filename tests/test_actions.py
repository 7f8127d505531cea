"""The commands' work on the tiny pipeline: pictures, scores, galleries, a whole training."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from flowrl.api import align, build_gallery, evaluate_model, sample_images
from flowrl.config import config_yaml, load_config
from flowrl.errors import UserError
from flowrl.export.hub import stage


@pytest.fixture(scope="module")
def run_dir(tiny_config, tmp_path_factory):
    """A finished run of three iterations with an evaluation before and after."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    config = tiny_config(
        run={"output_dir": str(folder), "iterations": 3, "sample_every": 2, "push_to_hub": True},
        evaluation={"prompts": "tiny:geneval:test", "images": 6, "steps": 3, "batch_size": 6},
    )
    with pytest.MonkeyPatch.context() as patch:  # the Hub is a folder beside the run's
        patch.setattr("flowrl.api.open_repository", lambda name, private: f"me/{name}")
        upload = lambda run, to: str(stage(run, run.parent / to, to))  # noqa: E731
        patch.setattr("flowrl.export.hub.push", upload)
        rows = align(config)
    assert [row.name for row in rows] == ["brightness"]
    return folder


def test_a_run_folder_holds_lora_card_gallery_metrics_and_checkpoints(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {0, 1, 2, 3}
    assert (run_dir / "pytorch_lora_weights.safetensors").is_file()
    assert (run_dir / "gallery" / "index.html").is_file()
    assert (run_dir / "gallery" / "grid.png").is_file()
    assert (run_dir / "samples" / "step-000002.png").is_file()
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["run"]["iterations"] == 3
    assert "load_lora_weights" in (run_dir / "README.md").read_text()


def test_what_a_run_uploads_is_public_and_names_no_path_of_this_machine(
    run_dir, tiny_pipeline_path
):
    uploaded = run_dir.parent / "me" / "small"
    names = {p.relative_to(uploaded).as_posix() for p in uploaded.rglob("*") if p.is_file()}
    pictures = {name for name in names if name.startswith("card/")}
    assert names == {"pytorch_lora_weights.safetensors", "README.md", "config.yaml"} | pictures
    assert {"card/before-after.png", "card/aligned-1.png"} <= pictures
    assert (run_dir / "checkpoints").is_dir()  # there, and not uploaded
    for name in ("README.md", "config.yaml"):
        text = (uploaded / name).read_text()
        for private in (str(run_dir.parent), tiny_pipeline_path, str(Path.cwd())):
            assert private not in text
    card = (uploaded / "README.md").read_text()
    assert "pipe.load_lora_weights('me/small')" in card and "After an upload" not in card
    assert "After an upload" in (run_dir / "README.md").read_text()


def test_a_gallery_can_be_drawn_again_with_other_prompts(run_dir, tmp_path):
    page = build_gallery(
        run_dir,
        base=None,
        lora=None,
        prompts="tiny:ocr:test",
        count=3,
        seed=5,
        output_dir=tmp_path,
    )
    assert page.is_file() and page.parent == tmp_path
    assert "data:image" in page.read_text()


def test_samples_follow_seed_and_lora(run_dir, tiny_pipeline_path, tmp_path):
    def draw(name, lora, seed):
        (path,) = sample_images(
            tiny_pipeline_path,
            ["a red circle"],
            lora=lora,
            negative="a blue ring",
            guidance=2.0,
            steps=3,
            seed=seed,
            count=1,
            max_sequence_length=12,
            output_dir=tmp_path / name,
            device="cpu",
        )
        return Image.open(path).tobytes()

    assert draw("a", None, 0) == draw("b", None, 0)
    assert draw("a", None, 0) != draw("c", None, 1)
    assert draw("a", None, 0) != draw("d", str(run_dir), 0)


def test_samples_and_galleries_follow_the_strength_of_the_lora(
    run_dir, tiny_pipeline_path, tmp_path
):
    def draw(name, rlg, lora: str | None = str(run_dir)):
        (path,) = sample_images(
            tiny_pipeline_path,
            ["a red circle"],
            lora=lora,
            negative="",
            guidance=1.0,
            steps=3,
            seed=0,
            count=1,
            max_sequence_length=12,
            output_dir=tmp_path / name,
            device="cpu",
            rlg=rlg,
        )
        return Image.open(path).tobytes()

    base, aligned = draw("base", None, lora=None), draw("aligned", None)
    assert draw("0", 0.0) == base and draw("1", 1.0) == aligned
    assert draw("3", 3.0) not in (base, aligned)

    page = build_gallery(
        run_dir,
        base=None,
        lora=None,
        prompts=None,
        count=2,
        seed=None,
        output_dir=tmp_path / "sweep",
        rlg=[0.0, 1.0, 3.0],
    )
    html = page.read_text()
    columns = ["base", "RLG 0", "RLG 1", "RLG 3"]
    first = re.findall(r'alt="([^:"]+): [^"]*"[^>]* src="([^"]+)"', html)[:4]
    assert [name for name, _ in first] == columns
    assert first[0][1] == first[1][1] and len({picture for _, picture in first}) == 3
    means = re.findall(r"<td>brightness, ([^<]+)</td><td>([^<]+)</td><td>([^<]+)</td>", html)
    assert [name for name, *_ in means] == columns[1:]
    assert means[0][1] == means[0][2] and len({base for _, base, _ in means}) == 1
    assert (tmp_path / "sweep" / "grid.png").is_file()


def test_samples_of_a_run_are_drawn_as_it_was_evaluated(run_dir, tiny_pipeline_path, tmp_path):
    evaluation = load_config(run_dir / "config.yaml").evaluation

    def draw(name, steps, guidance, length):
        (path,) = sample_images(
            tiny_pipeline_path,
            ["a red circle"],
            lora=str(run_dir),
            negative="",
            guidance=guidance,
            steps=steps,
            seed=0,
            count=1,
            max_sequence_length=length,
            output_dir=tmp_path / name,
            device="cpu",
        )
        return Image.open(path).tobytes()

    plain = draw("plain", None, None, None)
    assert plain == draw("same", evaluation.steps, evaluation.guidance, 12)
    assert plain != draw("asked", evaluation.steps + 1, None, None)


def test_a_negative_prompt_of_the_run_is_the_default(
    run_dir, tiny_config, tiny_pipeline_path, tmp_path
):
    config = tiny_config(
        rollout={"negative": "a blue ring", "guidance": 3.0},
        evaluation={"prompts": "tiny:geneval:test", "guidance": 3.0, "steps": 2},
    )
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(run_dir / "pytorch_lora_weights.safetensors", run)
    (run / "config.yaml").write_text(config_yaml(config))

    def draw(negative):
        (path,) = sample_images(
            tiny_pipeline_path,
            ["a red circle"],
            lora=str(run),
            negative=negative,
            guidance=None,
            steps=None,
            seed=0,
            count=1,
            max_sequence_length=None,
            output_dir=tmp_path / "pictures",
            device="cpu",
        )
        return Image.open(path).tobytes()

    assert draw("") == draw("a blue ring") != draw("two green stars")


def test_an_evaluation_measures_what_is_asked_of_it_or_refuses(tiny_config, tmp_path):
    small = {"prompts": "tiny:geneval:test", "images": 2, "steps": 2}
    quality = {"name": "tiny_quality", "held_out": True}
    rewards = [{"name": "brightness"}, quality]
    prompts = tmp_path / "worded.jsonl"
    prompts.write_text('{"prompt": "a red circle", "paraphrases": ["one red disc"]}\n')
    worded = small | {"prompts": str(prompts), "paraphrases": True}
    rows = evaluate_model(
        tiny_config(evaluation=worded | {"quality": "tiny_quality"}, rewards=rewards)
    )
    means = {row["reward"]: row["mean"] for row in rows}
    assert {"corrected/brightness", "paraphrase/brightness"} <= set(means)
    assert not any(math.isnan(mean) for mean in means.values())
    for wrong, message in (
        ({"quality": "brightness"}, "evaluation.quality is 'brightness'"),
        ({"quality": "beauty"}, "evaluation.quality is 'beauty'"),
        ({"paraphrases": True}, "evaluation.paraphrases is set, but none"),
        ({"prompts": None}, "evaluation.prompts is null"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_model(
                tiny_config(
                    pipeline={"path": str(tmp_path / "nowhere")},  # said before it is loaded
                    evaluation=small | wrong,
                    rewards=rewards,
                )
            )


def test_an_evaluation_asks_nothing_of_training(tiny_config):
    rule = {"held_out": "tiny_quality"}
    config = tiny_config(
        prompts={"retained": 1},
        rewards=[{"name": "brightness"}],
        evaluation={"prompts": "tiny:geneval:test", "images": 2, "steps": 2, "every": 1},
        run={"stop_when_hacking": rule},
    )
    (row,) = evaluate_model(config)
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
