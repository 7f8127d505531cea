"""Options of rewards: what is scored, and where."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from flowrl.utils.fields import (
    Count,
    Flag,
    Number,
    Options,
    Positive,
    Text,
    option,
)

if TYPE_CHECKING:
    from flowrl.scoring.spec import RewardSpec

Address = Annotated[str, Field(pattern="^https?://")]
MICRO_BATCH = (
    "Most images of one call; null is all. A reward that compares whole groups always gets all."
)


class InlineOptions(Options):
    kind: Literal["inline"] = option("inline", "In the training process.")
    micro_batch: Count | None = option(
        None, MICRO_BATCH + " It is halved where the device's memory does not suffice."
    )
    background: Flag = option(
        False,
        "Compute in a thread while images are sampled; for rewards that wait for a network.",
    )


class HTTPOptions(Options):
    kind: Literal["http"] = option("http", "On HTTP servers that serve a reward of this name.")
    urls: Annotated[list[Address], Field(min_length=1)] = option(
        ..., "One or more servers that take turns, for example [http://127.0.0.1:8400]."
    )
    deadline: Positive = option(
        120.0,
        "Seconds for all retries; an image without an answer by then has no score. A request is "
        "retried after a quarter of them without a byte.",
    )
    micro_batch: Count | None = option(16, MICRO_BATCH)
    token_env: Text | None = option(
        None, "Name of the environment variable that holds the servers' token; null sends none."
    )


class GateOptions(Options):
    """When a reward counts: only for images that pass another one."""

    reward: Text = option(..., "Name of the trained reward that decides, as in scores and reports.")
    above: Number = option(..., "Its score that an image must exceed.")


class RewardOptions(Options):
    """One reward."""

    name: Text = option(
        ..., "A built-in reward such as geneval or ocr, or your own module:attribute."
    )
    label: Text | None = option(
        None,
        "Its name in scores and reports; null is the reward's own. Two of a kind need one, for "
        "example two judges.",
    )
    weight: Number = option(1.0, "Weight in the trained sum; negative means less is better.")
    args: dict[str, Any] = option({}, "Arguments of the reward, for example {mode: strict}.")
    held_out: Flag = option(
        False,
        "Only measure it, as a check on the trained rewards.",
    )
    when: Literal["rollout", "evaluation", "both"] | None = option(
        None,
        "Which images it scores. null is evaluation for a reward that is only measured, and both "
        "for a trained one and for one that compares the images of a prompt.",
    )
    applies_to: dict[Text, Annotated[list[Any], Field(min_length=1)]] = option(
        {},
        "Score only prompts whose metadata have one of these values under each key, for example "
        "{tag: [ocr]}.",
    )
    gate: GateOptions | None = option(
        None,
        "Count this reward only for images that pass another trained one, so that it cannot be "
        "earned by images that fail there.",
    )
    executor: Annotated[InlineOptions | HTTPOptions, Field(discriminator="kind")] = option(
        InlineOptions(), "Where it is computed; kind: inline, http."
    )

    @model_validator(mode="after")
    def _check(self) -> "RewardOptions":
        if self.when == "evaluation" and self.trained:
            raise ValueError(
                f"when is evaluation, but {self.name!r} is trained on in rollouts: set "
                "held_out to true, or when to both"
            )
        if self.gate is not None and (self.weight <= 0 or self.held_out):
            raise ValueError(
                f"{self.name!r} has a gate, which counts its score or 0: expected a weight above 0 "
                "and held_out false"
            )
        if isinstance(self.executor, HTTPOptions) and self.args:
            raise ValueError(
                "args are set beside executor kind http, but the server makes the reward: give "
                "them to the server, and leave args out here"
            )
        return self

    @property
    def trained(self) -> bool:
        return bool(self.weight) and not self.held_out

    def build(self, gpu: int | None = None) -> "RewardSpec":
        """Return the reward with its executor. Raises UserError when one cannot be made.

        gpu: number of this process's GPU, for threads of the executor.
        """
        from flowrl.scoring.executors.base import InlineExecutor
        from flowrl.scoring.executors.http import HTTPExecutor
        from flowrl.scoring.spec import RewardSpec, load_reward

        if isinstance(self.executor, HTTPOptions):
            reward = executor = HTTPExecutor(self.name, self.executor)
        else:
            reward, inline = load_reward(self.name, self.args), self.executor
            if getattr(reward, "scope", "sample") == "group":
                inline = inline.model_copy(update={"micro_batch": None})
            executor = InlineExecutor(reward, self.full_name(reward), inline, gpu)
        return RewardSpec(
            name=self.full_name(reward),
            reward=reward,
            when=self.when,
            weight=self.weight,
            held_out=self.held_out,
            executor=executor,
            applies_to={key: tuple(values) for key, values in self.applies_to.items()},
            gate=self.gate,
        )

    def full_name(self, reward: Any) -> str:
        """Return its name in scores and reports; reward: the object, or its class or function."""
        remote = isinstance(self.executor, HTTPOptions)
        name = self.name if remote else getattr(reward, "name", self.name)
        name = name if isinstance(name, str) else self.name  # a property, of objects alone
        return self.label or name


def check_rewards(rewards: list[RewardOptions]) -> None:
    """Check that a reward without a gate is trained on."""
    if not any(reward.trained and reward.gate is None for reward in rewards):
        raise ValueError(
            "rewards has nothing to train on, expected at least one reward with a weight other "
            "than 0 that is not held_out and has no gate, for example rewards=[{name: geneval}]"
        )
