"""What hangs neither on an objective nor on a tree, on every family: rewards, guidance, bits."""

import pytest
from families import OTHERS, assert_learns, in_turn

from flowrl.errors import UserError
from flowrl.quantization.linear import same_precision_layers
from flowrl.sampling.rollout import Timer

ROLLOUT = {
    "prompts_per_iteration": 1,
    "group_size": 4,
    "num_inference_steps": 3,
    "tree": {"kind": "flow_grpo"},
}
NFT = {"kind": "nft", "noising": {"count": 2}}
LOW = {"precision": "nvfp4-emulated", "min_dim": 0}  # the tiny layers too


@pytest.fixture
def learner(make_learner):
    def make(family, pipeline=None, **changes):
        return make_learner(pipeline={"backbone": family} | (pipeline or {}), **changes)

    return make


# --- rewards ------------------------------------------------------------------------------------

REWARDS = {
    "tiny:geneval:train": (
        "brightness", "compressibility", "incompressibility", "geneval", "tiny_quality",
        "diversity",
    ),
    "tiny:color_attr:train": ("tiny_colors",),
    "tiny:ocr:train": ("ocr",),
}  # fmt: skip


@pytest.mark.parametrize(("names", "family"), in_turn(REWARDS))
def test_rewards_score_its_images(learner, names, family):
    for prompts in names:
        specs = [{"name": name} for name in REWARDS[prompts]]
        made = learner(family, rollout=ROLLOUT, specs=specs, prompts={"train": prompts})
        rollout = made.source.collect(0, Timer())
        assert rollout.images.shape == (4, 3, 64, 64)
        assert rollout.names == REWARDS[prompts]
        assert rollout.scores.isfinite().all()


# --- guidance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", OTHERS)
def test_rollouts_with_a_negative_prompt_are_learned_from_or_refused(learner, family):
    guided = ROLLOUT | {"guidance_scale": 3.0, "negative_prompt": "a ring"}
    if family == "flux":
        with pytest.raises(UserError, match="negative prompt is 'a ring'"):
            learner(family, rollout=guided).iterate(0)
        return
    for merge in (False, True):
        assert_learns(learner(family, rollout=guided | {"merge_lora": merge}), 1)


@pytest.mark.parametrize("family", OTHERS)
def test_training_may_be_guided_otherwise_than_rollouts(learner, family):
    rollout = ROLLOUT | {
        "guidance_scale": 3.0,
        "training_guidance_scale": 1.0,
        "tree": {"kind": "ode"},
    }
    assert_learns(learner(family, rollout=rollout, objective=NFT), 1)


# --- precisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", OTHERS)
def test_candidates_rollouts_and_learning_may_be_in_few_bits(learner, tmp_path, family):
    explore = LOW | {"candidates": 8, "num_inference_steps": 2, "audit": {"prompts": 1}}
    made = learner(
        family,
        rollout=ROLLOUT | {"tree": {"kind": "ode"}, "explore": explore},
        objective=NFT,
        run={"output_dir": str(tmp_path / "explored")},
    )
    assert_learns(made, 1)
    # Learning as well, but for convolutions, SANA's feed-forward, which stay exact.
    made = learner(family, LOW, rollout=ROLLOUT, run={"output_dir": str(tmp_path / "low")})
    packed = [name for name, _ in same_precision_layers(made.policy.network)]
    assert packed and not any("conv" in name for name in packed)
    assert_learns(made, 1)
    # In bf16 the first ratio is 1 at equal batch shapes.
    rollout = ROLLOUT | {"batch_size": 4}
    made = learner(family, {"dtype": "bf16"}, rollout=rollout, optim={"micro_batch": 4})
    _, metrics = made.iterate(0)
    assert metrics["grad/norm"] > 0
    assert metrics["policy/ratio_error_max"] < 0.1
