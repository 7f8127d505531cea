"""Begin a session: the same decision on all processes, and its first entries on disk."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from flowrl import __version__
from flowrl.assembly.learner import ProvidedObjects, evaluation_prompts, training_prompts
from flowrl.backbones.loading import check_pipeline
from flowrl.config import Config, config_yaml, load_config, parse_config
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.training.checkpoint import CONFIG, STATE
from flowrl.training.resume import PROVIDED, Facts, Start, decide
from flowrl.training.run import Run
from flowrl.utils.digests import content_digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import parse_state, remove_leftovers, write_text


def recipe_facts(config: Config, provided: ProvidedObjects) -> Facts:
    """Return what decides a run beside its options: digests of prompts, and given rewards."""

    def digest_of(prompts: Sequence[PromptRecord]) -> str:
        return content_digest([[p.uid, p.text, p.negative] for p in prompts])

    facts = {
        "prompts.train (content)": digest_of(training_prompts(config, provided)),
        "evaluation.prompts (content)": digest_of(evaluation_prompts(config, provided)),
    }
    if provided.rewards:
        versions = [[name, getattr(r, "version", None)] for name, r in provided.rewards.items()]
        facts[f"{PROVIDED}rewards"] = json.dumps(versions, default=str)
    return facts


def start_on_all(
    config: Config,
    provided: ProvidedObjects,
    runtime: Runtime,
    *,
    resume: str | None,
    accept_changes: bool,
) -> tuple[Start, Facts]:
    """Return the decision of the main process on all processes."""
    decided, facts = None, {}
    with runtime.raise_on_all():
        if provided.pipeline is None:
            check_pipeline(config.pipeline.path, config.pipeline.revision)
        facts = recipe_facts(config, provided)
        if runtime.is_main:
            decided = decide(config, facts, resume=resume, accept_changes=accept_changes)
    if runtime.world_size == 1:
        assert decided is not None
        return decided, facts
    as_json = TypeAdapter(Start)
    text = as_json.dump_json(decided, exclude={"state", "changed"}) if decided else b""
    sent = runtime.from_main(lambda: text)
    start = decided or as_json.validate_json(sent)
    if start.checkpoint is None:
        return start, facts
    path = start.checkpoint / STATE
    data = runtime.from_main(path.read_bytes)  # whose disk alone may hold it
    return replace(start, state=parse_state(data, path)), facts


def begin_session(config: Config, run: Run, start: Start, facts: Facts) -> None:
    """Write that a session begins, after all checks; from here on the folder holds a run."""
    remove_leftovers(run.folder, "run")
    run.checkpoints.remove_unfinished()
    write_text(run.folder / CONFIG, config_yaml(config))
    step = start.state["iteration"] if start.state else None
    run.ledger.append(
        "start" if step is None else "resume",
        flowrl=__version__,
        step=step,
        recipe=config.model_dump(mode="json"),
        facts=dict(facts),
        changed=start.changed,
    )


# --- what is only looked at ---------------------------------------------------------------------


def recipe_to_show(
    run: Path | None, base: str | None, lora: str | None, prompts: str | None
) -> tuple[Config, Runtime]:
    """Return the recipe that the main process reads, whose disk alone may hold the run."""

    def read() -> Config:
        if run is None:
            return _base_recipe(str(base), lora, str(prompts))
        if not (run / CONFIG).is_file():
            raise UserError(f"{run} is not a run folder: it has no {CONFIG}")
        return load_config(run / CONFIG)

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        config = read()
        return config, runtime_to_evaluate(config)
    try:
        runtime = runtime_to_evaluate(read())
    except UserError:  # of a process that does not see the folder
        runtime = Runtime()
    text = runtime.from_main(lambda: json.dumps(read().model_dump(mode="json")).encode())
    return parse_config(json.loads(text)), runtime


def runtime_to_evaluate(config: Config) -> Runtime:
    """Return this process's runtime without autocast: images are those of the pipeline's dtype."""
    return Runtime(
        device=config.pipeline.device, timeout=config.runtime.timeout, seed=config.run.seed
    )


def _base_recipe(base: str, lora: str | None, prompts: str) -> Config:
    """Return the recipe of the run that `lora` belongs to, with another base; or the defaults."""
    if lora is not None and (Path(lora) / CONFIG).is_file():
        return load_config(Path(lora) / CONFIG, [f"pipeline.path={base}", "pipeline.revision=null"])
    rewards = [{"name": "brightness"}]  # a recipe needs one; the gallery uses none
    return parse_config(
        {"pipeline": {"path": base}, "prompts": {"train": prompts}, "rewards": rewards}
    )
