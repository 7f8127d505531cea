"""Prompts sampled from combinations of parts, and a held-out set that shares no combination."""

import json
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count as laps
from itertools import islice
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.utils.files import write_text

SPARE = 1000  # combinations looked at beyond twice those needed, as some are the same
Sets = tuple[list[dict], list[dict]]  # training prompts, held-out prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateKind:
    """Prompts of one kind: each of `combinations` can be worded in `wordings` ways."""

    name: str
    combinations: int
    wordings: int
    make: Callable[[int, int], dict]  # (combination, wording) -> row with a text under "prompt"
    key: Callable[[int], Hashable]  # two combinations with one key, of any kinds, are the same

    def sample(
        self,
        test: int,
        train: int,
        seed: int,
        taken: set[Hashable],
        excluded: Collection[Hashable] = (),
    ) -> tuple[list[dict], list[dict]]:
        """Return `test` and `train` prompts without a combination in common, seeded.

        A list repeats a combination, in other words, only when it needs more than there are, and
        a text only when it needs more than there are of these; training first.

        Args:
            taken: keys of used combinations; new ones are added.
            excluded: keys that neither list may have.

        Raises:
            UserError: there is no combination for a list.
        """
        rng = random.Random(f"{seed}/{self.name}")
        most = 2 * (test + train) + SPARE + len(excluded)
        pool = list(islice(self._unused(rng, most, taken | set(excluded)), test + train))
        # Each list gets the combinations that its texts need, then one a prompt, the test first.
        needed = [-(-n // self.wordings) for n in (test, train)]
        most_of_test = max(len(pool) - needed[1], min(needed[0], len(pool) - min(train, 1)), 0)
        of_test = min(test, most_of_test)
        lists = []
        for count, chosen in ((test, pool[:of_test]), (train, pool[of_test:])):
            if count and not chosen:
                raise UserError(
                    f"cannot make {test + train} prompts of the kind {self.name} in two lists that "
                    f"share nothing, because there are at most {self.combinations} combinations, "
                    "without those that are excluded: ask for none of this kind"
                )
            taken.update(map(self.key, chosen))
            starts = [rng.randrange(self.wordings) for _ in chosen]
            rows = (
                self.make(index, (start + lap) % self.wordings)
                for lap in laps(0)
                for index, start in zip(chosen, starts, strict=True)
            )
            lists.append(list(islice(rows, count)) if chosen else [])
        return lists[0], lists[1]

    def is_exhausted(self, excluded: Collection[Hashable]) -> bool:
        """Return whether all combinations are excluded."""
        return all(self.key(index) in excluded for index in range(self.combinations))

    def _unused(self, rng: random.Random, most: int, taken: set[Hashable]) -> Iterator[int]:
        """Yield combinations in random order, each once; look at `most`."""
        for index in rng.sample(range(self.combinations), min(most, self.combinations)):
            key = self.key(index)
            if key not in taken:
                taken.add(key)
                yield index


def sample_sets(
    kinds: Sequence[TemplateKind],
    count: int,
    held_out: int,
    seed: int,
    *,
    ratio: Sequence[int],
    test_ratio: Sequence[int],
    excluded: Collection[Hashable] = (),
) -> Sets:
    """Return `count` training prompts and `held_out` others, in the kinds' ratios, shuffled.

    excluded: keys of combinations that neither may have; a kind of which nothing is left then has
        no part, as single objects beside GenEval's test, which has them all.
    """
    names = [kind.name for kind in kinds]
    gone = {i for i, kind in enumerate(kinds) if excluded and kind.is_exhausted(excluded)}
    train, test = (
        apportion(size, names, [0 if i in gone else part for i, part in enumerate(parts)])
        for size, parts in ((count, ratio), (held_out, test_ratio))
    )
    taken: set[Hashable] = set()
    portions = [
        kind.sample(test[kind.name], train[kind.name], seed, taken, excluded) for kind in kinds
    ]
    return (
        shuffled([row for _, rows in portions for row in rows], f"{seed}/train"),
        shuffled([row for rows, _ in portions for row in rows], f"{seed}/test"),
    )


def apportion(count: int, names: Sequence[str], ratio: Sequence[int]) -> Mapping[str, int]:
    """Split `count` in this ratio by largest remainders."""
    parts = [count * share // sum(ratio) for share in ratio]
    order = sorted(range(len(ratio)), key=lambda i: (-(count * ratio[i] % sum(ratio)), i))
    for i in order[: count - sum(parts)]:
        parts[i] += 1
    return dict(zip(names, parts, strict=True))


def shuffled(rows: list[dict], key: str) -> list[dict]:
    random.Random(key).shuffle(rows)
    return rows


def write_sets(folder: Path, sets: Sets) -> list[Path]:
    """Write non-empty train.jsonl and test.jsonl. Raises UserError when one exists already."""
    train, test = sets
    both = {folder / "train.jsonl": train, folder / "test.jsonl": test}
    files = {path: rows for path, rows in both.items() if rows}
    for path in files:
        if path.exists():
            raise UserError(f"{path} is there already: name another folder, or remove it")
    for path, rows in files.items():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return list(files)


# --- The words that generated prompt sets are made of: names of objects, colours, plain words --

RULES: Any = import_module("flowrl_rewards.geneval_rules")
COCO: tuple[str, ...] = RULES.COCO
COLORS: tuple[str, ...] = RULES.COLORS
PLURALS = {
    "person": "people", "sheep": "sheep", "skis": "pairs of skis", "knife": "knives",
    "computer mouse": "computer mice", "scissors": "pairs of scissors",
    "broccoli": "heads of broccoli",
}  # fmt: skip
SINGULARS = {
    "skis": "a pair of skis", "scissors": "a pair of scissors", "broccoli": "a head of broccoli",
}  # fmt: skip

WORDS = tuple(
    """
    Apple Autumn Baker Bakery Balance Banana Basket Beach Bell Bench Berry Bicycle Bird Blossom
    Blue Boat Book Bottle Branch Bread Breeze Brick Bridge Bright Brook Butter Button Cabin Cake
    Camera Candle Canyon Captain Carpet Castle Cedar Cellar Chair Chapel Cherry Cinema Circle City
    Clay Clock Cloud Clover Coast Coffee Comet Copper Coral Corner Cotton Country Cousin Crystal
    Dance Dawn Desert Dinner Dragon Dream Drum Eagle Early Earth East Echo Evening Fabric Falcon
    Family Farm Feather Festival Field Finest Fire Flower Forest Fountain Fresh Friday Friend
    Fruit Future Galaxy Garden Gentle Ginger Glass Golden Grand Granite Grape Green Guitar Harbor
    Harvest Hazel Heart Helmet Hidden Holiday Honey Horizon Horse Hotel House Island Ivory Jacket
    Jasmine Journey Juniper Kettle Kitchen Ladder Lake Lantern Laundry Lemon Letter Library Light
    Lilac Lily Linen Little Lucky Magic Mango Maple Marble Market Meadow Melody Mellow Midnight
    Mill Mirror Modern Monday Morning Mountain Museum Music Nature Night North Notebook Oak Ocean
    Olive Open Orange Orchard Organic Paper Parade Path Peach Pearl Pebble Pencil Pepper Piano
    Picnic Pillow Pine Planet Plaza Pocket Pond Poppy Prairie Prince Pumpkin Quarry Quiet Quilt
    Rabbit Radio Rain Rapid Raven Record Ribbon River Robin Rocket Rose Royal Saffron Sail Salmon
    Salt Sandy Saturday Scarlet School Season Secret Shadow Shell Silent Silver Simple Sky Smart
    Snow Soap Solar Sparrow Spice Spring Square Stable Star Station Stone Storm Story Street
    Studio Sugar Summer Sunday Sunny Sunset Swift Table Tailor Temple Theater Thunder Tiger Timber
    Tower Travel Tulip Tunnel Valley Vanilla Velvet Village Violet Violin Walnut Water Welcome
    West Whisper Wild Willow Window Winter Wonder Wood Yellow Zebra Zenith
    """.split()
)


def article(name: str) -> str:
    """'an apple', 'a red apple', 'a pair of skis'; a colour may stand before it."""
    first, _, rest = name.partition(" ")
    if rest in SINGULARS and first in COLORS:
        return SINGULARS[rest].replace("of ", f"of {first} ")
    return SINGULARS.get(name) or ("an " if name[0] in "aeiou" else "a ") + name


def plural(name: str) -> str:
    """'apples', 'benches', 'people'."""
    if name in PLURALS:
        return PLURALS[name]
    return name + ("es" if name.endswith(("s", "sh", "ch", "x")) else "s")
