"""Prompts: the record, how they are loaded, and which ones an iteration of training gets."""

import functools
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, cycle, islice
from pathlib import Path

from flowrl.errors import UserError
from flowrl.prompts.sources import read_rows

RECORD_KEYS = ("prompt", "negative")  # of a row; all other keys are metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One prompt. `uid` depends only on the content, so noise keyed by it survives reordering."""

    uid: str
    text: str
    negative: str | None = None
    metadata: dict = field(default_factory=dict)  # for rewards: tag, include, exclude, ocr_text
    wording: str | None = None  # by prompts.refiner: encoded in place of the text

    @property
    def encoded(self) -> str:
        """The text that the network is given; rewards and people are given `text`."""
        return self.text if self.wording is None else self.wording


def load_prompts(source: str | Path, *, limit: int | None = None) -> list[PromptRecord]:
    """Load a .txt file (one prompt a line), a table, a data set or "tiny:KIND:SPLIT".

    A table is a .jsonl, .json, .csv or .tsv file; "FILE.csv:COLUMN" names the column of texts.

    A JSONL row has "prompt" (or "text") and may have "negative" (or "negative_prompt"); its other
    keys become metadata, those in an object "metadata" too. A data set is "hf:NAME",
    "hf:NAME:SPLIT:COLUMN", or a local .parquet or .arrow file or folder, see
    `sources.read_dataset`. KIND is one of the tiny world's kinds, "geneval" (its six object kinds)
    or "all"; kinds alternate. A repeated prompt gets another uid each time. Raises UserError for a
    missing, malformed or empty source.
    """
    records = records_of(islice(read_rows(source), limit))
    if not records:
        raise UserError(f"{source} holds no prompts; expected at least one line that is not empty")
    return records


def records_of(rows: Iterable[dict]) -> list[PromptRecord]:
    """Return the prompts of rows as `read_rows` yields them."""
    seen: Counter[str] = Counter()
    return [_record(row, seen) for row in rows]


def prompt_uid(text: str, negative: str | None, metadata: dict, occurrence: int = 0) -> str:
    """Return 16 hex digits that identify a prompt by its content, the same on every machine."""
    content = [text, negative, metadata, occurrence]
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=8).hexdigest()


def _record(row: dict, seen: Counter[str]) -> PromptRecord:
    text, negative = row["prompt"], row.get("negative")
    metadata = {k: v for k, v in row.items() if k not in RECORD_KEYS}
    first = prompt_uid(text, negative, metadata)
    uid = prompt_uid(text, negative, metadata, seen[first])
    seen[first] += 1
    return PromptRecord(uid=uid, text=text, negative=negative, metadata=metadata)


class PromptSampler:
    """Chooses the prompts of an iteration, as a function of the iteration number only.

    Prompts come in seeded shuffles, one per epoch; an iteration repeats none unless it must.
    balance: metadata key whose values alternate, each with its own epochs, so that rare kinds are
    seen as often as common ones.
    weights: how many turns a value of `balance` has in a round, 1 unless named.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRecord],
        per_iteration: int,
        seed: int,
        *,
        balance: str | None = None,
        weights: Mapping[str, int] | None = None,
    ):
        """Raises UserError for a prompt without `balance`, and weights that fit no prompt."""
        self.per_iteration = per_iteration
        self.seed = seed
        kinds: dict[str, list[PromptRecord]] = {}
        for record in prompts:
            if balance is not None and balance not in record.metadata:
                raise UserError(
                    f"prompts.balance is {balance!r}, but the prompt {record.text!r} "
                    "has no such key in its metadata: set it to null"
                )
            kinds.setdefault(str(record.metadata[balance]) if balance else "", []).append(record)
        self.kinds = dict(sorted(kinds.items()))
        self.round = _round(self.kinds, weights or {}, balance)

    def at(self, iteration: int) -> list[PromptRecord]:
        """Return the `per_iteration` prompts of one iteration, kinds alternating."""
        first = iteration * self.per_iteration
        rounds, turn = divmod(first, len(self.round))
        before = {
            kind: rounds * self.round.count(kind) + self.round[:turn].count(kind)
            for kind in self.kinds
        }
        streams = {kind: self._stream(kind, start) for kind, start in before.items()}
        turns = islice(cycle(self.round), turn, turn + self.per_iteration)
        return [next(streams[kind]) for kind in turns]

    def _stream(self, kind: str, start: int) -> Iterator[PromptRecord]:
        """Yield the prompts of one kind from its `start`-th on; none twice until all were used."""
        records = self.kinds[kind]
        used: set[int] = set()
        for position in count(start):
            epoch, place = divmod(position, len(records))
            index = _shuffled(len(records), f"{self.seed}/{kind}/{epoch}")[place]
            if len(used) == len(records):
                used.clear()
            if index not in used:
                used.add(index)
                yield records[index]


def _round(
    kinds: Iterable[str], weights: Mapping[str, int], balance: str | None
) -> tuple[str, ...]:
    """Return the kinds of one round, each as often as it weighs, and spread evenly."""
    share = {kind: weights.get(kind, 1) for kind in kinds}
    if unknown := [kind for kind in weights if kind not in share]:
        raise UserError(
            f"prompts.weights names {unknown[0]!r}, but no prompt has this {balance}: there are "
            f"{', '.join(share)}"
        )
    places = sorted(((i + 0.5) / n, kind) for kind, n in share.items() for i in range(n))
    if not places:
        raise UserError("prompts.weights are all 0, so that no prompt is left: raise one")
    return tuple(kind for _, kind in places)


@functools.lru_cache(maxsize=64)
def _shuffled(count: int, key: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(key).shuffle(order)
    return tuple(order)
