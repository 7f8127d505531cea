"""Prompts of a rehearsal: some of the user's own where they are there, else the tiny world's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.planning.dry_rewards import KEY, Told
from flowrl.prompts.records import PromptRecord, PromptSampler, load_prompts
from flowrl.prompts.sources import HUB, TINY
from flowrl.scoring.prompt_fit import check_evaluation, check_prompts
from flowrl.utils.files import write_text

COUNT = 6
FALLBACK = "tiny:geneval:train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A file of a few prompts that stands for `source`, and a sentence on which they are."""

    path: Path
    note: str


def choose(
    path: Path, source: str, told: Sequence[Told], *, balance: str | None, held_out: bool = False
) -> Chosen:
    """Write COUNT prompts for a rehearsal to `path`, with what the rewards say of them.

    held_out: they are those of evaluation. All of the user's prompts are read and shown to the
    rewards, as far as these can be asked. Raises UserError for what is wrong with them.
    """
    if not _there(source):
        return _made_up(path, source, told, balance=balance)
    records = load_prompts(source)
    specs = [spec for spec in (t.spec() for t in told) if spec is not None]
    if len(specs) == len(told):
        (check_evaluation if held_out else check_prompts)(specs, records)
    PromptSampler(records, 1, 0, balance=balance)  # raises for prompts without the key
    judges = [[t.name for t in told if t.applies(r.text, r.metadata)] for r in records]
    rows = _varied(judges, told)
    _write(path, [_row(records[i], judges[i]) for i in rows])
    return Chosen(path=path, note=f"{len(rows)} of the {len(records)} prompts of {source}")


def _there(source: str) -> bool:
    """Whether the prompts can be read without a network."""
    return source.startswith(TINY) or (not source.startswith(HUB) and Path(source).exists())


def _varied(judges: Sequence[Sequence[str]], told: Sequence[Told]) -> list[int]:
    """Places of a few prompts, among which each reward finds one if there is any."""
    first = [next((i for i, names in enumerate(judges) if t.name in names), None) for t in told]
    found = dict.fromkeys([*(i for i in first if i is not None), *range(len(judges))])
    return sorted(list(found)[: max(COUNT, len(told))])


def _row(record: PromptRecord, judges: Sequence[str]) -> dict[str, Any]:
    row = {"prompt": record.text, KEY: list(judges)} | record.metadata
    row |= {"negative": record.negative} if record.negative is not None else {}
    return row | ({"paraphrases": list(record.paraphrases)} if record.paraphrases else {})


def _made_up(path: Path, source: str, told: Sequence[Told], *, balance: str | None) -> Chosen:
    """Prompts of the tiny world, which every reward takes for its own."""
    records = load_prompts(FALLBACK, limit=max(COUNT, len(told)))
    learned = [t for t in told if t.entry.weight and not t.entry.held_out]
    rows = []
    for i, record in enumerate(records):
        # Of rewards that are kept to some prompts each gets its own, and so does what is learned.
        chosen = [*told, *learned][i % (len(told) + len(learned))]
        kept = {key: values[0] for key, values in chosen.entry.applies_to.items()}
        metadata = record.metadata | ({balance: str(i % 2)} if balance else {}) | kept
        row = _row(record, [t.name for t in told]) | metadata
        rows.append(row | {"paraphrases": [f"{record.text}, please", f"draw {record.text}"]})
    _write(path, rows)
    what = "is looked up in training only" if source.startswith(HUB) else "is not there"
    return Chosen(path=path, note=f"{source} {what}: {len(rows)} prompts of the tiny world")


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    except TypeError as error:  # of a data set with pictures in its columns
        raise UserError(f"a prompt's metadata cannot be written as JSON: {error}") from error
    write_text(path, text)
