"""Prompts: read from text, JSONL or the built-in tiny world; drawn epoch by epoch for training."""

import functools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice, zip_longest
from pathlib import Path

from flowrl.errors import UserError

TINY = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One prompt. `uid` depends on the content alone, so noise keyed by it survives reordering.

    metadata: whatever rewards need, in GenEval's names: tag, include, exclude, ocr_text.
    """

    uid: str
    text: str
    negative: str | None = None
    metadata: dict = field(default_factory=dict)


def load_prompts(source: str | Path, *, limit: int | None = None) -> list[PromptRecord]:
    """The prompts of a .txt file (one a line), a .jsonl file or "tiny:KIND:SPLIT".

    A JSONL row has "prompt" (or "text") and may have "negative"; its other keys become
    metadata. KIND is one of the tiny world's kinds, "geneval" (its six object kinds) or "all";
    SPLIT is train or test; kinds take turns, so a limit keeps some of each. A prompt that occurs
    several times keeps its place and gets a uid of its own each time.
    Raises UserError for a missing, malformed or empty source.
    """
    rows = _tiny(str(source)) if str(source).startswith(TINY + ":") else _file(Path(source))
    seen: Counter[str] = Counter()
    records = [_record(row, seen) for row in islice(rows, limit)]
    if not records:
        raise UserError(f"{source} holds no prompts; expected at least one line that is not empty")
    return records


def prompt_uid(text: str, negative: str | None, metadata: dict, occurrence: int = 0) -> str:
    """16 hex digits that identify a prompt by its content, the same on every machine."""
    content = [text, negative, metadata, occurrence]
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=8).hexdigest()


def _record(row: dict, seen: Counter[str]) -> PromptRecord:
    text, negative = row["prompt"], row.get("negative")
    metadata = {k: v for k, v in row.items() if k not in ("prompt", "negative")}
    first = prompt_uid(text, negative, metadata)
    uid = prompt_uid(text, negative, metadata, seen[first])
    seen[first] += 1
    return PromptRecord(uid=uid, text=text, negative=negative, metadata=metadata)


def _tiny(source: str) -> Iterator[dict]:
    from flowrl.tiny import world

    _, kinds, split = [*source.split(":"), "", ""][:3]
    families = {"all": world.TAGS, "geneval": world.GENEVAL_TAGS}
    tags = [tag for kind in kinds.split("+") for tag in families.get(kind, (kind,))]
    if source.count(":") != 2 or not set(tags) <= set(world.TAGS) or split not in ("train", "test"):
        known = ", ".join(("geneval", "all", *world.TAGS))
        raise UserError(f"cannot read prompts {source!r}: write tiny:KIND:train or tiny:KIND:test "
                        f"with KIND one of {known}, or several joined by +")  # fmt: skip
    turns = zip_longest(*(world.split_prompts(tag, split) for tag in tags))
    return (prompt for prompt in chain.from_iterable(turns) if prompt is not None)


def _file(path: Path) -> Iterator[dict]:
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(
            f"cannot read prompts {str(path)!r}: use a .txt file (one prompt a line), a .jsonl "
            "file (one object with 'prompt' a line) or tiny:geneval:train"
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"cannot read prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read prompts {path}: it is not UTF-8 text; save it as UTF-8"
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            is_text = path.suffix == ".txt"
            yield {"prompt": line.strip()} if is_text else _row(line, f"{path}, line {number}")


def _row(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not valid JSON ({error.msg}); expected one object a line"
        ) from error
    if isinstance(row, dict) and "prompt" not in row and "text" in row:
        row["prompt"] = row.pop("text")
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: expected an object with a text under "prompt"')
    if not isinstance(row.get("negative"), str | None):
        raise UserError(f'{where}: "negative" must be a text')
    return row


class PromptSampler:
    """Which prompts an iteration trains on; a function of the iteration number alone.

    Prompts come in seeded shuffles, one an epoch, `per_iteration` at a time. With `balance`, the
    name of a metadata key, its values take turns, each with epochs of its own, so that rare
    kinds are seen as often as common ones. An iteration has no prompt twice unless it must.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRecord],
        per_iteration: int,
        seed: int,
        *,
        balance: str | None = None,
    ):
        self.per_iteration = per_iteration
        self.seed = seed
        if per_iteration < 1 or not prompts:
            raise ValueError(
                f"need prompts and per_iteration >= 1, got {len(prompts)} and {per_iteration}"
            )
        kinds: dict[str, list[PromptRecord]] = {}
        for record in prompts:
            if balance is not None and balance not in record.metadata:
                raise UserError(
                    f"prompts.balance is {balance!r}, but the prompt {record.text!r} "
                    "has no such key in its metadata: set it to null"
                )
            kinds.setdefault(str(record.metadata[balance]) if balance else "", []).append(record)
        self.kinds = dict(sorted(kinds.items()))

    def at(self, iteration: int) -> list[PromptRecord]:
        """The `per_iteration` prompts of one iteration, kinds in turn."""
        first, count = iteration * self.per_iteration, len(self.kinds)
        streams = [
            self._stream(kind, -(-(first - i) // count)) for i, kind in enumerate(self.kinds)
        ]
        return [next(streams[turn % count]) for turn in range(first, first + self.per_iteration)]

    def _stream(self, kind: str, start: int) -> Iterator[PromptRecord]:
        """The prompts of one kind from its `start`-th on; none twice until all were given."""
        records = self.kinds[kind]
        given: set[int] = set()
        position = start
        while True:
            epoch, place = divmod(position, len(records))
            index = _shuffled(len(records), f"{self.seed}/{kind}/{epoch}")[place]
            position += 1
            if len(given) == len(records):
                given.clear()
            if index not in given:
                given.add(index)
                yield records[index]


@functools.lru_cache(maxsize=64)
def _shuffled(count: int, key: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(key).shuffle(order)
    return tuple(order)
