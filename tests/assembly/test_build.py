"""What is built of a recipe: options arrive, and what cannot work is refused before it starts."""

import logging

import pytest
import torch

from flowrl.assembly.backbone import build_backbone
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.errors import UserError
from flowrl.utils.distributed import Runtime


def test_what_cannot_work_is_refused(make_learner, tiny_config, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("a cat\n")
    mine = {"prompts": str(tmp_path / "mine.txt")}
    for change, name in (
        ({"specs": [{"name": "geneval"}], "evaluation": mine}, "evaluation.prompts"),
        ({"run": {"on_hacking": {"held_out": "brightness"}}}, "held_out: true"),
        ({"objective": {"kl_coef": 0.1, "kl_on": {"reward": "quality"}}}, "objective.kl_on.reward"),
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
    with pytest.raises(UserError, match="StableDiffusionXLPipeline"):
        build_backbone(tiny_config().pipeline, kind(), guidance=1.0)


def test_the_velocity_is_compared_once_and_nothing_random_moves(tiny_config, load_tiny, caplog):
    before = torch.random.get_rng_state()
    config = tiny_config(memory={"text_encoders": "free"})
    with caplog.at_level(logging.INFO, "flowrl"):
        build_learner(config, Runtime(device="cpu"), ProvidedObjects(pipeline=load_tiny()))
    assert caplog.text.count("all 4 steps") == 1
    assert torch.equal(torch.random.get_rng_state(), before)
