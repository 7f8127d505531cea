"""What a prompt requests, whatever its words, and which held-out prompts request the same.

A request follows from metadata where there are any: GenEval's `include` and `exclude` (Ghosh et al.
2023, 2310.11513) with pairs unordered and "A left of B" equal to "B right of A", or the text to
be drawn, `ocr_text`. Otherwise it is the prompt's text, up to case, spaces and punctuation.
"""

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, load_prompts

MIRRORED = {"right of": "left of", "below": "above"}  # each relation and its first form


def request_of(metadata: Mapping[str, Any]) -> Hashable | None:
    """Return the request in metadata, equal for equal requests; None where there is none."""
    request: list[Hashable] = []
    if isinstance(text := metadata.get("ocr_text"), str):
        request.append(("text", "".join(text.split()).casefold()))
    include, exclude = (_entries(metadata.get(key)) for key in ("include", "exclude"))
    if include or exclude:
        objects = [_object(entry) for entry in include]
        relations = [
            _relation(mine, entry["position"], objects)
            for mine, entry in zip(objects, include, strict=True)
            if entry.get("position")
        ]
        # "Two clocks" is often said as two and not three: the second says nothing new.
        limits = {(name, count + 1, *rest) for name, count, *rest in objects}
        forbidden = [_object(entry) for entry in exclude if _object(entry) not in limits]
        parts = (objects, relations, forbidden)
        request.append(("objects", *(tuple(sorted(part, key=repr)) for part in parts)))
    return tuple(request) or None


def _entries(value: Any) -> list[Mapping[str, Any]]:
    entries = value if isinstance(value, list) else []
    return [e for e in entries if isinstance(e, Mapping) and "class" in e]


def _object(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return name, count, color and, of the tiny world, size and place."""
    name, *rest = (
        str(entry.get(key) or "").casefold() for key in ("class", "color", "size", "place")
    )
    return name, int(entry.get("count", 1)), *rest


def _relation(mine: tuple, position: Any, objects: Sequence[tuple]) -> tuple:
    """Return (A, relation, B), with one of each pair of relations that mirror each other.

    position: [relation, index of B in `include`].
    """
    try:
        relation, theirs = str(position[0]), objects[int(position[1])]
    except (LookupError, TypeError, ValueError):  # not GenEval's: only its like is the same
        return mine, repr(position), ()
    if relation in MIRRORED:
        return theirs, MIRRORED[relation], mine
    return mine, relation, theirs


def requests_in(files: Iterable[Path]) -> frozenset[Hashable]:
    """Return the requests of prompt files. Raises UserError for a prompt without metadata of one.

    A text alone is not a request: the same could be said in other words.
    """
    requests = set()
    for path in files:
        for prompt in load_prompts(path):
            request = request_of(prompt.metadata)
            if request is None:
                raise UserError(
                    f"{path}: the prompt {prompt.text!r} has neither include, exclude nor "
                    "ocr_text, which say what it asks for: give a .jsonl file in GenEval's form"
                )
            requests.add(request)
    return frozenset(requests)


def plain_text(text: str) -> str:
    """Return a text without case, punctuation and spare spaces."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def overlaps(
    training: Iterable[PromptRecord], held_out: Iterable[PromptRecord]
) -> list[tuple[str, str]]:
    """Return every held-out prompt whose request is one of training, and that of training.

    Two prompts are compared by their metadata where both have any, else by their texts.
    """
    requests: dict[Hashable, str] = {}
    texts: dict[str, str] = {}  # of all prompts
    unlabelled: dict[str, str] = {}  # of those without a request in their metadata
    for prompt in training:
        request, text = request_of(prompt.metadata), plain_text(prompt.text)
        texts[text] = prompt.text
        if request is None:
            unlabelled[text] = prompt.text
        else:
            requests[request] = prompt.text
    pairs = []
    for prompt in held_out:
        request, text = request_of(prompt.metadata), plain_text(prompt.text)
        same = texts.get(text) if request is None else requests.get(request, unlabelled.get(text))
        if same is not None:
            pairs.append((prompt.text, same))
    return pairs


def check_overlap(
    training: Sequence[PromptRecord], held_out: Sequence[PromptRecord], *, allowed: bool
) -> None:
    """Check that no held-out prompt makes a training prompt's request, unless `allowed`.

    Raises UserError with the number of such prompts, and the first of them.
    """
    if allowed or not training or not held_out:
        return
    pairs = overlaps(training, held_out)
    if pairs:
        unseen, seen = pairs[0]
        raise UserError(
            f"{len(pairs)} of the {len(held_out)} evaluation.prompts request the same as prompts "
            f"in prompts.train, for example {unseen!r} and {seen!r}: a score on "
            "them does not show that anything unseen was learned. Hold out other requests, as "
            "flowrl prompts does, or set prompts.allow_overlap to true to insist"
        )


FEWEST = 4  # requests that are held out: an interval over fewer prompts says nothing


def hold_out(
    prompts: Sequence[PromptRecord], share: float
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Split prompts into those of training and a share of the requests that are held out.

    No request is on both sides. Which ones are held out follows from the prompts alone, so that
    a resumed run, an evaluation and a gallery see the same.

    share: of the requests, rounded up; at least FEWEST are held out, of twice as many or more.

    Raises UserError when the prompts ask for too few different things.
    """
    by_request: dict[Hashable, list[PromptRecord]] = {}
    for prompt in prompts:
        key = request_of(prompt.metadata) or plain_text(prompt.text)
        by_request.setdefault(key, []).append(prompt)
    order = sorted(
        by_request.values(), key=lambda same: blake2b(min(p.uid for p in same).encode()).digest()
    )
    count = max(FEWEST, math.ceil(share * len(order)))
    chosen = {p.uid for same in order[:count] for p in same}
    while True:  # what training has in the same words, without metadata, goes back to training
        training = [p for p in prompts if p.uid not in chosen]
        held_out = [p for p in prompts if p.uid in chosen]
        shared = {text for text, _ in overlaps(training, held_out)}
        if not shared:
            break
        chosen -= {p.uid for p in held_out if p.text in shared}
    if len(order) < 2 * FEWEST or not training or not held_out:
        raise UserError(
            f"the {len(prompts)} prompts of prompts.train make {len(order)} different requests, "
            f"too few to hold {FEWEST} out for evaluation: give {2 * FEWEST} or more, or "
            "evaluation.prompts, or set prompts.held_out to null to train without an evaluation"
        )
    return training, held_out
