"""What hangs neither on an objective nor on a tree, on every family: rewards, guidance, bits."""

import pytest
from families import OTHERS, assert_learns, on_every, pipeline_of

from flowrl.errors import UserError
from flowrl.quantization.linear import same_precision_layers
from flowrl.sampling.rollout import Stopwatch

ROLLOUT = {"prompts": 1, "group_size": 4, "steps": 3, "tree": {"kind": "flow_grpo"}}
NFT = {"kind": "nft", "draws": {"count": 2}}
LOW = {"precision": "nvfp4-emulated", "min_dim": 0}  # the tiny layers too


@pytest.fixture
def learner(make_learner, tiny_pipeline_path):
    def make(family, pipeline=None, **changes):
        chosen = pipeline_of(family, tiny_pipeline_path) | (pipeline or {})
        return make_learner(pipeline=chosen, **changes)

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


@pytest.mark.parametrize(("prompts", "family"), on_every(REWARDS))
def test_rewards_score_its_pictures(learner, prompts, family):
    specs = [{"name": name} for name in REWARDS[prompts]]
    made = learner(family, rollout=ROLLOUT, specs=specs, prompts={"train": prompts})
    rollout = made.source.collect(0, Stopwatch())
    assert rollout.images.shape == (4, 3, 64, 64)
    assert rollout.names == REWARDS[prompts]
    assert rollout.scores.isfinite().all()


# --- guidance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [False, True], ids=["beside", "merged"])
@pytest.mark.parametrize("family", [OTHERS[0], "sana"])
def test_rollouts_with_a_negative_prompt_are_learned_from(learner, family, merge):
    guided = {"guidance": 3.0, "negative": "a ring", "merge_lora": merge}
    assert_learns(learner(family, rollout=ROLLOUT | guided), 1)


def test_a_negative_prompt_for_flux_is_refused(learner):
    with pytest.raises(UserError, match="negative prompt is 'a ring', but FLUX.1 takes none"):
        learner("flux", rollout=ROLLOUT | {"guidance": 3.5, "negative": "a ring"}).iterate(0)


@pytest.mark.parametrize("family", OTHERS)
def test_training_may_be_guided_otherwise_than_rollouts(learner, family):
    rollout = ROLLOUT | {"guidance": 3.0, "training_guidance": 1.0, "tree": {"kind": "ode"}}
    assert_learns(learner(family, rollout=rollout, objective=NFT), 1)


# --- precisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", OTHERS)
def test_candidates_may_be_drawn_in_few_bits(learner, tmp_path, family):
    explore = LOW | {"candidates": 8, "steps": 2, "audit": {"prompts": 1}}
    made = learner(
        family,
        rollout=ROLLOUT | {"tree": {"kind": "ode"}, "explore": explore},
        objective=NFT,
        run={"output_dir": str(tmp_path)},
    )
    assert_learns(made, 1)


@pytest.mark.parametrize("family", OTHERS)
def test_rollouts_and_learning_may_be_in_few_bits_alike(learner, tmp_path, family):
    """But for convolutions, SANA's feed-forward, which stay exact."""
    made = learner(family, pipeline=LOW, rollout=ROLLOUT, run={"output_dir": str(tmp_path)})
    packed = [name for name, _ in same_precision_layers(made.policy.network)]
    assert packed and not any("conv" in name for name in packed)
    assert_learns(made, 1)


@pytest.mark.parametrize("family", OTHERS)
def test_a_network_in_bf16_learns_and_its_first_ratio_is_1(learner, family):
    made = learner(
        family,
        pipeline={"dtype": "bf16"},
        rollout=ROLLOUT | {"batch_size": 4},
        optim={"micro_batch": 4},
    )
    _, metrics = made.iterate(0)
    assert metrics["grad/norm"] > 0
    assert metrics["policy/ratio_error_max"] < 0.1
