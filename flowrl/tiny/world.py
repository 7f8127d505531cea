"""The tiny world: what can be asked for, in which words, and who may see it.

A *request* is what is asked for (two small circles); a *prompt* is a request in words ("a photo
of two small circles"). There are GenEval's six kinds of request (Ghosh et al. 2023, arXiv
2310.11513) over coloured shapes, and short words to be written. Requests, not texts, are split
into train, validation and test; pretraining sees them all, alignment only those of train.

A pretrained model of the real world mixes right and wrong images of a prompt, both clean. So does
one of the tiny world: pretraining draws a request right as often as its tier says, and otherwise
altered in one way under the same caption (`scripts/pretrain_tiny/defects.py`). The score of a model
that learned without defects is therefore the ceiling that alignment can reach.

Everything here is plain Python; `scripts/pretrain_tiny/draw.py` makes an image of a prompt.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLORS = ("red", "yellow", "green", "blue", "purple", "black")
NUMBERS = {1: "a", 2: "two", 3: "three", 4: "four"}
PLACES = ("top left", "top right", "bottom left", "bottom right")  # the four quarters
MIRRORED = {"left of": "right of", "above": "below", "right of": "left of", "below": "above"}
WORDS = (
    "BALL BAND BEAR BELL BIRD BOAT BONE BOOK CAKE CARD CITY COAT COIN CORN CRAB DEER DESK DOOR "
    "DRUM DUCK FARM FIRE FISH FLAG FORK FROG GATE GIFT GOAT GOLD HAND HARP HILL HOME JAZZ KING "
    "KITE LAKE LAMP LEAF LION MAZE MILK MOON NEST NOSE OVEN PARK PIPE POND QUIZ RAIN RING ROAD "
    "ROPE ROSE SAND SHIP SOCK SOUP STAR TENT TREE VASE VEST TUBE VINE YARN"
).split()
PREFIXES = ("a photo of ", "a picture of ", "a drawing of ", "")
WORD_TEMPLATES = (
    'the word "{}"',
    'a sign with the word "{}"',
    'the text "{}"',
    'a photo of the word "{}"',
)
GENEVAL_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
TAGS = (*GENEVAL_TAGS, "ocr")
SPLITS = {"train": 0.60, "validation": 0.15, "test": 0.25}  # shares of the requests

# A prompt: {"tag", "prompt", "request", "tier", "include": [...], "exclude": [...]}, GenEval's
# form, or {"tag": "ocr", "prompt", "request", "tier", "ocr_text"}.
Prompt = dict

# How often pretraining draws a request of a tier right. Tiers follow what a request is made of
# (`family`), so that a policy can learn them from other requests.
TIERS = {"easy": 0.9, "half": 0.5, "hard": 0.1, "rare": 0.02}
_TIERS_OF_SIX = ("easy", "half", "easy", "half", "easy", "hard")
_TIERS_OF_PAIRS = ("easy", "half") * 6 + ("easy", "hard", "rare")  # of the 15 pairs of six


@dataclass(frozen=True, slots=True, order=True)
class Thing:
    """One kind of object in a request."""

    shape: str
    color: str = ""  # "" leaves it open: it is drawn black
    size: str = ""  # "small", or "" for the usual size
    place: str = ""  # one of PLACES, or "" for any

    def noun(self, count: int = 1) -> str:
        """Return the object in words: 'small red circle', 'small red circles'."""
        words = [self.size, self.color, self.shape + ("s" if count > 1 else "")]
        if count > 1 and self.shape == "cross":
            words[-1] = "crosses"
        return " ".join(word for word in words if word)

    def phrase(self, count: int = 1) -> str:
        """Return the object with its number and place: 'a circle in the top left'."""
        place = f" in the {self.place}" if self.place else ""
        return f"{NUMBERS[count]} {self.noun(count)}{place}"

    def entry(self, count: int = 1) -> dict:
        """Return GenEval's entry of `include`; `size` and `place` are this world's own keys."""
        fields = {"color": self.color, "size": self.size, "place": self.place}
        named = {key: value for key, value in fields.items() if value}
        return {"class": self.shape, "count": count} | named


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, in canonical form.

    Pairs are unordered, and "B right of A" is "A left of B".
    """

    tag: str
    things: tuple[Thing, ...] = ()
    count: int = 1  # of the first thing
    relation: str = ""  # of the first thing to the second: "left of" or "above"
    word: str = ""

    @property
    def name(self) -> str:
        """Return a name that equal requests share."""
        if self.tag == "ocr":
            return f"ocr: {self.word}"
        nouns = [f"{t.noun()} {t.place}".strip() for t in self.things]
        if self.tag == "counting":
            return f"counting: {self.count} {nouns[0]}"
        return f"{self.tag}: " + f" {self.relation or '+'} ".join(nouns)


@functools.cache
def requests(tag: str) -> Sequence[Request]:
    """List every request of one kind, in a fixed order.

    60 single objects, 60 pairs, 126 counts, 72 colours, 60 relations, 450 coloured pairs, 68
    words.
    """
    if tag == "ocr":
        return [Request(tag, word=word) for word in WORDS]
    if tag == "single_object":
        places = ("", *PLACES)
        things = [Thing(s, size=z, place=p) for s, z, p in product(SHAPES, ("", "small"), places)]
        return [Request(tag, (thing,)) for thing in things]
    if tag == "two_object":
        things = [Thing(s, size=z) for s, z in product(SHAPES, ("", "small"))]
        return [Request(tag, pair) for pair in _pairs(things)]
    if tag == "counting":
        things = [Thing(s, c) for s, c in product(SHAPES, ("", *COLORS))]
        return [Request(tag, (t,), count=n) for n, t in product((2, 3, 4), things)]
    if tag == "colors":
        things = [Thing(s, c, z) for s, c, z in product(SHAPES, COLORS, ("", "small"))]
        return [Request(tag, (thing,)) for thing in things]
    if tag == "position":
        pairs = permutations(map(Thing, SHAPES), 2)
        return [Request(tag, p, relation=r) for r, p in product(("left of", "above"), pairs)]
    if tag == "color_attr":
        things = [Thing(s, c) for s, c in product(SHAPES, COLORS)]
        pairs = [p for p in _pairs(things) if p[0].color != p[1].color]
        return [Request(tag, pair) for pair in pairs]
    raise ValueError(f"unknown kind {tag!r}; the tiny world has {', '.join(TAGS)}")


def _pairs(things: Sequence[Thing]) -> Iterator[tuple[Thing, ...]]:
    """Yield unordered pairs of different shapes."""
    return (p for p in combinations(sorted(things), 2) if p[0].shape != p[1].shape)


def tier(request: Request) -> str:
    """Return how hard a request was made, a key of TIERS."""
    number, members = family(request)
    return (_TIERS_OF_PAIRS if members == 15 else _TIERS_OF_SIX)[number]


def family(request: Request) -> tuple[int, int]:
    """Return the number of a request's family within its kind, and how many families there are.

    Single objects, counts and relations go by the (first) shape, colours by the colour, words by
    the first letter; pairs of shapes and of colours by the pair.
    """
    if request.tag == "ocr":
        return ord(request.word[0]) % 6, 6
    first = request.things[0]
    if request.tag in ("two_object", "color_attr"):
        kinds = SHAPES if request.tag == "two_object" else COLORS
        values = [t.shape if request.tag == "two_object" else t.color for t in request.things]
        pair = sorted(kinds.index(value) for value in values)
        return list(combinations(range(6), 2)).index((pair[0], pair[1])), 15
    if request.tag == "colors":
        return COLORS.index(first.color), 6
    return SHAPES.index(first.shape), 6


def prompts_of(request: Request) -> list[Prompt]:
    """List a request in all its wordings."""
    common = {"tag": request.tag, "request": request.name, "tier": tier(request)}
    if request.tag == "ocr":
        texts = [template.format(request.word) for template in WORD_TEMPLATES]
        return [common | {"prompt": text, "ocr_text": request.word} for text in texts]
    return [
        common | {"prompt": prefix + text} | demands
        for text, demands in _wordings(request)
        for prefix in PREFIXES
    ]


def _wordings(request: Request) -> list[tuple[str, dict]]:
    """List (text without prefix, {"include", "exclude"}) of a request."""
    if request.tag == "counting":
        (thing,), count = request.things, request.count
        exclude = [{"class": thing.shape, "count": count + 1}]
        return [(thing.phrase(count), {"include": [thing.entry(count)], "exclude": exclude})]
    if len(request.things) == 1:
        (thing,) = request.things
        return [(thing.phrase(), {"include": [thing.entry()]})]
    a, b = request.things
    if request.tag == "position":
        return [_relation(a, request.relation, b), _relation(b, MIRRORED[request.relation], a)]
    return [
        (f"{x.phrase()} and {y.phrase()}", {"include": [x.entry(), y.entry()]})
        for x, y in ((a, b), (b, a))
    ]


def _relation(a: Thing, relation: str, b: Thing) -> tuple[str, dict]:
    include = [b.entry(), a.entry() | {"position": [relation, 0]}]
    return f"{a.phrase()} {relation} {b.phrase()}", {"include": include}


@functools.cache
def split_requests(tag: str, split: str) -> Sequence[Request]:
    """List the requests of one kind in a split, which share none; tiers have equal shares."""
    if split not in SPLITS:
        raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    chosen: list[Request] = []
    for name in TIERS:
        members = [r for r in requests(tag) if tier(r) == name]
        random.Random(f"flowrl tiny world 2, {tag}, {name}").shuffle(members)
        test = round(len(members) * SPLITS["test"] + 0.49)
        cut = test + round(len(members) * SPLITS["validation"])
        parts = {"test": members[:test], "validation": members[test:cut], "train": members[cut:]}
        chosen += parts[split]
    return chosen


@functools.cache
def split_prompts(tag: str, split: str) -> Sequence[Prompt]:
    """List the prompts of one kind for a split, in a fixed shuffled order.

    The first prompts are of different requests: one wording of each, then another of each.
    """
    by_request = [prompts_of(request) for request in split_requests(tag, split)]
    order = random.Random(f"flowrl tiny world 2, {tag}, {split}")
    for prompts in by_request:
        order.shuffle(prompts)
    order.shuffle(by_request)
    turns = max(map(len, by_request))
    return [p[turn] for turn in range(turns) for p in by_request if turn < len(p)]


def all_prompts(tag: str) -> list[Prompt]:
    """List every prompt of one kind."""
    return [prompt for request in requests(tag) for prompt in prompts_of(request)]


# --- planted defects -----------------------------------------------------------------------------

DEFECTS = {  # what is altered, for cards and pages
    "single_object": "another shape",
    "two_object": "one of the two shapes is another",
    "counting": "one object more or fewer",
    "colors": "another colour",
    "position": "the relation mirrored",
    "color_attr": "the two colours swapped",
    "ocr": "one letter is another",
}


def planted() -> str:
    """Say what was planted, for every page and card that shows a result of a tiny pipeline."""
    shares = ", ".join(f"{1 - right:.0%}" for right in TIERS.values())
    return (
        "Planted: of the images that the tiny pipelines learned from, some show something else "
        f"than their caption says ({', '.join(DEFECTS.values())}). Their share is {shares}, by "
        "the request's tier. Pretraining saw every request; alignment sees those of train alone."
    )
