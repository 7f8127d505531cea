"""`flowrl init` writes a recipe of the pipeline's own class, or says why not."""

import json

import diffusers
import pytest
from typer.testing import CliRunner

from flowrl.backbones.small import small_folder
from flowrl.cli import app, init
from flowrl.config import load_config
from flowrl.planning.model_specs import MODEL_SPECS


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    return ["--prompts", str(tmp_path / "prompts.txt"), "--reward", "brightness"]


def test_answers_become_a_recipe_that_is_not_overwritten(
    tmp_path, flowrl, prompts, even_activations
):
    file = tmp_path / "mine.yaml"
    code, out, _ = flowrl("init", file, "--model", "tiny-sana", *prompts, "--memory=0")
    assert code == 0 and f"flowrl train {file} --dry-run" in out
    config = load_config(file)
    assert config.pipeline.path == "tiny-sana"
    assert config.prompts.held_out == 0.1 and config.evaluation.prompts is None
    assert [reward.name for reward in config.rewards] == ["brightness"]
    before = file.read_bytes()
    code, _, err = flowrl("init", file, "--model", "tiny-sana", *prompts, "--memory=0")
    assert code == 1 and str(file) in err and file.read_bytes() == before


def test_the_parent_is_of_the_same_checkpoint_and_fits_the_gpu():
    for model, parent in (
        ("stabilityai/stable-diffusion-3.5-large", "sd3.5-large-grpo-fast-48gb"),
        ("black-forest-labs/FLUX.2-klein-base-9B", "flux.2-klein-9b-nft-48gb"),
    ):
        assert init.parent_of(init.class_of(model), 48 * 10**9, model) == parent


def test_a_small_folder_of_any_class_is_trained_on_a_cpu(
    tmp_path, flowrl, prompts, even_activations
):
    folder = small_folder(diffusers.Flux2KleinPipeline, tmp_path / "klein")
    file = tmp_path / "mine.yaml"
    code, out, _ = flowrl("init", file, "--model", folder, *prompts, "--memory=0")
    assert code == 0, out
    assert load_config(file).pipeline.path == str(folder)


def test_a_checkpoint_of_another_name_gets_the_recipe_of_its_class_or_else_of_its_size(
    tmp_path,
):
    """A folder of klein-4B got the recipe of 9B, and one of Chroma none."""
    for name, kind, config, parent in (
        ("mine", "Flux2KleinPipeline", "flux.2-klein-4b", "flux.2-klein-4b-nft-24gb"),
        ("sana", "SanaPipeline", "sana-1.6b", "sana-1.6b-nft-12gb"),
        ("other", "ChromaPipeline", None, "flux.2-klein-9b-nft-24gb"),
    ):
        folder = tmp_path / name
        small_folder(getattr(diffusers, kind), folder)
        values = {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24,
                  "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}  # fmt: skip
        values = values if config is None else dict(MODEL_SPECS[config].config)
        file = folder / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        assert init.parent_of(kind, 24 * 10**9, str(folder)) == parent


def test_a_distilled_checkpoint_is_trained_and_evaluated_at_its_own_steps(
    tmp_path, flowrl, prompts, even_activations
):
    file = tmp_path / "mine.yaml"
    model = ["--model", "black-forest-labs/FLUX.2-klein-4B", "--memory=24GB"]
    code, out, _ = flowrl("init", file, *model, *prompts)
    assert code == 0, out
    config = load_config(file)
    assert config.rollout.num_inference_steps == 4
    assert config.evaluation.num_inference_steps == 4


def test_a_wrong_option_writes_nothing(tmp_path, flowrl, prompts):
    file, edits = tmp_path / "mine.yaml", "FluxKontextPipeline"
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": edits}))
    for words, named in (
        (["--model", tmp_path, "--memory=0"], edits),
        (["--model", "tiny-sd3", "--prompts", "none.txt", "--memory=0"], "none.txt"),
        (["--model", "me/strange", "--memory=0"], "me/strange"),
        (["--model", "tiny-sd3", "--reward", "pikscore", "--memory=0"], "pickscore"),
        (["--model", "black-forest-labs/FLUX.1-dev", "--memory=0"], "--memory"),
        (["--model", "black-forest-labs/FLUX.1-dev", "--memory=4GB"], "4 GB"),
    ):
        code, _, err = flowrl("init", file, *prompts, *words)
        assert code == 1 and named in err, err
    assert not file.exists()


def test_a_refused_answer_is_asked_again_and_the_others_stay(
    tmp_path, monkeypatch, even_activations
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a red circle\na blue square\n")
    answers = ["tiny-sd3", "none.txt", "mine.txt", "pikscore", "brightness", "much", "0"]
    done = CliRunner().invoke(app, ["init"], input="\n".join(answers) + "\n")
    assert done.exit_code == 0, done.output
    assert load_config("recipe.yaml").prompts.train == "mine.txt"
