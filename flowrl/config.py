"""The whole configuration, and the rules between its sections."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from flowrl.complaints import complain
from flowrl.errors import UserError
from flowrl.fields import Section, option
from flowrl.recipe import dump_yaml, load_recipe
from flowrl.sections import Evaluation, Failures, Lora, Pipeline, Prompts, Reward, Run
from flowrl.sections_credit import Credit
from flowrl.sections_learning import Ema, Grpo, Optim, Rollout
from flowrl.trees.plan import TreePlan
from flowrl.trees.shape import count


class Config(Section):
    """Everything that decides a training run."""

    pipeline: Pipeline = option(Pipeline(), "The text-to-image pipeline that is aligned.")
    lora: Lora = option(Lora(), "The adapter that is trained.")
    prompts: Prompts = option(..., "What is drawn in training.")
    rollout: Rollout = option(Rollout(), "How pictures to learn from are drawn.")
    objective: Grpo = option(Grpo(), "What is minimised.")
    optim: Optim = option(Optim(), "AdamW and the size of its steps.")
    ema: Ema = option(Ema(), "A moving average of the adapter.")
    rewards: list[Reward] = option(..., "What is scored: a list of {name, weight, args, held_out}.")
    failures: Failures = option(Failures(), "What happens when rewards cannot be computed.")
    evaluation: Evaluation = option(Evaluation(), "Scores on held-out prompts.")
    run: Run = option(Run(), "Where a run lives and how long it lasts.")

    @model_validator(mode="after")
    def _check(self) -> "Config":
        _check_noise(self.rollout)
        _check_groups(self.rollout, self.optim)
        if self.rollout.steps < 2:
            raise ValueError("rollout.steps is 1, expected at least 2: the last step has no noise")
        plans = self.plans()
        for plan, iteration in plans.items():
            _check_plan(plan, iteration, self.rollout, self.run.seed)
            _check_credit(self.objective.credit, plan)
        if self.rollout.depth_pruning and all(
            plan == self.rollout.whole(iteration, self.run.seed)
            for plan, iteration in plans.items()
        ):
            raise ValueError(
                "rollout.depth_pruning covers no step that rollout.tree trains in any iteration: "
                "move its start there, or set it to null"
            )
        _check_clip(self.objective)
        _check_kl(self.objective, self.rollout)
        _check_rewards(self.rewards)
        return self

    def plans(self) -> dict[TreePlan, int]:
        """Every tree that the run will draw, and the first iteration that does."""
        found: dict[TreePlan, int] = {}
        for iteration in range(self.run.iterations):
            found.setdefault(self.rollout.plan(iteration, self.run.seed), iteration)
        return found


def _check_plan(plan: TreePlan, iteration: int, rollout: Rollout, seed: int) -> None:
    """An iteration has something to learn from, with noise that the kernel can give."""
    if not count(plan).trained_edges:
        reason = (
            "rollout.depth_pruning leaves no step to learn from: make it smaller, or null"
            if rollout.depth_pruning and count(rollout.whole(iteration, seed)).trained_edges
            else "rollout.tree trains no step: give it at least one with noise and training"
        )
        raise ValueError(f"in iteration {iteration} {reason}")
    _check_gains(rollout, [move.gain for move in plan.moves if move.noise])


def _check_gains(rollout: Rollout, gains: list[float]) -> None:
    """What a tree multiplies the noise by stays within what the kernel can take."""
    gain = max(gains)
    if rollout.kernel == "cps" and gain * rollout.noise_level > 1:
        raise ValueError(
            f"rollout.tree raises the noise {gain:g} times above rollout.noise_level "
            f"{rollout.noise_level:g}, but cps takes at most 1 in all: the nearest noise_level "
            f"that works is {1 / gain:g}"
        )
    if rollout.kernel == "renoise" and set(gains) != {1.0}:
        raise ValueError(
            f"rollout.tree multiplies the noise by up to {gain:g}, but renoise always replaces all "
            "of it: the nearest rollout.tree.gain_growth that works is 0"
        )


def _check_noise(rollout: Rollout) -> None:
    if rollout.kernel == "cps" and rollout.noise_level > 1:
        raise ValueError(
            f"rollout.noise_level is {rollout.noise_level}, but cps takes at most 1, which "
            "replaces all noise: the nearest valid value is 1"
        )
    if rollout.kernel == "renoise" and rollout.noise_level != 1:
        raise ValueError(
            f"rollout.noise_level is {rollout.noise_level}, but renoise always replaces all "
            "noise: the nearest valid value is 1"
        )


def _check_groups(rollout: Rollout, optim: Optim) -> None:
    """Updates take whole groups of at least two."""
    if rollout.group_size < 2:
        raise ValueError(
            "rollout.group_size is 1, but a picture is judged against the others of its prompt: "
            "the nearest valid value is 2"
        )
    updates = optim.updates_per_rollout
    if rollout.prompts % updates:
        raise ValueError(
            f"optim.updates_per_rollout is {updates}, but an update takes whole groups and "
            f"rollout.prompts is {rollout.prompts}: the nearest valid value is "
            f"{_nearest_divisor(rollout.prompts, updates)}"
        )


def _nearest_divisor(total: int, wanted: int) -> int:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def _check_clip(objective: Grpo) -> None:
    if (objective.clip_nats is None) == (objective.clip_eps is None):
        state = "neither is" if objective.clip_nats is None else "both are"
        raise ValueError(
            f"objective.clip_nats and objective.clip_eps: {state} set, expected one; to use "
            "clip_eps, write objective.clip_nats=null beside it"
        )


def _check_credit(credit: Credit, plan: TreePlan) -> None:
    """The comparison that is asked for exists in the trees, and means something."""
    if count(plan).leaves == plan.roots:
        for name, value, instead in (
            ("scope", credit.scope in ("leaf", "depth", "sibling"), "prompt"),
            ("edges", credit.edges == "sibling", "node"),
            ("keep", credit.keep.kind == "parent_top1", "extreme or max_variance"),
        ):
            if value:
                raise ValueError(
                    f"objective.credit.{name} compares pictures of one tree, but each tree of "
                    f"rollout.tree has one picture: use {instead}"
                )
    if credit.edges == "sibling" and credit.scope in ("depth", "sibling"):
        raise ValueError(
            f"objective.credit.scope is {credit.scope}, which measures a node and the one it comes "
            "from by different comparisons, and edges: sibling subtracts them: use prompt, leaf or "
            "joint"
        )
    if credit.edges == "fan" and credit.scope not in ("leaf", "prompt"):
        raise ValueError(
            f"objective.credit.scope is {credit.scope}, but fans are compared within their tree "
            "(leaf) or over those of the prompt (prompt): use one of these with edges: fan"
        )


def _check_kl(objective: Grpo, rollout: Rollout) -> None:
    if objective.kl_form == "latent_no_dt" and rollout.kernel in ("cps", "renoise"):
        raise ValueError(
            "objective.kl_form is latent_no_dt, which leaves out the step length of an SDE, and "
            f"rollout.kernel {rollout.kernel} has none: use latent_dt, the published form for cps"
        )


def _check_rewards(rewards: list[Reward]) -> None:
    for i, reward in enumerate(rewards):
        if any((reward.name, reward.args) == (other.name, other.args) for other in rewards[:i]):
            raise ValueError(
                f"rewards.{i} is {reward.name!r} with the same args as one before it, expected "
                "every reward once"
            )
    if not any(reward.weight and not reward.held_out for reward in rewards):
        raise ValueError(
            "rewards holds nothing to learn from, expected at least one reward with a weight "
            "other than 0 that is not held_out, for example rewards=[{name: geneval}]"
        )


def parse_config(data: Mapping[str, Any]) -> Config:
    """Validate a plain mapping. Raises UserError naming key, value and what was expected."""
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(complain(Config, error)) from error


def load_config(source: str | Path = "", overrides: Sequence[str] = ()) -> Config:
    """A preset name or YAML file plus `a.b=c` overrides -> a validated Config.

    Raises UserError when the recipe cannot be read or an option is unknown or impossible.
    """
    return parse_config(load_recipe(source, overrides))


def config_yaml(config: Config) -> str:
    """Every option with its value, as YAML that `load_config` reads back to an equal object."""
    return dump_yaml(config.model_dump(mode="json"))
