"""What is built of a recipe: options arrive, and what cannot work is refused before it starts."""

import pytest

from flowrl.assembly.backbone import build_backbone
from flowrl.assembly.learner import ProvidedObjects, build_evaluator, build_learner, build_run
from flowrl.errors import UserError
from flowrl.training.stop_rule import StopRule
from flowrl.utils.distributed import Runtime


def test_what_cannot_work_is_refused(make_learner, tiny_config, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("a cat\n")
    mine = {"prompts": str(tmp_path / "mine.txt")}
    for change, name in (
        ({"specs": [{"name": "geneval"}], "evaluation": mine}, "evaluation.prompts"),
        ({"prompts": {"retained": 1}}, "prompts.retained"),
        ({"evaluation": {"paraphrases": True}}, "evaluation.paraphrases"),
        ({"evaluation": {"quality": "beauty"}}, "'beauty', expected"),
        ({"evaluation": {"quality": "brightness"}}, "(0.0, 1.0)"),
        ({"run": {"stop_when_hacking": {"held_out": "brightness"}}}, "which is trained"),
    ):
        evaluation = {"prompts": "tiny:colors:test", "every": 1} | change.get("evaluation", {})
        with pytest.raises(UserError) as error:
            make_learner(**change | {"evaluation": evaluation})
        assert name in str(error.value), change
    monkeypatch.setattr(Runtime, "world_size", 9)
    monkeypatch.setattr("flowrl.utils.distributed._peers", lambda *_: None)  # there are no others
    with pytest.raises(UserError, match="8 trees cannot be shared among 9 processes"):
        make_learner()
    kind = type("StableDiffusionXLPipeline", (), {"__module__": "diffusers.pipelines.xl"})
    with pytest.raises(UserError, match="is a StableDiffusionXLPipeline"):
        build_backbone(tiny_config().pipeline, kind(), guidance=1.0)


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
