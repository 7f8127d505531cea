"""What a session goes on from, the same on all processes, and what it writes when it begins."""

import json
from collections.abc import Sequence
from dataclasses import replace

from flowrl import __version__
from flowrl.build.learner import ProvidedObjects, evaluation_prompts, training_prompts
from flowrl.config import Config, config_yaml
from flowrl.prompts.records import PromptRecord
from flowrl.training.checkpoint import CONFIG, STATE
from flowrl.training.resume import GIVEN, Facts, Start, decide
from flowrl.training.run import Run
from flowrl.utils.digests import content_digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import parse_state, remove_leftovers, write_text


def recipe_facts(config: Config, given: ProvidedObjects) -> Facts:
    """Return what decides a run beside its options: digests of prompts, and given rewards."""

    def known(prompts: Sequence[PromptRecord]) -> str:
        return content_digest([[p.uid, p.text, p.negative, list(p.paraphrases)] for p in prompts])

    facts = {
        "prompts.train (content)": known(training_prompts(config, given)),
        "evaluation.prompts (content)": known(evaluation_prompts(config, given)),
    }
    if given.rewards:
        versions = [[name, getattr(r, "version", None)] for name, r in given.rewards.items()]
        facts[f"{GIVEN}rewards"] = json.dumps(versions, default=str)
    return facts


def start_on_all(
    config: Config,
    given: ProvidedObjects,
    runtime: Runtime,
    *,
    resume: str | None,
    accept_changes: bool,
) -> tuple[Start, Facts]:
    """Return what the main process decided to go on from, on all processes."""
    decided, facts = None, {}
    with runtime.raise_on_all():
        facts = recipe_facts(config, given)
        if runtime.is_main:
            decided = decide(config, facts, resume=resume, accept_changes=accept_changes)
    if runtime.world_size == 1:
        assert decided is not None
        return decided, facts
    told = runtime.merge({} if decided is None else {"start": decided.text()})
    start = decided or Start.from_text(told["start"])
    if start.checkpoint is None:
        return start, facts
    path = start.checkpoint / STATE
    data = runtime.from_main(path.read_bytes)  # whose disk alone may hold it
    return replace(start, state=parse_state(data, path)), facts


def begin_session(config: Config, run: Run, start: Start, facts: Facts) -> None:
    """Write that a session begins, after all checks; from here on the folder holds a run."""
    remove_leftovers(run.folder)
    run.checkpoints.remove_unfinished()
    write_text(run.folder / CONFIG, config_yaml(config))
    run.ledger.begin(
        version=__version__,
        recipe=config.model_dump(mode="json"),
        facts=facts,
        step=start.state["iteration"] if start.state else None,
        changed=start.changed,
        run_id=start.state.get("run") if start.state else None,
    )
