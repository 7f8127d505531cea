"""The work of a recipe is what a run of it does."""

import pytest
import torch

from flowrl.assembly.work_split import split_work
from flowrl.config import load_config
from flowrl.planning.work import UpdateWork, count_work, doubles

ODE = {"tree": {"kind": "ode"}, "batch_size": 1}  # so that no rows are made up
PREVIEWS = {"candidates": 6, "num_inference_steps": None, "stop_at": 2}
CASES = {
    "chains": ({}, {"kind": "grpo", "kl_coef": 0.1}, 2),
    "trees": (
        {"tree": {"kind": "tree_grpo", "branch": 4, "window": {"kind": "fixed", "size": 1}}},
        {"kind": "grpo", "kl_coef": 0.1},
        1,
    ),
    "guided": (
        {"guidance_scale": 3.0},
        {"kind": "nft", "noising": {"count": 2}, "kl_coef": 0.1},
        1,
    ),
    "teachers": (
        {},
        {"kind": "distill", "noising": {"count": 3}, "teachers": [{"lora": None}, {"lora": None}]},
        1,
    ),
    "groups": ({}, {"kind": "gdro", "noising": {"count": 2}}, 1),
    "two stages": (
        {"explore": {"candidates": 6, "num_inference_steps": 2, "precision": "bf16"}},
        {"kind": "nft", "noising": {"count": 2}},
        1,
    ),
    "pruned": (
        {"explore": PREVIEWS | {"precision": "bf16"}},
        {"kind": "grpo", "kl_coef": 0.1},
        1,
    ),
    "sampled again": (
        {"explore": PREVIEWS | {"precision": "auto"}},
        {"kind": "grpo", "kl_coef": 0.1},
        1,
    ),
}


def of(config) -> UpdateWork:
    return count_work(config).first


@pytest.mark.parametrize("name", CASES)
def test_an_iteration_takes_and_logs_as_many_forwards_as_are_counted(
    make_learner, tiny_config, monkeypatch, name
):
    rollout, objective, updates = CASES[name]
    tree = {} if objective["kind"] == "grpo" else {"tree": {"kind": "ode"}}
    changes = {
        "rollout": ODE | {"tree": {"kind": "flow_grpo"}} | tree | rollout,
        "objective": objective,
        # Of a size that makes up full batches: rows that are repeated are not counted.
        "optim": {"micro_batch": 4 if name == "groups" else 3, "updates_per_rollout": updates},
    }

    def vivid(images, prompts, metadata):  # whatever the images are, no two are worth the same
        return [float(i) for i in range(len(images))]

    learner = make_learner(rewards={"vivid": vivid}, **changes)
    learner.iterate(0)  # the pipeline is tried once on two rows
    seen = {True: 0, False: 0}
    network = type(learner.policy.network)
    forward = network.forward

    def counted(self, hidden_states, *args, **kwargs):
        seen[torch.is_grad_enabled()] += len(hidden_states)
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(network, "forward", counted)  # of low-bit copies, too
    rollout, metrics = learner.iterate(1)
    work = of(tiny_config(**changes))
    sampled, learned = metrics["forwards/rollout"], metrics["forwards/learn"]
    assert sampled == work.sampling + work.previews and len(rollout.images) == work.images
    assert learned == work.training + work.recomputed + work.reference
    assert sampled + learned == sum(seen.values())
    assert work.training <= seen[True] <= work.training + work.recomputed
    trained = metrics["tree/train_forwards"]  # of images, which guidance doubles
    assert trained * (2 if name == "guided" else 1) == work.training


def test_work_is_counted_for_moving_trees_guidance_and_shares():
    config = load_config("tiny-sd3-solrl-geneval")
    run = count_work(config)
    assert (run.first.candidates, run.first.previews) == (4 * 96, 4 * 96 * 6)
    assert (run.first.images, run.first.sampling) == (4 * 24, 4 * 24 * 8)
    assert run.total.previews == 24 * run.first.previews
    assert run.total.updates == 24 * 4
    assert run.evaluations == 4 and run.evaluation.sampling == 1200 * 8
    # Trees that change are counted one by one.
    config = load_config(
        "quickstart-grpo",
        ["rollout.tree={kind: flow_grpo_fast, window: {kind: random, size: 2}}", "run.iterations=9"]
        + ["rollout.depth_pruning={start: 3, size: 1}", "rollout.num_inference_steps=8"],
    )
    run = count_work(config)
    assert sum(run.kinds.values()) == 9
    assert run.total.images == 9 * run.first.images
    assert run.total.sampling == 9 * run.first.sampling
    # Flux takes guidance as an input.
    changes = [
        "pipeline.path=tiny-flux",
        "rollout.guidance_scale=3.5",
        "evaluation.guidance_scale=3.5",
    ]
    flux = load_config("quickstart", changes)
    sd3 = load_config("quickstart", changes[1:])
    assert not doubles(flux, 3.5) and doubles(sd3, 3.5) and not doubles(sd3, 1.0)
    assert of(sd3).sampling == 2 * of(flux).sampling
    config = load_config("sd3.5-medium-grpo-24gb")
    load = next(iter(count_work(config).kinds)).load
    assert split_work(load, 1).update_rows == split_work(load, 4).update_rows == (288, 288)
    assert sum(share.forwards for share in split_work(load, 4).shares) * 2 == of(config).sampling
