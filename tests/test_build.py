"""What cannot work is refused while the run is put together, before anything is drawn."""

import pytest

from flowrl.build.backbone import build_backbone
from flowrl.build.learner import ProvidedObjects, build_evaluator, build_learner, build_run
from flowrl.errors import UserError
from flowrl.training.run import StopRule
from flowrl.utils.distributed import Runtime


def test_two_rewards_of_one_name_are_refused(make_learner):
    specs = [
        {"name": "geneval", "args": {"mode": "strict"}},
        {"name": "geneval", "args": {"mode": "strict", "compat": "flow_grpo"}},
    ]
    with pytest.raises(UserError, match="two rewards are called 'geneval_strict'"):
        make_learner(specs=specs)


def test_fewer_pictures_than_processes_are_refused(make_learner, monkeypatch):
    monkeypatch.setattr(Runtime, "world_size", 9)
    with pytest.raises(UserError, match="8 trees cannot be shared among 9 processes"):
        make_learner()


def test_held_out_prompts_without_any_score_are_refused(make_learner, tmp_path):
    (tmp_path / "mine.txt").write_text("a cat\n")
    with pytest.raises(UserError, match="evaluation.prompts"):
        make_learner(
            specs=[{"name": "geneval"}], evaluation={"prompts": str(tmp_path / "mine.txt")}
        )


REFUSED = {
    "paraphrases in training": ({"prompts": {"retained": 1}}, "prompts.retained is set, but none"),
    "paraphrases in evaluation": ({"evaluation": {"paraphrases": True}}, "evaluation.paraphrases"),
    "a quality that is no reward": ({"evaluation": {"quality": "beauty"}}, "'beauty', expected"),
    "a quality from 0 to 1": ({"evaluation": {"quality": "brightness"}}, "(0.0, 1.0)"),
    "a rule on a trained reward": (
        {"run": {"stop_when_hacking": {"held_out": "brightness"}}},
        "'brightness', which is trained",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_measures_that_cannot_be_had_are_refused(make_learner, change, message):
    evaluation = {"prompts": "tiny:colors:test", "every": 1} | change.get("evaluation", {})
    with pytest.raises(UserError) as error:
        make_learner(**change | {"evaluation": evaluation})
    assert message in str(error.value)


def test_options_of_measures_reach_the_evaluator_and_the_run(tiny_config, load_tiny, tmp_path):
    rule = {"held_out": "tiny_quality", "patience": 2, "margin": 0.5}
    config = tiny_config(
        rewards=[{"name": "brightness"}, {"name": "tiny_quality", "held_out": True}],
        evaluation={"prompts": "tiny:colors:test", "every": 1, "quality": "tiny_quality"},
        run={"stop_when_hacking": rule, "output_dir": str(tmp_path)},
    )
    learner = build_learner(config, Runtime(device="cpu"), ProvidedObjects(pipeline=load_tiny()))
    pipeline = learner.policy.backbone.pipeline
    evaluator = build_evaluator(config, pipeline, learner.specs, ProvidedObjects())
    assert evaluator is not None
    assert (evaluator.quality, evaluator.paraphrases) == ("tiny_quality", False)
    run = build_run(config, learner, evaluator, None, resumed=False)
    assert run.stop == StopRule(held_out="tiny_quality", patience=2, margin=0.5)


def test_a_pipeline_that_no_family_is_made_for_is_named(tiny_config):
    kind = type("StableDiffusionXLPipeline", (), {"__module__": "diffusers.pipelines.xl"})
    with pytest.raises(UserError, match="is a StableDiffusionXLPipeline, but flowrl trains .* own"):
        build_backbone(tiny_config(), kind(), guidance=1.0)
