"""Decide what a start does: begin a run, resume one, or nothing, because it is finished."""

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flowrl.config import Config, load_config, parse_config
from flowrl.config.load import differences
from flowrl.errors import DamagedFile, UserError
from flowrl.training.checkpoint import CONFIG, LATEST, STATE, Checkpoints, read_checkpoint
from flowrl.training.ledger import Ledger

LOG = logging.getLogger(__name__)
AUTO = "auto"
Facts = Mapping[str, Any]  # what a recipe does not say: digests of prompts, rewards of a caller
Changes = dict[str, tuple[Any, Any]]  # by option: before, now

# Options that do not affect results and may change on resume. An entry stands for all below it, *
# for a number.
FREE = (
    "run.output_dir", "run.iterations", "run.max_minutes", "run.checkpoint_every",
    "run.keep_checkpoints", "run.sample_every", "run.trackers",
    "run.push_to_hub", "run.hub_model_id", "run.threads",
    "pipeline.device", "pipeline.decode_batch", "pipeline.attention", "pipeline.compile",
    "memory.gradient_checkpointing", "memory.text_encoders", "memory.vae", "memory.prompt_cache",
    "rollout.batch_size", "rollout.merge_lora", "rollout.workers", "optim.micro_batch",
    "prompts.allow_overlap", "rewards.*.executor",
    "evaluation.batch_size", "runtime",
    # Requests to a judge and their cost; not its model nor its prompt.
    *(f"rewards.*.args.server.{name}" for name in (
        "base_url", "api_key_env", "timeout", "deadline", "in_flight",
        "max_requests", "cache",
    )),
)  # fmt: skip
# Options that affect evaluation only: they may change with --resume, while a rerun with another
# evaluation is another run.
MEASURED = ("evaluation", *(f"run.on_hacking.{name}" for name in ("held_out", "patience")))
SHOWN = 5  # changes in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a session trains, and from which checkpoint."""

    folder: Path
    holds_run: bool  # begun earlier, with a checkpoint or not
    checkpoint: Path | None = None  # its folder
    finished: str = ""  # why nothing is left to do
    changed: Changes = field(default_factory=dict)  # options that differ from the session before
    # Of the checkpoint, on the process that decided.
    state: dict[str, Any] | None = field(default=None, repr=False)


def decide(config: Config, facts: Facts, *, resume: str | None, accept_changes: bool) -> Start:
    """Return what to do in `run.output_dir`; writes nothing.

    Args:
        resume: "auto" continues a run of the same recipe and gives another one the next number;
            "latest" or a path continues the run in the folder; None wants a folder without a run.
        accept_changes: train on although options that decide what is learned differ.

    Raises:
        UserError: when there is nothing to resume, when the path is of another run or damaged, and
            when the recipe differs and changes are not accepted.
    """
    folder = Path(config.run.output_dir)
    if resume == AUTO:
        return _rerun(config, facts, folder, accept_changes)
    if resume is None:
        return Start(folder=folder, holds_run=holds_run(folder))  # which `claim` refuses
    named = None if resume == LATEST or _same(Path(resume), folder) else Path(resume)
    if named is not None:
        _check_of_run(named, folder)
    if not holds_run(folder):
        raise UserError(f"nothing to resume: {folder} holds no run")
    changed = changes(folder, config, facts)
    differing = learned(changed)
    if differing and not accept_changes:
        raise UserError(
            f"the run in {folder} has other options ({_text(differing)}): give the options that it "
            "had, or add --accept-changes to resume with these"
        )
    if named is None:
        return _at(folder, Checkpoints(folder, keep=1).newest(), changed)
    return _at(folder, _read_named(named), changed)


def holds_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def _at(folder: Path, checkpoint: tuple[Path, dict[str, Any]] | None, changed: Changes) -> Start:
    path, state = (None, None) if checkpoint is None else checkpoint
    return Start(folder=folder, holds_run=True, checkpoint=path, state=state, changed=changed)


# --- a rerun -------------------------------------------------------------------------------------


def _rerun(config: Config, facts: Facts, folder: Path, accept_changes: bool) -> Start:
    """Take the first of `folder`, `folder-2`, ... without a run, or with one of this recipe."""
    other = ""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    for place in itertools.chain([folder], numbered):
        if not holds_run(place):
            if other:
                LOG.warning("%s: this run goes to %s", other, place)
            return Start(folder=place, holds_run=False)
        changed = changes(place, config, facts)
        differing = {name: pair for name, pair in changed.items() if not _in(name, FREE)}
        if differing and not (accept_changes and place == folder):
            other = other or f"{folder} holds a run of another recipe ({_text(differing)})"
            continue
        if why := _finished(place, config):
            return Start(folder=place, holds_run=True, finished=why)
        LOG.info("%s", f"resuming the run in {place}")
        checkpoints = Checkpoints(place, keep=1)
        newest = [_read_named(checkpoints.path(step)) for step in checkpoints.steps()[-1:]]
        return _at(place, newest[0] if newest else None, changed)
    raise AssertionError("numbers do not end")


def _read_named(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint and its state. Raises DamagedFile that says how to take another."""
    try:
        return path, read_checkpoint(path)
    except DamagedFile as error:
        raise DamagedFile(
            f"{error}; --resume latest takes the newest whole checkpoint, or choose another "
            "run.output_dir to start over"
        ) from error


def _finished(folder: Path, config: Config) -> str:
    """Return why the run in a folder has nothing left to do under a recipe, "" if it has."""
    last = Ledger(folder).last("start", "resume", "stop")
    if last is None or last["event"] != "stop" or not last["complete"]:
        return ""
    step, minutes = last["step"], last["seconds"] / 60
    if step >= config.run.iterations:
        return f"{folder} holds this recipe's finished run of {step} iterations"
    if config.run.max_minutes is not None and minutes >= config.run.max_minutes:
        return (
            f"{folder} holds this recipe's run, which run.max_minutes stopped after {step} of "
            f"{config.run.iterations} iterations: raise it to continue"
        )
    if last["reason"] == "hacking" and config.run.on_hacking is not None:
        return f"{folder} holds this recipe's run, which run.on_hacking ended at {step}"
    return ""


# --- a path of the user --------------------------------------------------------------------------


def _same(path: Path, folder: Path) -> bool:
    return path.resolve() == folder.resolve()


def _check_of_run(path: Path, folder: Path) -> None:
    """Raise UserError unless `path` is a checkpoint of the run in `folder`."""
    if not (path / STATE).is_file() or not _same(path.parent.parent, folder):
        raise UserError(
            f"cannot resume from {path}: give 'latest' or a folder below "
            f"{folder / 'checkpoints'}; set run.output_dir to resume another run, or "
            "lora.init_from to begin a new one with its weights"
        )


# --- what differs --------------------------------------------------------------------------------


def changes(folder: Path, config: Config, facts: Facts) -> Changes:
    """Return the options in which a recipe differs from the run in a folder, and facts that do."""
    ledger = Ledger(folder)
    last = ledger.last("start", "resume")
    try:
        # A process that is killed while it begins a run leaves a configuration and no ledger.
        before = parse_config(last["recipe"]) if last else load_config(folder / CONFIG)
    except UserError as error:
        raise UserError(
            f"the recipe of the run in {folder} cannot be read ({error}): choose another "
            "run.output_dir"
        ) from error
    changed = differences(before.model_dump(mode="json"), config.model_dump(mode="json"))
    facts_before = last["facts"] if last else {}
    names = [n for n in {**facts, **facts_before} if n in facts_before or n.startswith(PROVIDED)]
    changed |= {
        name: (facts_before.get(name), facts.get(name))
        for name in names
        if last and facts_before.get(name) != facts.get(name)
    }
    if config.optim.schedule == "linear" and "run.iterations" in changed:
        # In which the learning rate falls: another number is another recipe.
        changed[DECAY] = changed["run.iterations"]
    return changed


DECAY = "optim.schedule over run.iterations"
PROVIDED = "given "  # before the name of what a Python caller gave in place of the recipe's


def learned(changed: Changes) -> Changes:
    """Return the changes that decide what is learned from here on."""
    return {name: pair for name, pair in changed.items() if not _in(name, FREE + MEASURED)}


def _in(name: str, options: Sequence[str]) -> bool:
    return any(fnmatchcase(name, o) or fnmatchcase(name, f"{o}.*") for o in options)


def _text(changed: Changes) -> str:
    """Return changes in words, the first few of them."""
    parts = [f"{n} was {_short(was)}, now {_short(now)}" for n, (was, now) in changed.items()]
    more = [f"and {len(parts) - SHOWN} more"] if len(parts) > SHOWN else []
    return "; ".join(parts[:SHOWN] + more)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
