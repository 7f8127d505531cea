"""What `compare_objectives.py` compares: the objectives, their recipes, and what is the same."""

from dataclasses import dataclass

QUALITY = "tiny_quality"
SHARED = [
    "optim.schedule=constant",  # so that a score belongs to a cost, not to a planned end
    "optim.micro_batch=96",
    "run.max_minutes=null",
    "run.threads=1",
    "run.trackers=[]",
    "run.sample_every=0",
    "run.checkpoint_every=1000",
    f"evaluation.quality={QUALITY}",
]


@dataclass(frozen=True)
class Family:
    """Methods on one page section: what they learn and are measured by.

    against_goal: costs are those to the last score of plain Flow-GRPO.
    """

    title: str
    text: str
    score: str
    changes: tuple[str, ...]
    against_goal: bool = False


@dataclass(frozen=True)
class Stored:
    """Groups that are drawn before, with the changes of the family and these. Methods share one."""

    name: str
    groups: int
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    """A recipe to compare. store: what it learns from alone, else it draws."""

    name: str
    family: str
    changes: tuple[str, ...]
    iterations: int
    evaluate_every: int
    seeds: int = 1
    store: Stored | None = None


STRICT = "{name: geneval, args: {mode: strict}, held_out: true}"
WATCHED = f"{{name: {QUALITY}, held_out: true}}"
PARTIAL = (f"rewards=[{{name: geneval, args: {{mode: partial}}}}, {STRICT}, {WATCHED}]",)
PIXELS = (
    f"rewards=[{{name: tiny_colors}}, {STRICT}, {WATCHED}]",
    "prompts.train=tiny:color_attr:train",
    "prompts.balance=null",
    "evaluation.prompts=tiny:color_attr:test",
    "evaluation.balance=null",
)
ODE = ("rollout.tree={kind: ode}",)
FAMILIES = {
    "steps": Family(
        "Learning from denoising steps",
        "Objectives on the reverse process, trained on GenEval's partial score and measured by the "
        "strict one. *Flow-GRPO* has noise in every step but the last, *Flow-GRPO-Fast* in the "
        "first two, which is the quickstart's recipe, with UniGRPO's velocity penalty.",
        "geneval_strict",
        PARTIAL,
        True,
    ),
    "images": Family(
        "Learning from images",
        "Objectives on the forward process, from the same rewards. The last two columns say what "
        "it cost until the mean curve, straight between evaluations, first stood where Flow-GRPO's "
        "ends, and what share that is of Flow-GRPO's cost.",
        "geneval_strict",
        PARTIAL + ODE,
        True,
    ),
    "gradients": Family(
        "Learning from the reward's gradient",
        "A differentiable reward, the colours of the pixels against those of the prompt, on "
        "prompts of two colours and two shapes; the strict GenEval score of the same images is "
        "only watched.",
        "tiny_colors",
        PIXELS + ODE,
    ),
}
OWN = Stored("own", 150, ("objective={kind: gdro}",))
FINE = Stored("fine", 150, ("objective={kind: gdro}", "rollout.steps=20"))

NOISY = "times: {kind: schedule, fraction: 0.6}"  # the three noisiest of the rollout's five
MOST = "times: {kind: schedule, fraction: 0.8}"
ALL = "times: {kind: schedule}"
SHARED_DRAWS = f"draws: {{count: 2, {NOISY}}}"
FINE_DRAWS = "draws: {count: 2, share: image, stratified: true, times: {kind: uniform, shift: 3}}"
SLOWER = "optim.lr=4e-4"
METHODS = (
    Method("Flow-GRPO", "steps", ("rollout.tree={kind: flow_grpo}",), 60, 12, seeds=3),
    Method(
        "DiffusionNFT",
        "images",
        (
            f"objective={{kind: nft, kl_coef: 0, draws: {{count: 4, share: image, {ALL}}}}}",
            "optim.updates_per_rollout=2",
        ),
        24,
        4,
        seeds=3,
    ),
    Method(
        "Online DPO",
        "images",
        (
            f"objective={{kind: dpo, implicit_beta: 100, {SHARED_DRAWS}}}",
            "rollout.prompts=24",
            "rollout.group_size=4",
        ),
        40,
        10,
        seeds=3,
    ),
    Method(
        "GDRO, from a store",
        "images",
        (
            f"objective={{kind: gdro, form: top1, implicit_beta: 6, draws: {{count: 2, {MOST}}}}}",
            SLOWER,
        ),
        60,
        12,
        seeds=3,
        store=OWN,
    ),
    Method("Flow-GRPO-Fast", "steps", (), 120, 24),
    Method(
        "GRPO-Guard",
        "steps",
        ("objective.ratio=normalised", "objective.step_weight=equal"),
        80,
        20,
    ),
    Method(
        "TempFlow-GRPO",
        "steps",
        (
            "objective={kind: grpo, step_weight: noise, credit: {edges: fan, scope: leaf}, "
            "kl_coef: 0.0005}",
            "rollout.tree={kind: tempflow, width: 4, at: [0, 1]}",
        ),
        60,
        15,
    ),
    Method(
        "SPO",
        "steps",
        (
            "objective={kind: spo, min_gap: 0.1}",
            "rollout.tree={kind: tree_grpo, branch: 4, window: {kind: fixed, size: 2}}",
            SLOWER,
        ),
        40,
        10,
    ),
    Method(
        "DGPO",
        "images",
        (f"objective={{kind: dgpo, implicit_beta: 20, {SHARED_DRAWS}}}", SLOWER),
        30,
        10,
    ),
    Method(
        "LAIR",
        "images",
        (f"objective={{kind: lair, implicit_beta: 20, {SHARED_DRAWS}}}", SLOWER),
        30,
        10,
    ),
    Method(
        "KTO",
        "images",
        (f"objective={{kind: kto, implicit_beta: 20, {SHARED_DRAWS}}}", SLOWER),
        30,
        10,
    ),
    Method(
        "AWM",
        "images",
        (
            "objective={kind: awm, kl_coef: 0.0005, "
            f"draws: {{count: 2, share: group, stratified: false, {ALL}}}}}",
            SLOWER,
        ),
        30,
        10,
    ),
    Method(
        "SFT, from a fine store",
        "images",
        (f"objective={{kind: sft, {FINE_DRAWS}}}", "rollout.prompts=16", "optim.lr=3e-4"),
        60,
        20,
        store=FINE,
    ),
    Method(
        "Best of n, from a fine store",
        "images",
        (
            f"objective={{kind: sft, winners: one, {FINE_DRAWS}}}",
            "rollout.prompts=48",
            "optim.lr=3e-4",
        ),
        60,
        20,
        store=FINE,
    ),
    Method(
        "RWR, from a fine store",
        "images",
        (
            f"objective={{kind: rwr, rwr_lambda: 0.2, {FINE_DRAWS}}}",
            "rollout.prompts=16",
            "optim.lr=3e-4",
        ),
        60,
        20,
        store=FINE,
    ),
    *(
        Method(name, "gradients", (f"objective={{{objective}}}",), 16, 4)
        for name, objective in (
            ("ReFL", "kind: refl"),
            ("DRaFT-2", "kind: draft, steps: 2"),
            ("DRaFT-LV", "kind: draft_lv"),
            ("AlignProp", "kind: align_prop, truncation: {kind: uniform}"),
            ("SRPO", "kind: srpo"),
            ("LeapAlign", "kind: leap_align"),
            ("FlowBP-Sparse", "kind: flowbp_sparse, steps: 2"),
            ("FlowBP-Bridge", "kind: flowbp_bridge, steps: 3"),
            ("FlowBP-Lagrange", "kind: flowbp_lagrange, supports: 1, active: 1"),
        )
    ),
)
