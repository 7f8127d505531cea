"""The whole configuration, and the rules between its sections."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from flowrl.config import validate
from flowrl.config.load import load_recipe
from flowrl.config.messages import format_errors
from flowrl.config.objectives import GRPOOptions, Objective
from flowrl.config.rewards import RewardOptions, check_rewards
from flowrl.config.rollout import (
    EMAOptions,
    OptimOptions,
    ReferenceOptions,
    SamplingOptions,
)
from flowrl.config.sections import (
    HeldOutOptions,
    LoRAOptions,
    MemoryOptions,
    PipelineOptions,
    PromptOptions,
    RunOptions,
    RuntimeOptions,
)
from flowrl.config.yaml12 import dump_yaml
from flowrl.errors import UserError
from flowrl.trees.plan import TreePlan
from flowrl.utils.fields import Options, option

CHECKED_MOVES = 150_000  # of the trees checked before a run, which takes about a second


class Config(Options):
    """Everything that decides a training run."""

    pipeline: PipelineOptions = option(
        PipelineOptions(), "The text-to-image pipeline that is aligned."
    )
    memory: MemoryOptions = option(
        MemoryOptions(), "What stays on the device, and in how many bits."
    )
    lora: LoRAOptions = option(LoRAOptions(), "The adapter that is trained.")
    prompts: PromptOptions = option(..., "What is sampled in training.")
    rollout: SamplingOptions = option(SamplingOptions(), "How images to learn from are sampled.")
    objective: Objective = option(GRPOOptions(), "What is minimised; an objective by its kind.")
    optim: OptimOptions = option(OptimOptions(), "AdamW and the size of its steps.")
    ema: EMAOptions = option(EMAOptions(), "A moving average of the adapter.")
    reference: ReferenceOptions = option(
        ReferenceOptions(), "What the KL penalty pulls to: the base, or a policy that follows."
    )
    rewards: Annotated[list[RewardOptions], Field(max_length=100)] = option(
        ..., "What is scored: a list, each with a name at least."
    )
    evaluation: HeldOutOptions = option(HeldOutOptions(), "Scores on held-out prompts.")
    run: RunOptions = option(RunOptions(), "Where a run lives and how long it lasts.")
    runtime: RuntimeOptions = option(
        RuntimeOptions(),
        "Several processes: what they share, and when one of them counts as lost.",
    )

    @model_validator(mode="after")
    def _check(self) -> "Config":
        validate.check_rollout(self.rollout, self.optim, self.objective)
        plans = self.plans()
        validate.check_plans(plans, self.rollout, self.objective)
        validate.check_explore(plans, self.rollout, self.run.seed)
        validate.check_precision(self.pipeline, self.rollout)
        validate.check_graphs(self.pipeline, self.memory, self.rollout, self.objective)
        validate.check_frozen_weights(self.runtime, self.pipeline, self.memory, self.rollout)
        gates = any(reward.gate is not None for reward in self.rewards)
        validate.check_objective(self.objective, self.rollout, self.optim, gates=gates)
        check_rewards(self.rewards)
        validate.check_book(self.prompts, self.rollout, self.optim, self.objective)
        validate.check_refiner(self.prompts, self.rollout, self.memory, plans)
        validate.check_reference(self.reference, self.objective, self.run)
        validate.check_hacking(self.run, self.evaluation, self.objective, self.lora)
        return self

    @property
    def held_out(self) -> str | None:
        """The source that the held-out prompts are taken from; None without any."""
        split = self.prompts.train if self.prompts.held_out is not None else None
        return self.evaluation.prompts or split

    def plans(self) -> dict[TreePlan, int]:
        """Return the trees that the run samples, each with the first iteration that samples it.

        In very long runs, only every n-th iteration is looked at.
        """
        if self.rollout.fixed:
            return {self.rollout.plan(0, self.run.seed): 0}
        plans: dict[TreePlan, int] = {}
        last = None
        for iteration in self.planned_iterations():
            plan = self.rollout.plan(iteration, self.run.seed)
            if plan is not last:  # of most recipes there is one, and its hash takes its time
                plans.setdefault(plan, iteration)
            last = plan
        return plans

    def planned_iterations(self) -> range:
        """Return the iterations whose trees are checked before a run: all, except in long runs."""
        moves = len(self.rollout.plan(0, self.run.seed).moves)
        return range(0, self.run.iterations, 1 + self.run.iterations * moves // CHECKED_MOVES)

    def changed(self, section: str, **options: Any) -> "Config":
        """Return it with some options of one section changed, unchecked."""
        changed = getattr(self, section).model_copy(update=options)
        return self.model_copy(update={section: changed})


def parse_config(data: Mapping[str, Any]) -> Config:
    """Validate a plain mapping. Raises UserError naming key, value and what was expected."""
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(format_errors(Config, error)) from error


def load_config(source: str | Path = "", overrides: Sequence[str] = ()) -> Config:
    """Read a preset or YAML file with overrides (`a.b=c`). Raises UserError for what is wrong."""
    return parse_config(load_recipe(source, overrides))


def config_yaml(config: Config) -> str:
    """Return every option as YAML that `load_config` reads back to an equal object."""
    return dump_yaml(config.model_dump(mode="json"))
