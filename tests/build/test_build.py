"""What is built of a recipe: options arrive, and what cannot work is refused before it starts."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from flowrl.build import objective as build
from flowrl.build.backbone import build_backbone
from flowrl.build.learner import ProvidedObjects, build_evaluator, build_learner, build_run
from flowrl.build.objective import build_grpo, build_spo
from flowrl.config import objectives as sections
from flowrl.config.objectives import GRPOOptions, SPOOptions, check_spo
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.objectives.reward_backprop.flowbp import drawn_pairs
from flowrl.objectives.reward_backprop.leap_align import DirichletPairs
from flowrl.training.run import StopRule
from flowrl.trees.plan import Fan, Step, TreePlan
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
    with pytest.raises(UserError, match="8 trees cannot be shared among 9 processes"):
        make_learner()
    kind = type("StableDiffusionXLPipeline", (), {"__module__": "diffusers.pipelines.xl"})
    with pytest.raises(UserError, match="is a StableDiffusionXLPipeline"):
        build_backbone(tiny_config(), kind(), guidance=1.0)


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


# --- objectives on the reverse process -----------------------------------------------------------


KERNEL = KERNELS["cps"]
GRPO = GRPOOptions(
    ratio="normalised", clip_nats=None, clip_eps=2e-6, step_weight="equal", kl_coef=0.1,
    kl_form="latent_dt",
)  # fmt: skip
SPO = SPOOptions(logratio_beta=5.0, clip=0.2, min_gap=0.1, tau=0.5, fusion="path", path_coef=2.0)
ODE, NOISY = Step(), Step(noise=True, train=True)
TWICE = replace(NOISY, branch=2)


def test_every_option_is_an_attribute_of_what_is_built():
    for make, section in ((build_grpo, GRPO), (build_spo, SPO)):
        made, usual = make(section, KERNEL), make(type(section)(), KERNEL)
        assert made.kernel is KERNEL
        for name in set(type(section).model_fields) - {"kind", "credit"}:
            assert getattr(made, name) == getattr(section, name) != getattr(usual, name), name


def test_trees_without_trained_siblings_are_refused():
    untrained = replace(TWICE, train=False)
    for plan in (
        TreePlan(4, (NOISY, NOISY, ODE)),
        TreePlan(2, (untrained, NOISY, ODE)),
        TreePlan(2, (ODE,) * 3, fans=(Fan(step=0, width=1),)),
    ):
        with pytest.raises(ValueError, match="more than one child"):
            check_spo(plan)
    check_spo(TreePlan(1, (TWICE, NOISY, ODE)))
    check_spo(TreePlan(2, (ODE,) * 3, fans=(Fan(step=1, width=2),)))


# --- reward-gradient objectives ------------------------------------------------------------------


PULL = {"hinge": 0.5, "kl_coef": 0.25}
FLOWBP = {"steps": 7, "bias": 3.0, "gain_coef": 0.1}
LAGRANGE = {"supports": 4, "active": 3, "support_coef": 0.5}
SRPO = {"denoise_k": (0.5, 0.6), "inversion_k": (0.7, 0.8), "gap": 0.2, "lowest": 0.3}
NESTED, FLOOR = {"nested_coef": 0.9}, {"distance_floor": 0.6}
ALIKE = [  # options whose names are those of the objective's attributes
    (build.build_refl, sections.Refl, {"window": 0.5}),
    (build.build_draft_lv, sections.DraftLv, {"copies": 5}),
    (build.build_leap_align, sections.LeapAlign, NESTED | FLOOR),
    (build.build_flowbp_sparse, sections.FlowbpSparse, FLOWBP | {"spacing": "even"}),
    (build.build_flowbp_bridge, sections.FlowbpBridge, FLOWBP | NESTED),
    (build.build_flowbp_lagrange, sections.FlowbpLagrange, LAGRANGE | NESTED | FLOOR),
    (build.build_srpo, sections.Srpo, SRPO | {"highest": 0.9, "inversion": False}),
]


def test_every_option_of_a_gradient_objective_arrives():
    for make, section, options in ALIKE:
        objective = make(section(**options, **PULL))
        assert {name: getattr(objective, name) for name in options} == options
        own = set(section.model_fields) - {"kind"} - set(PULL)
        assert own - set(options) <= {
            "positive_words", "negative_words", "noise", "concentration", "latest"
        }  # fmt: skip
        assert (objective.ascent.hinge, objective.ascent.kl_coef) == (0.5, 0.25)
        assert objective.needs.reference and section.states == objective.needs.states == "path"
    words = {"positive_words": "good", "negative_words": "bad"}
    srpo = build.build_srpo(sections.Srpo(**words, noise="fresh"))
    assert (srpo.positive, srpo.negative, srpo.fresh) == ("good", "bad", True)  # type: ignore[attr-defined]
    section = sections.FlowbpLagrange(concentration=(1.0, 2.0, 3.0), latest=0.7)
    lagrange = build.build_flowbp_lagrange(section)
    law = DirichletPairs(before=1.0, between=2.0, after=3.0, latest=0.7)
    assert lagrange.pairs == law  # type: ignore[attr-defined]
    assert build.build_leap_align(sections.LeapAlign()).pairs is drawn_pairs  # type: ignore[attr-defined]


def test_depths_are_those_of_the_options():
    u = torch.rand(500, generator=torch.Generator().manual_seed(0))

    def depths(objective):
        return objective.depth(u, 50)

    assert depths(build.build_draft(sections.Draft(steps=3))).unique().tolist() == [3]
    narrow = sections.GaussianTruncation(mean=0.5, std=0.02)
    found = depths(build.build_align_prop(sections.AlignProp(truncation=narrow))).double()
    assert found.mean().item() == pytest.approx(25, abs=0.3)
    spread = sections.AlignProp(truncation=sections.UniformTruncation())
    assert depths(build.build_align_prop(spread)).unique().tolist() == list(range(1, 51))


def test_options_of_gradient_objectives_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="gap 0.5, lowest 0.1 and highest 0.99 must be in order"):
        build.build_srpo(sections.Srpo(gap=0.5))
    with pytest.raises(UserError, match="both positive and negative words"):
        build.build_srpo(sections.Srpo(positive_words="good"))
    with pytest.raises(ValidationError):
        sections.FlowbpBridge(steps=1)
