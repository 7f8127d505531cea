"""Prompts chosen by a memory of how often each one succeeded: the prompt book.

A group teaches nothing where all its images succeed or all fail. The book remembers both of every
prompt, and `at` prefers those whose next group is likely to be mixed, or gives rare successes a
larger group. Adaptive choice changes what is raised: the mean reward over the images of the chosen
prompts, in place of that over all.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from operator import mul
from typing import Annotated, Any, Literal

from pydantic import Field

from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.utils.fields import Count, NonNegative, Number, Options, option

STATES = range(3)  # of a prompt's images, those that succeed: none, some or all
NONE, SOME, ALL = STATES
MEMORY = 0.95  # share of counted transitions that remains after an iteration; 0.9 to 0.99 in DPS
UNCHOSEN = 0.05  # share of the prompts that are taken as without a book: each is seen at times
IDLE_DECAY = 0.98  # share of a prompt's counts that remains after an iteration without it
SOLVED = 0.75  # rate of success above which sGPO leaves a prompt out
HOPELESS_CHANCE = 0.1  # with which a prompt enters that even the largest group may never solve
Matrix = list[list[float]]  # 3 x 3, [to][from]

VADE = "VADE, arXiv 2511.18902"
DPS = "DPS, arXiv 2603.10887"
SGPO = "sGPO, arXiv 2606.08854"
ROLLOUT_GDRO = "Rollout-GDRO, arXiv 2601.19280"
Share = Annotated[NonNegative, Field(le=1)]


class BookOptions(Options):
    """What is remembered of each prompt, and how prompts are chosen by it."""

    choose: Literal["thompson", "predictive", "uniform"] = option(
        "thompson",
        "thompson draws each prompt's rate of success p from its Beta distribution and takes the "
        "largest p (1 - p); predictive takes the prompts whose next group most likely has both "
        "successes and failures, by transitions between none, some and all; uniform chooses as "
        "without a book, which only remembers.",
        f"thompson: {VADE}; predictive: {DPS}",
    )
    success: Number = option(
        0.5, "An image succeeds if its trained reward, the weighted sum, is at least this."
    )
    decay: Share = option(
        0.8,
        "Share of a prompt's counts that remains after an iteration that drew it: the policy has "
        "learned from it since. After any other iteration 0.98 of them remain.",
        f"two decays in {VADE}, which does not say their values",
    )
    largest_group: Count | None = option(
        None,
        "Groups of several sizes, rollout.group_size times 1, 2, 4, ... and at most this. Each of "
        "the iteration's prompts_per_iteration places is rollout.group_size images; a prompt takes "
        "1, 2, 4, ... of them, which are one group. null is one size.",
        f"2 to 8 images in {SGPO}",
    )
    sizes: Literal["success", "spread"] = option(
        "success",
        "With largest_group, for a prompt whose images succeed at a rate p. success: 1 / p images, "
        "so that one is expected to succeed; left out are prompts with p above 0.75, and 9 of 10 "
        "of those that would need more than the largest group. spread: in proportion to "
        "sqrt(p (1 - p)), the largest group at p = 1/2.",
        f"success: {SGPO}, which counts p once, before training; spread: {ROLLOUT_GDRO}, whose "
        "bandit tends to it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is remembered of one prompt at the end of the iteration that drew it last."""

    successes: float = 0.0  # images, faded by the decays
    failures: float = 0.0
    total: float = 0.0  # of their rewards, faded alike
    draws: int = 0  # groups of this prompt
    last: int = -1  # iteration
    state: int | None = None  # of its images then, one of STATES

    def at(self, iteration: int) -> tuple[float, float, float]:
        """Return successes, failures and total, faded until an iteration begins."""
        fade = IDLE_DECAY ** max(iteration - self.last - 1, 0)
        return fade * self.successes, fade * self.failures, fade * self.total


NOTHING = Memory()


class PromptBook(PromptSampler):
    """Chooses the prompts of an iteration as a function of its number and what was remembered.

    Every process tells its book the same scores of all processes' images, so that all books are
    equal. Kinds of prompts take turns as without a book: it chooses within each.
    """

    def __init__(self, *args: Any, options: BookOptions, group_size: int = 1, **kwargs: Any):
        """Take the arguments of a `PromptSampler`, and its errors, beside `options`.

        group_size: images of a place among the prompts of an iteration.
        """
        super().__init__(*args, **kwargs)
        self.options, self.group_size = options, group_size
        self.records = [p for kind in dict.fromkeys(self.round) for p in self.kinds[kind]]
        self._memories: dict[str, Memory] = {}  # by uid, of prompts that were scored
        self._moves: Matrix = [[1.0] * 3 for _ in STATES]  # transitions, counted from one each
        self._choices: dict[int, list[PromptRecord]] = {}  # of the iteration that was chosen last

    # --- choosing ---------------------------------------------------------------------------

    def at(self, iteration: int) -> list[PromptRecord]:
        """Return the prompts of the iteration after the last one that was told.

        With `largest_group` a prompt stands there once for each place that its group takes.
        """
        plain = super().at(iteration)
        if self.options.choose == "uniform" and self.options.largest_group is None:
            return plain
        if iteration not in self._choices:
            self._choices = {iteration: self._choose(iteration, plain)}
        return self._choices[iteration]

    def _choose(self, iteration: int, plain: Sequence[PromptRecord]) -> list[PromptRecord]:
        stream, worth = self._stream_of(iteration, "choice"), self.worth(iteration)
        sizes = self.sizes(iteration)
        places: dict[str, list[int]] = defaultdict(list)  # to fill, by kind
        chosen: dict[int, PromptRecord] = {}
        for place, record in enumerate(plain):
            if stream.random() < UNCHOSEN:
                chosen[place] = record
            else:
                turn = iteration * self.per_iteration + place
                places[self.round[turn % len(self.round)]].append(place)
        uses = Counter(record.uid for record in chosen.values())
        for kind, free in places.items():
            # Equally good ones, as all are in the beginning, in random order. Those that are left
            # out come last, for kinds with too few others.
            rank = {
                p.uid: (uses[p.uid], not sizes[p.uid], -worth[p.uid], stream.random())
                for p in self.kinds[kind]
            }
            best = sorted(self.kinds[kind], key=lambda p, rank=rank: rank[p.uid])
            chosen |= zip(free, cycle(p for p in best for _ in range(sizes[p.uid] or 1)))
        return [chosen[place] for place in range(len(plain))]

    def sizes(self, iteration: int) -> dict[str, int]:
        """Return by uid how many places the group of each prompt takes; 0: it is left out.

        By success: sGPO (2606.08854) has p from 8 images and lets few prompts with p = 0 enter.
        Here p is the mean of a Beta distribution, never 0, and as hopeless are those whose 1 / p is
        beyond the largest group. By spread: sizes in proportion to the standard deviation estimate
        all groups' means best, which is what the bandit of Rollout-GDRO (2601.19280) tends to. The
        last prompt that is chosen takes the places that are left.
        """
        largest, sizes = self.options.largest_group, {p.uid: 1 for p in self.records}
        if largest is None:
            return sizes
        most = int(math.log2(largest / self.group_size))
        stream, by_spread = self._stream_of(iteration, "sizes"), self.options.sizes == "spread"
        for uid in sizes:
            rate, chance = self.rate(uid, iteration), stream.random()
            images = 2 * largest * math.sqrt(rate * (1 - rate)) if by_spread else 1 / rate
            doublings = max(round(math.log2(images / self.group_size)), 0)
            enters = rate <= SOLVED and (doublings <= most or chance < HOPELESS_CHANCE)
            sizes[uid] = 2 ** min(doublings, most) if enters or by_spread else 0
        return sizes

    def groups(self, iteration: int) -> list[PromptRecord]:
        """Return the prompt of each group of an iteration, by the number of the group."""
        chosen = self.at(iteration)
        once = {p.uid: p for p in chosen}  # with `largest_group` its places are one group
        return chosen if self.options.largest_group is None else list(once.values())

    def rate(self, uid: str, iteration: int) -> float:
        """Return a prompt's rate of success, the mean of its Beta distribution."""
        successes, failures, _ = self._memory(uid, iteration)
        return (1 + successes) / (2 + successes + failures)

    def worth(self, iteration: int) -> dict[str, float]:
        """Return by uid how much the next group of each prompt promises to teach."""
        if self.options.choose == "predictive":
            powers = self._powers(iteration)
            return {p.uid: self._belief(p.uid, iteration, powers)[SOME] for p in self.records}
        if self.options.choose == "uniform":
            return {p.uid: 0.0 for p in self.records}
        stream, worth = self._stream_of(iteration, "rates"), {}
        for record in self.records:
            successes, failures, _ = self._memory(record.uid, iteration)
            rate = stream.betavariate(1 + successes, 1 + failures)
            worth[record.uid] = rate * (1 - rate)
        return worth

    def _stream_of(self, iteration: int, role: str) -> random.Random:
        return random.Random(f"{self.seed}/book/{iteration}/{role}")

    def _memory(self, uid: str, iteration: int) -> tuple[float, float, float]:
        return self._memories.get(uid, NOTHING).at(iteration)

    # --- remembering ------------------------------------------------------------------------

    def tell(self, iteration: int, group: Sequence[int], reward: Sequence[float]) -> None:
        """Remember an iteration's images, those of all processes, once it was learned from.

        Args:
            group: (G,), the place of each image's prompt in `groups(iteration)`.
            reward: (G,), the trained reward, NaN where there is none.
        """
        o, chosen = self.options, self.groups(iteration)
        rewards: dict[str, list[float]] = defaultdict(list)
        for place, score in zip(group, reward, strict=True):
            if not math.isnan(score):
                rewards[chosen[place].uid].append(score)
        draws, memories = Counter(record.uid for record in chosen), {}
        for uid, scores in rewards.items():
            successes, failures, total = self._memory(uid, iteration)
            right = sum(score >= o.success for score in scores)
            memories[uid] = Memory(
                successes=o.decay * (successes + right),
                failures=o.decay * (failures + len(scores) - right),
                total=o.decay * (total + sum(scores)),
                draws=self._memories.get(uid, NOTHING).draws + draws[uid],
                last=iteration,
                state=ALL if right == len(scores) else SOME if right else NONE,
            )
        if o.choose == "predictive":
            self._count_moves(iteration, {uid: m.state for uid, m in memories.items()})
        self._memories |= memories

    def estimates(self, iteration: int) -> list[tuple[float, float]]:
        """Return what is expected of each of `groups(iteration)`: its mean reward, and failures.

        The mean counts one image of the mean of all prompts, which is all that is remembered of a
        new one. Failures are their share, by the mean of the Beta distribution.
        """
        every = [m.at(iteration) for m in self._memories.values()]
        images = sum(successes + failures for successes, failures, _ in every)
        mean = sum(total for *_, total in every) / images if images else 0.0
        rows = []
        for record in self.groups(iteration):
            successes, failures, total = self._memory(record.uid, iteration)
            count = successes + failures
            rows.append(((total + mean) / (count + 1), (1 + failures) / (count + 2)))
        return rows

    def metrics(self, iteration: int) -> dict[str, float]:
        """Return what the book says after an iteration; docs/metrics.md says what each means."""
        draws = [self._memories.get(p.uid, NOTHING).draws for p in self.records]
        total, drawn = sum(draws), [count for count in draws if count]
        entropy = -sum(count / total * math.log(count / total) for count in drawn)
        rates = [self.rate(p.uid, iteration + 1) for p in self.records]
        return {
            "book/success": sum(rates) / len(rates),
            "book/drawn": len(drawn) / len(draws),
            "book/entropy": entropy / math.log(max(len(draws), 2)),
        }

    def state_dict(self) -> dict[str, Any]:
        memories = {uid: asdict(memory) for uid, memory in self._memories.items()}
        return {"memories": memories, "moves": self._moves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._memories = {uid: Memory(**memory) for uid, memory in state["memories"].items()}
        self._moves = state["moves"]
        self._choices.clear()

    # --- transitions between none, some and all: a forward filter, DPS (2603.10887) ------------

    def transition(self) -> Matrix:
        """Return Phi, the chance of each state after each, the mean of its Dirichlet columns."""
        sums = [sum(row[j] for row in self._moves) for j in STATES]
        return [[self._moves[i][j] / sums[j] for j in STATES] for i in STATES]

    def _powers(self, most: int) -> list[Matrix]:
        """Return Phi to the power of 0 to `most`."""
        phi, powers = self.transition(), [[[float(i == j) for j in STATES] for i in STATES]]
        for _ in range(most):
            columns = list(zip(*powers[-1], strict=True))
            powers.append([[sum(map(mul, row, column)) for column in columns] for row in phi])
        return powers

    def _belief(self, uid: str, iteration: int, powers: Sequence[Matrix]) -> list[float]:
        """Return the chance of each state of a prompt's group in an iteration.

        From the state when it was drawn last, which was seen; a new prompt began in any of them.
        """
        memory = self._memories.get(uid, NOTHING)
        if memory.state is None:
            return [sum(row) / 3 for row in powers[iteration]]
        return [row[memory.state] for row in powers[max(iteration - memory.last, 0)]]

    def _count_moves(self, iteration: int, states: Mapping[str, int | None]) -> None:
        """Fade the counted transitions, and add the chances of those that led to `states`."""
        phi, powers = self.transition(), self._powers(iteration)
        counts = [[MEMORY * count + 1 - MEMORY for count in row] for row in self._moves]
        for uid, state in states.items():
            if iteration == 0 or state is None:  # nothing was before
                continue
            before = self._belief(uid, iteration - 1, powers)
            chances = [phi[state][j] * before[j] for j in STATES]
            for j in STATES:
                counts[state][j] += chances[j] / sum(chances)
        self._moves = counts
