"""Before and after are the same prompts and noise, paired image by image; also as deployed."""

import math
from dataclasses import replace

import diffusers
import pytest
import torch

from flowrl.assembly.learner import ProvidedObjects, build_evaluator
from flowrl.backbones.call import call_arguments
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.small import small_pipeline
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.spec import RewardSpec
from flowrl.training.evaluate import Evaluation, PipelineCall, compare
from flowrl.utils.distributed import Runtime

MEAN = RewardSpec(name="mean", reward=lambda images, *_: images.mean((1, 2, 3)))
SETTINGS = {
    "prompts": "tiny:colors:test", "num_images": 5, "num_inference_steps": 2, "batch_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def make(tiny_config, load_tiny):
    """An evaluator of a small recipe, changed as `tiny_config` is."""
    pipeline = load_tiny()

    def built(*specs, **changes):
        changes["evaluation"] = SETTINGS | changes.get("evaluation", {})
        return build_evaluator(tiny_config(**changes), pipeline, [*specs], ProvidedObjects())

    return built


@pytest.fixture(scope="module")
def evaluator(make):
    length = RewardSpec(name="length", reward=lambda _, texts, __: [float(len(t)) for t in texts])
    return replace(make(MEAN, length), keep=3)


@pytest.fixture(scope="module")
def runtime():
    return Runtime(device="cpu")


def test_every_image_is_scored_and_the_first_are_kept(evaluator, runtime):
    evaluation = evaluator(evaluator.backbone.velocity, runtime)
    assert evaluation.scores.shape == (5, 2) and evaluation.names == ("mean", "length")
    assert evaluation.rows == 2  # of batch_size 2: three calls
    assert evaluation.images.shape == (3, 3, 64, 64) and evaluation.images.dtype == torch.uint8
    assert evaluation.prompts == tuple(p.text for p in evaluator.prompts[:3])
    assert evaluation.scores[:, 1].tolist() == [len(p.text) for p in evaluator.prompts]
    kept = (evaluation.images.float() / 255).mean((1, 2, 3))
    torch.testing.assert_close(kept, evaluation.scores[:3, 0])


def test_a_process_with_no_share_adds_nothing(evaluator, runtime, monkeypatch):
    """Fewer images than processes: the last one has nothing to draw."""
    monkeypatch.setattr(Runtime, "local_rows", lambda self, total: torch.arange(0))
    result = evaluator(evaluator.backbone.velocity, runtime)
    assert result.scores.shape == (0, 2) and len(result.images) == 0
    assert result.images.shape[1:] == (3, 64, 64) and result.images.dtype == torch.uint8


def test_the_key_changes_with_whatever_changes_the_base_images(make):
    def key(**changes):
        return make(MEAN, **changes).key

    plain = key()
    for change in (
        {"num_inference_steps": 3},
        {"seed": 1},
        {"num_images": 4},
        {"prompts": "tiny:counting:test"},
        {"as_deployed": True},
        {"num_inference_steps": [2, 3]},
    ):
        assert key(evaluation=change) != plain, change
    for change in ({"dtype": "bf16"}, {"height": 32}):
        assert key(pipeline=change) != plain, change
    rounded = [key(memory=memory) for memory in ({"base_bits": 8}, {"base_bits": 4})]
    assert len({plain, *rounded, key(memory={"vae_tiling": True})}) == 4
    elsewhere = {"text_encoders": "free", "vae": "offload", "gradient_checkpointing": True}
    unseen = {"batch_size": 1, "every": 7}
    assert key(evaluation=unseen, optim={"lr": 1.0}, memory=elsewhere) == plain


def test_every_number_of_steps_is_scored_as_alone_and_in_between_only_the_first(
    make, runtime, tmp_path
):
    both = make(MEAN, evaluation={"num_inference_steps": [2, 3]})
    velocity = both.backbone.velocity
    whole, part = both(velocity, runtime), both(velocity, runtime, whole=False)
    alone = [make(MEAN, evaluation={"num_inference_steps": n})(velocity, runtime) for n in (2, 3)]
    for found, expected in zip((whole, *whole.at_steps), alone, strict=True):
        assert torch.equal(found.scores, expected.scores)
        assert torch.equal(found.images, expected.images) and found.steps == expected.steps
    assert not torch.equal(whole.scores, whole.at_steps[0].scores)
    assert torch.equal(part.scores, whole.scores) and part.at_steps == ()
    whole.save(tmp_path / "e")
    again = Evaluation.load(tmp_path / "e")
    assert list(again.measures()) == ["mean", "3_steps/mean"]
    assert torch.equal(again.measures()["3_steps/mean"], alone[1].scores[:, 0])
    assert [row.name for row in compare(whole, again)] == ["mean", "3_steps/mean"]
    assert [row.name for row in compare(whole, part)] == ["mean"]


def scored(*rows: list[float], names=("a", "b")) -> Evaluation:
    return Evaluation(
        scores=torch.tensor(rows), names=names, prompt=torch.arange(len(rows)),
        images=torch.empty(0), prompts=(), draws=(), key="",
        statistics=torch.empty(len(rows), 0), thumbnails=torch.empty(0),
    )  # fmt: skip


def test_scores_are_matched_by_name_and_missing_ones_left_out():
    before = scored([0.0, math.nan], [1.0, math.nan], [math.nan, math.nan])
    after = scored([1.0, 5.0], [math.nan, 5.0], [9.0, 5.0])
    (row,) = compare(before, after)
    assert (row.name, row.before, row.after) == ("a", 0, 1)
    assert (row.change.mean, row.change.images) == (1, 1)
    one_prompt = replace(scored([0.0, 0.0], [1.0, 0.0]), prompt=torch.zeros(2).long())
    assert [r.change.prompts for r in compare(one_prompt, one_prompt)] == [1, 1]
    (a, b) = compare(scored([0.0, 1.0]), scored([3.0, 2.0], names=("b", "a")))
    assert (a.name, a.after) == ("a", 2) and (b.name, b.after) == ("b", 3)
    assert scored([1.0, math.nan], [3.0, math.nan]).mean("a") == 2
    assert math.isnan(scored([1.0, math.nan]).mean("b"))


def test_few_prompts_are_not_repeated_to_as_many_images_as_wanted(make, tmp_path):
    (tmp_path / "few.txt").write_text("a cat\na dog\n")
    few = make(evaluation={"prompts": str(tmp_path / "few.txt"), "num_images": 600})
    assert len(few.prompts) == 16


def test_a_repeated_prompt_has_noise_of_its_own(evaluator, runtime):
    result = replace(evaluator, prompts=[evaluator.prompts[0]] * 2)(
        evaluator.backbone.velocity, runtime
    )
    assert result.draws == (0, 1)
    assert not torch.equal(result.images[0], result.images[1])


def test_an_evaluation_without_enough_scores_stops(evaluator, runtime):
    def patchy(images, prompts, metadata):
        return [math.nan] + [0.5] * (len(images) - 1)  # the first of each batch of two

    strict = replace(evaluator, specs=[RewardSpec(name="patchy", reward=patchy)])
    with pytest.raises(RewardFailure, match="patchy"):
        strict(strict.backbone.velocity, runtime)


# --- as deployed ---------------------------------------------------------------------------------


PROMPTS = [PromptRecord(uid=text, text=text) for text in ("a red circle", "a small blue star")]
STEPS = 2


@pytest.mark.parametrize(
    "name",
    ["StableDiffusion3Pipeline", "FluxPipeline", "Flux2KleinPipeline", "QwenImagePipeline",
     "ZImagePipeline", pytest.param("Krea2Pipeline", marks=pytest.mark.slow),
     pytest.param("LongCatImagePipeline", marks=pytest.mark.slow)],
)  # fmt: skip
def test_any_class_draws_the_given_noise_as_its_own_call_does(name):
    pipeline = small_pipeline(getattr(diffusers, name))
    pipeline.set_progress_bar_config(disable=True)
    size = {"guidance": 3.0, "max_sequence_length": 64, "height": 64, "width": 64}
    backbone = PipelineBackbone(pipeline, **size)
    noise = torch.randn(2, *backbone.latent_shape(), generator=torch.Generator().manual_seed(0))
    call = PipelineCall(arguments=call_arguments(pipeline, **size))
    images = call(backbone, PROMPTS, noise, STEPS)
    assert images.shape == (2, 3, 64, 64) and images.std() > 0
    # Euler's steps along the backbone's velocities end in the same images.
    cond = backbone.encode([p.text for p in PROMPTS], ["", ""])
    sigmas, x = backbone.sigmas(STEPS), noise.to(backbone.dtype)
    with torch.no_grad():
        for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
            v = backbone.velocity(x, now.expand(2), cond)
            x = x + (after - now) * v
        expected = backbone.decode(x).clamp(0, 1)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
