"""Drawing and learning in one low precision: the ratio is 1, evaluations do not know of it."""

from dataclasses import replace

import pytest
import torch

from flowrl.api import align
from flowrl.assembly.learner import ProvidedObjects, build_evaluator, build_rewards
from flowrl.backbones.lora_files import load_lora
from flowrl.errors import UserError
from flowrl.quantization import rollout_model as prepare
from flowrl.quantization.linear import exact_weights
from flowrl.sampling.rollout import Timer
from flowrl.training.evaluate import Evaluation
from flowrl.utils.distributed import Runtime

LOW = {"precision": "nvfp4-emulated", "min_dim": 0}  # the tiny layers too
NATS = "policy/ratio_error_max"
SMALL = {"num_inference_steps": 3, "merge_lora": False}


@pytest.fixture
def learner(make_learner, tmp_path):
    def make(*, pipeline=LOW, rollout=SMALL):
        made = make_learner(pipeline=pipeline, rollout=rollout, run={"output_dir": str(tmp_path)})
        return replace(made, ratio_tolerance=1e9)

    return make


@pytest.mark.parametrize("guidance", [1.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_the_ratio_is_1_when_both_compute_in_low_precision(learner, guidance):
    """Bit for bit where both call the network with the same number of rows. merge_lora is auto:
    folded into the exact weights, the second rollout would lack the adapter."""
    one = learner(rollout={"num_inference_steps": 3, "guidance_scale": guidance})
    assert [one.iterate(i)[1][NATS] for i in range(2)] == [0, 0]


def test_the_ratio_is_far_from_1_when_only_the_rollout_does(learner):
    one = learner()
    rollout = one.source.collect(0, Timer())
    with exact_weights(one.policy.network):
        assert one.learn(rollout, 0)[NATS] > 20  # nats; updates are clipped at 6.5


def test_evaluations_are_those_of_exact_weights(tiny_config, load_tiny, tmp_path):
    low_config, plain_config = (
        tiny_config(
            pipeline=pipeline,
            rollout=SMALL,
            evaluation={"prompts": "tiny:geneval:test", "num_images": 4, "num_inference_steps": 2},
            run={"iterations": 1, "output_dir": str(tmp_path / name)},
        )
        for name, pipeline in (("low", LOW), ("plain", {}))
    )
    align(low_config, pipeline=load_tiny())
    align(plain_config, pipeline=load_tiny())
    low, plain = (evaluation(tmp_path / name, 0) for name in ("low", "plain"))
    assert low.key == plain.key
    assert torch.equal(low.scores, plain.scores) and torch.equal(low.images, plain.images)
    pipeline = load_tiny()
    load_lora(pipeline, str(tmp_path / "low"))
    specs = build_rewards(low_config)
    evaluator = build_evaluator(low_config, pipeline, specs, ProvidedObjects())
    assert evaluator is not None
    drawn = evaluator(evaluator.backbone.velocity, Runtime(device="cpu"))
    scores = evaluation(tmp_path / "low", 1)
    assert torch.equal(drawn.images, scores.images)
    assert not torch.equal(scores.images, low.images)


def evaluation(folder, step):
    return Evaluation.load(folder / "evaluations" / f"step-{step:06d}.safetensors")


def test_a_precision_that_cannot_be_used_is_refused(learner, monkeypatch):
    def wrong(*_):
        raise UserError("computes something else")

    with pytest.raises(UserError, match="no layer of .* is left to be quantised"):
        learner(pipeline=LOW | {"min_dim": 10**6})
    with pytest.raises(UserError, match="precision fp8 needs .* or nvfp4-emulated"):
        learner(pipeline={"precision": "fp8"})
    monkeypatch.setattr(prepare, "check_kernels", wrong)
    with pytest.raises(UserError, match="something else"):
        learner()
