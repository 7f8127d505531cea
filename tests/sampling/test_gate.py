import json
import logging
import weakref

import pytest
import torch
from safetensors.torch import load_file

from flowrl.api import align
from flowrl.errors import UserError
from flowrl.sampling.rank_audit import AuditLog
from flowrl.sampling.rollout import Timer

NFT = {"kind": "nft", "noising": {"count": 2}}
EXPLORE = {"candidates": 8, "num_inference_steps": 2, "precision": "nvfp4-emulated", "min_dim": 128}


@pytest.fixture
def options(tmp_path):
    def make(**audit):
        explore = EXPLORE | {"audit": {"prompts": 1, "every": 2} | audit}
        return {
            "objective": NFT,
            "rollout": {"tree": {"kind": "ode"}, "explore": explore},
            "run": {"output_dir": str(tmp_path / "run")},
        }

    return make


def precision(folder) -> dict:
    return json.loads((folder / "run" / "precision.json").read_text())


def test_candidates_that_rank_well_enough_stay_as_they_are(make_learner, options, tmp_path, caplog):
    learner = make_learner(**options(min_rho=-1.0))
    with caplog.at_level(logging.INFO, "flowrl"):
        explored = learner.source.collect(0, Timer()).explored
    assert -1 <= explored.audit["rho"] <= 1 and -1 <= explored.audit["tau"] <= 1
    assert "audit before iteration 1: candidates (2 steps, nvfp4-emulated) have rho" in caplog.text
    assert precision(tmp_path)["format"] == "nvfp4"
    (event,) = AuditLog(tmp_path / "run").before(1)
    assert event.action == "keep" and event.report.candidates == 8 and event.report.keep == 4


def test_an_audit_compares_candidates_with_the_exact_images_of_the_same_noise(
    make_learner, options, tmp_path
):
    changes = options(min_rho=-1.0)
    changes["rollout"]["explore"] |= {"precision": "bf16", "num_inference_steps": None}
    learner = make_learner(**changes | {"pipeline": {"decode_batch": 8}})
    explored = learner.source.collect(0, Timer()).explored
    assert explored.audit["rho"] == pytest.approx(1) and explored.audit["tau"] == pytest.approx(1)
    assert explored.audit["contrast"] == pytest.approx(1)


def test_a_miss_moves_to_the_next_precision_and_says_so(make_learner, options, tmp_path, caplog):
    learner = make_learner(**options(min_rho=1.0))
    learner.source.collect(0, Timer())
    assert "from now on candidates are not quantised" in caplog.text
    assert precision(tmp_path)["precision"] == "not quantised (float32)"
    assert precision(tmp_path)["requested"] == "nvfp4-emulated"
    assert precision(tmp_path)["layers"] == []
    learner.source.collect(2, Timer())  # below bf16 there is nothing, and that is told
    assert "nothing is quantised any more: more steps" in caplog.text


def test_a_miss_may_stop_the_run_and_is_written_down(make_learner, options, tmp_path, caplog):
    learner = make_learner(**options(min_rho=1.0, on_miss="stop"))
    with (
        caplog.at_level(logging.INFO, "flowrl"),
        pytest.raises(UserError, match="2 steps, nvfp4-emulated\\) have rho "),
    ):
        learner.source.collect(0, Timer())
    assert "have rho" not in caplog.text  # it is told once
    (event,) = AuditLog(tmp_path / "run").before(1)
    assert event.action == "stop" and event.report.rho < 1


def test_noise_that_candidates_lack_degrades_nothing(make_learner, options, tmp_path, caplog):
    changes = options(min_rho=1.0)
    changes["rollout"]["tree"] = {"kind": "flow_grpo"}
    make_learner(**changes).source.collect(0, Timer())
    assert "set rollout.explore.num_inference_steps to null" in caplog.text
    assert precision(tmp_path)["precision"] == "nvfp4-emulated"
    changes["rollout"]["explore"]["num_inference_steps"] = (
        None  # with the very noises of the rollout
    )
    make_learner(**changes).source.collect(0, Timer())
    assert precision(tmp_path)["precision"] == "not quantised (float32)"


def test_the_file_says_since_when_also_to_a_resumed_run(make_learner, options, tmp_path):
    learner = make_learner(**options(min_rho=-1.0))
    learner.source.collect(0, Timer())
    assert precision(tmp_path)["since_iteration"] == 0
    learner.source.explorer.preview.__self__.min_rho = 1.0
    learner.source.collect(2, Timer())
    assert precision(tmp_path)["since_iteration"] == 2
    (tmp_path / "run" / "precision.json").unlink()
    make_learner(**options(min_rho=1.0)).source.collect(3, Timer())
    assert precision(tmp_path)["since_iteration"] == 2


def test_what_explored_is_free_before_its_successor_is_built(make_learner, options):
    learner = make_learner(**options(min_rho=1.0))
    controller, alive = learner.source.explorer.preview.__self__, []
    make, found = controller.make, []

    def watched(resolved, since):
        alive.append([stage() is not None for stage in found])
        stage = make(resolved, since)
        found.append(weakref.ref(stage.network.args[0]))  # the copy of the network
        return stage

    controller.make = watched
    controller.make(controller.first, 0)  # nobody holds it
    learner.source.collect(0, Timer())
    assert alive == [[], [False], [False, False]]


def test_an_audit_is_no_failure_in_the_streak_of_rollouts(make_learner, options):
    calls = []

    def patchy(images, prompts, metadata):
        calls.append(len(images))
        scores = images.mean((1, 2, 3))
        scores[0] = float("nan")
        return scores

    learner = make_learner(
        **options(min_rho=-1.0, every=1),
        rewards={"patchy": patchy},
        failures={"max_streak": 2, "max_invalid_fraction": 0.9},
    )
    learner.source.collect(0, Timer())
    with pytest.raises(UserError, match="in 2 iterations in a row"):
        learner.source.collect(1, Timer())


def test_a_recipe_that_explores_in_more_steps_begins_at_its_own_precision(
    make_learner, options, tmp_path
):
    make_learner(**options(min_rho=1.0)).source.collect(0, Timer())
    changes = options(min_rho=1.0, every=9)
    make_learner(**changes).source.collect(1, Timer())
    assert precision(tmp_path)["precision"] == "not quantised (float32)"
    changes["rollout"]["explore"]["num_inference_steps"] = 3
    make_learner(**changes).source.collect(1, Timer())
    assert precision(tmp_path)["format"] == "nvfp4"


def test_audits_come_when_they_are_due_and_not_where_they_are_off(make_learner, options, tmp_path):
    learner = make_learner(**options(min_rho=-1.0, every=2))
    found = [bool(learner.source.collect(i, Timer()).explored.audit) for i in range(4)]
    assert found == [True, False, True, False]
    never = make_learner(**options(every=0))
    assert never.source.collect(0, Timer()).explored.audit == {}


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_precision_that_an_audit_left(
    tiny_config, options, load_tiny, tmp_path
):
    def run(folder, *parts):
        changes = options(min_rho=1.0, every=3)
        changes["rollout"]["explore"]["audit"]["min_rho"] = 1.0
        for number, iterations in enumerate(parts):
            changes["run"] = {
                "output_dir": str(tmp_path / folder), "iterations": iterations,
                "checkpoint_every": 1,
            }  # fmt: skip
            align(tiny_config(**changes), pipeline=load_tiny(), resume="latest" if number else None)
        return load_file(tmp_path / folder / "pytorch_lora_weights.safetensors")

    whole, parts = run("whole", 4), run("parts", 2, 4)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    logs = [AuditLog(tmp_path / name).before(9) for name in ("whole", "parts")]
    assert [[e.iteration for e in log] for log in logs] == [[0, 3], [0, 3]]
    assert logs[0] == logs[1]
    assert [e.precision for e in logs[0]] == ["nvfp4-emulated", "bf16"]


def test_what_was_drawn_depends_on_the_audits_verdict_alone(make_learner, options):
    audited = make_learner(**options(min_rho=-1.0)).source.collect(0, Timer())
    plain = make_learner(**options(every=0)).source.collect(0, Timer())
    assert torch.equal(audited.explored.proxy, plain.explored.proxy)
    assert torch.equal(audited.tree.x, plain.tree.x)
