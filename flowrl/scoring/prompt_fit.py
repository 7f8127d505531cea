"""Do rewards and prompts fit each other? Asked before anything is drawn."""

from collections.abc import Sequence

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.spec import RewardSpec, trained


def check_prompts(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]) -> None:
    """Finds before training that a reward and the prompts do not fit.

    Raises UserError when a reward applies to no prompt or cannot judge one, or when a prompt has
    no reward to train on.
    """
    check_judges(specs, prompts)
    fits = [[s.applies(p.text, p.metadata) for s in specs] for p in prompts]
    for column, spec in enumerate(specs):
        if spec.trained and not any(row[column] for row in fits):
            needs = ", ".join(getattr(spec.reward, "required_metadata", ())) or "something else"
            raise UserError(
                f"reward {spec.name!r} applies to none of the prompts: "
                f"it needs {needs} in their metadata"
            )
    learned = [specs.index(spec) for spec in trained(specs)]
    for row, prompt in zip(fits, prompts, strict=True):
        if learned and not any(row[c] for c in learned):
            raise UserError(
                f"no reward applies to the prompt {prompt.text!r}: remove it or add a reward for it"
            )


def check_evaluation(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]) -> None:
    """Raises UserError when there are held-out prompts, and no reward applies to any of them."""
    check_judges(specs, prompts)
    if prompts and not any(s.applies(p.text, p.metadata) for s in specs for p in prompts):
        raise UserError(
            f"no reward applies to any of the {len(prompts)} evaluation.prompts, the first is "
            f"{prompts[0].text!r}: give prompts with the metadata that the rewards need"
        )


def check_judges(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]) -> None:
    """Asks rewards that have a method `check(prompt, metadata)`, which raises ValueError for a
    prompt that they apply to and cannot judge. Raises UserError for the first."""
    for spec in specs:
        check = getattr(spec.reward, "check", None)
        if check is None:
            continue
        for p in prompts:
            try:
                if spec.applies(p.text, p.metadata):
                    check(p.text, p.metadata)
            except UserError:
                raise
            except ValueError as error:
                raise UserError(f"reward {spec.name!r}, prompt {p.text!r}: {error}") from error
            except Exception as error:  # of a user's own method
                raise UserError(
                    f"reward {spec.name!r}, prompt {p.text!r}: its check failed with "
                    f"{type(error).__name__}: {error}"
                ) from error
