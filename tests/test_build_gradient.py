"""Options of the reward-gradient objectives reach what is built of them."""

import pytest
import torch
from pydantic import ValidationError

from flowrl.build import objective as build
from flowrl.config import objectives as sections
from flowrl.errors import UserError
from flowrl.objectives.reward_backprop.flowbp import drawn_pairs
from flowrl.objectives.reward_backprop.leap_align import DirichletPairs

PULL = {"hinge": 0.5, "kl_coef": 0.25}
ALIKE = {  # options whose names are those of the objective's attributes
    "refl": (build.build_refl, sections.Refl, {"window": 0.5}),
    "draft_lv": (build.build_draft_lv, sections.DraftLv, {"copies": 5}),
    "leap_align": (
        build.build_leap_align, sections.LeapAlign, {"nested_coef": 0.7, "distance_floor": 0.6},
    ),
    "flowbp_sparse": (
        build.build_flowbp_sparse, sections.FlowbpSparse,
        {"steps": 7, "spacing": "even", "bias": 3.0, "gain_coef": 0.1},
    ),
    "flowbp_bridge": (
        build.build_flowbp_bridge, sections.FlowbpBridge,
        {"steps": 7, "bias": 3.0, "gain_coef": 0.1, "nested_coef": 0.9},
    ),
    "flowbp_lagrange": (
        build.build_flowbp_lagrange, sections.FlowbpLagrange,
        {"supports": 4, "active": 3, "support_coef": 0.5, "nested_coef": 0.9,
         "distance_floor": 0.6},
    ),
    "srpo": (
        build.build_srpo, sections.Srpo,
        {"denoise_k": (0.5, 0.6), "inversion_k": (0.7, 0.8), "gap": 0.2, "lowest": 0.3,
         "highest": 0.9, "inversion": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIKE)
def test_every_option_arrives(kind):
    make, section, options = ALIKE[kind]
    objective = make(section(**options, **PULL))
    assert {name: getattr(objective, name) for name in options} == options
    own = set(section.model_fields) - {"kind"} - set(PULL)
    assert own - set(options) <= {
        "positive_words", "negative_words", "noise", "concentration", "latest"
    }  # fmt: skip
    assert (objective.ascent.hinge, objective.ascent.kl_coef) == (0.5, 0.25)
    assert objective.needs.reference and section.states == objective.needs.states == "path"


def test_options_under_another_name_arrive_too():
    srpo = build.build_srpo(
        sections.Srpo(positive_words="good", negative_words="bad", noise="fresh")
    )
    assert (srpo.positive, srpo.negative, srpo.fresh) == ("good", "bad", True)  # type: ignore[attr-defined]
    lagrange = build.build_flowbp_lagrange(
        sections.FlowbpLagrange(concentration=(1.0, 2.0, 3.0), latest=0.7)
    )
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


def test_what_cannot_work_is_refused():
    with pytest.raises(UserError, match="gap 0.5, lowest 0.1 and highest 0.99 must be in order"):
        build.build_srpo(sections.Srpo(gap=0.5))
    with pytest.raises(UserError, match="both positive and negative words"):
        build.build_srpo(sections.Srpo(positive_words="good"))
    with pytest.raises(ValidationError):
        sections.FlowbpBridge(steps=1)
