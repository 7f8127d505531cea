"""The prompt book: what it remembers, against counting; what it chooses, against enumeration."""

import json
import math
from collections import Counter
from dataclasses import asdict
from itertools import combinations, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.prompts import book as book_module
from flowrl.prompts.book import (
    ALL,
    IDLE_DECAY,
    NONE,
    SOME,
    STATES,
    BookOptions,
    Memory,
    PromptBook,
)
from flowrl.prompts.records import PromptRecord, PromptSampler

SIZE = 3  # prompts of an iteration


def records(count: int, tag: str = "a") -> list[PromptRecord]:
    return [PromptRecord(uid=f"{tag}{i}", text=str(i), metadata={"tag": tag}) for i in range(count)]


def book_of(count: int = 7, seed: int = 0, group_size: int = 2, **options) -> PromptBook:
    options = BookOptions(**options)
    return PromptBook(records(count), SIZE, seed, options=options, group_size=group_size)


def remember(book: PromptBook, counts: list[tuple[float, float]]) -> PromptBook:
    """Let the book remember (successes, failures) of its first prompts."""
    memories = {
        f"a{i}": asdict(Memory(successes=right, failures=wrong, last=0))
        for i, (right, wrong) in enumerate(counts)
    }
    book.load_state_dict(book.state_dict() | {"memories": memories})
    return book


def tell(book: PromptBook, iteration: int, groups: list[list[float]]) -> list[str]:
    """Tell a group of rewards for each group that the book chooses; return the uids of these."""
    chosen = [record.uid for record in book.groups(iteration)]
    place = [i for i, rewards in enumerate(groups) for _ in rewards]
    book.tell(iteration, place, [score for rewards in groups for score in rewards])
    return chosen


groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0, math.nan]), min_size=1, max_size=4),
    min_size=SIZE, max_size=SIZE,
)  # fmt: skip
runs = st.lists(groups, min_size=1, max_size=6)
choices = st.sampled_from(["thompson", "predictive", "uniform"])


# --- what is remembered -------------------------------------------------------------------------


@given(runs, choices)
def test_without_decay_estimates_are_frequencies_and_means_one_image_from_all(run, choose):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(book_module, "IDLE_DECAY", 1.0)
        _estimates_are_frequencies(run, choose)


def _estimates_are_frequencies(run, choose):
    book = book_of(choose=choose, decay=1)
    seen: dict[str, list[float]] = {}
    for iteration, scores in enumerate(run):
        for uid, rewards in zip(tell(book, iteration, scores), scores, strict=True):
            seen.setdefault(uid, []).extend(r for r in rewards if not math.isnan(r))
    everything = [r for rewards in seen.values() for r in rewards]
    mean = sum(everything) / len(everything) if everything else 0.0
    now = len(run)
    for record, (value, failures) in zip(book.at(now), book.estimates(now), strict=True):
        rewards = seen.get(record.uid, [])
        assert value == pytest.approx((sum(rewards) + mean) / (len(rewards) + 1))
        wrong = sum(r < 0.5 for r in rewards)
        assert failures == pytest.approx((1 + wrong) / (2 + len(rewards)))


@given(runs)
def test_without_memory_all_prompts_are_alike(run):
    book = book_of(decay=0)
    for iteration, scores in enumerate(run):
        tell(book, iteration, scores)
    assert book.worth(len(run)) == book_of().worth(len(run))
    assert set(book.estimates(len(run))) == {(0.0, 0.5)}


def test_counts_fade_by_their_own_decay_in_iterations_with_and_without_the_prompt():
    book = book_of(choose="uniform", decay=0.5)
    first = tell(book, 0, [[1.0, 1.0, 0.0]] * SIZE)
    tell(book, 1, [[1.0]] * SIZE)
    again = [record.uid for record in book.at(7)]
    faded = {
        uid: 0.5 * IDLE_DECAY**6 for uid in first
    }  # of 7 prompts, 3 an iteration: 0 and 7 share 3
    common = [uid for uid in again if uid in faded]
    assert common
    for uid, (_, failures) in zip(again, book.estimates(7), strict=True):
        if uid in common:
            assert failures == pytest.approx((1 + faded[uid]) / (2 + 3 * faded[uid]))


# --- what is chosen -----------------------------------------------------------------------------


@given(runs, st.sampled_from(["thompson", "predictive"]))
def test_the_choice_is_the_set_that_promises_most(run, choose):
    book = book_of(choose=choose)
    for iteration, scores in enumerate(run):
        tell(book, iteration, scores)
    worth = book.worth(len(run))
    most = max(sum(worth[uid] for uid in some) for some in combinations(worth, SIZE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(book_module, "UNCHOSEN", 0)
        chosen = {record.uid for record in book.at(len(run))}
    assert len(chosen) == SIZE
    assert sum(worth[uid] for uid in chosen) == pytest.approx(most)


@given(runs, choices, st.integers(0, 3))
def test_books_that_were_told_the_same_choose_the_same_and_so_does_one_read_from_a_file(
    run, choose, seed
):
    one, two = (book_of(seed=seed, choose=choose) for _ in range(2))
    for iteration, scores in enumerate(run):
        two.at(iteration + 1)  # too early: what comes before it is not scored yet
        assert tell(one, iteration, scores) == tell(two, iteration, scores)
    loaded = book_of(seed=seed, choose=choose)
    loaded.at(len(run))  # of a book that remembers nothing
    loaded.load_state_dict(json.loads(json.dumps(one.state_dict())))
    now = len(run)
    assert one.at(now) == two.at(now) == loaded.at(now)
    assert one.estimates(now) == loaded.estimates(now) and one.metrics(now) == loaded.metrics(now)
    for book in (one, loaded):
        tell(book, now, [[1.0, 0.0]] * SIZE)
    assert one.state_dict() == loaded.state_dict()


def test_solved_and_hopeless_prompts_are_left_for_those_between():
    """A third of the prompts always succeeds, a third never, and a third half of the time."""
    right = {f"a{i}": (0.0, 0.5, 1.0)[i % 3] for i in range(30)}
    shares = {}
    for choose in ("uniform", "thompson", "predictive"):
        book, mixed = book_of(30, choose=choose), 0
        for iteration in range(60):
            chosen = [right[record.uid] for record in book.at(iteration)]
            tell(book, iteration, [[float(i < 4 * share) for i in range(4)] for share in chosen])
            mixed += sum(share == 0.5 for share in chosen) if iteration >= 20 else 0
        shares[choose] = mixed / (40 * SIZE)
    assert shares["uniform"] == pytest.approx(1 / 3, abs=0.02)
    assert shares["thompson"] > 0.6 and shares["predictive"] > 0.6, shares


def test_the_share_without_choice_is_that_of_a_plain_sampler_and_starves_nobody(monkeypatch):
    plain = PromptSampler(records(7), SIZE, 0)
    assert all(book_of(choose="uniform").at(i) == plain.at(i) for i in range(9))
    monkeypatch.setattr(book_module, "UNCHOSEN", 1)
    assert all(book_of().at(i) == plain.at(i) for i in range(9))
    monkeypatch.undo()
    book, drawn = book_of(12, choose="predictive"), set()
    for iteration in range(300):  # one prompt alone is ever mixed
        chosen = [record.uid for record in book.at(iteration)]
        drawn |= set(chosen) if iteration >= 50 else set()
        tell(book, iteration, [[1.0, float(uid != "a0")] for uid in chosen])
    assert len(drawn) == 12


def test_kinds_keep_their_turns_and_nothing_repeats_that_need_not():
    prompts, weights = records(5, "a") + records(2, "b") + records(1, "c"), {"a": 2, "c": 0}
    options, kinds = BookOptions(), {"balance": "tag", "weights": weights}
    book = PromptBook(prompts, 6, 0, options=options, **kinds)
    plain = PromptSampler(prompts, 6, 0, **kinds)
    for iteration in range(9):
        chosen = book.at(iteration)
        tags = [[p.metadata["tag"] for p in those] for those in (chosen, plain.at(iteration))]
        assert tags[0] == tags[1] and len({p.uid for p in chosen}) == 6  # 4 of 5 a, and both b
        tell(book, iteration, [[1.0, 0.0]] * 6)


# --- how large groups are -----------------------------------------------------------------------


@pytest.mark.parametrize(("group_size", "doublings"), product((1, 2, 3), (1, 2, 3)))
def test_a_group_has_the_size_nearest_to_one_expected_success(group_size, doublings):
    counts, largest = list(product(range(0, 40, 3), repeat=2)), group_size * 2**doublings
    book = book_of(len(counts), group_size=group_size, largest_group=largest)
    sizes = remember(book, counts).sizes(1)
    for uid, (right, wrong) in zip(sizes, counts, strict=True):
        rate = (1 + right) / (2 + right + wrong)
        nearest = min(range(20), key=lambda k: abs(math.log(rate * group_size * 2**k)))
        hopeless = nearest > doublings
        expected = {0, 2**doublings} if hopeless else {0 if rate > 0.75 else 2**nearest}
        assert sizes[uid] in expected


@pytest.mark.parametrize(("group_size", "doublings"), product((1, 2, 3), (1, 2, 3)))
def test_by_spread_a_groups_size_is_nearest_to_the_standard_deviation(group_size, doublings):
    counts, largest = list(product(range(0, 40, 3), repeat=2)), group_size * 2**doublings
    book = book_of(len(counts), group_size=group_size, largest_group=largest, sizes="spread")
    sizes = remember(book, counts).sizes(1)
    for uid, (right, wrong) in zip(sizes, counts, strict=True):
        rate = (1 + right) / (2 + right + wrong)
        wanted = largest * math.sqrt(rate * (1 - rate)) / 0.5
        assert sizes[uid] == min(
            (2**k for k in range(doublings + 1)),
            key=lambda n: abs(math.log(n * group_size / wanted)),
        )


@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from(["thompson", "predictive"]))
def test_at_one_rate_all_groups_are_equal_and_at_a_half_chosen_as_without_sizes(a, b, choose):
    book = remember(book_of(largest_group=1000, choose=choose), [(a, b)] * 7)
    assert len(set(book.sizes(1).values())) == 1
    even, plain = (
        remember(book_of(choose=choose, largest_group=size), [(a, a)] * 7) for size in (8, None)
    )
    assert even.at(1) == plain.at(1) == even.groups(1)


def test_prompts_take_as_many_places_as_enumerated(monkeypatch):
    """Rates of 1/2, 1/4 and 1/8, one solved prompt, and one that enters with a chance of 0.1."""
    monkeypatch.setattr(book_module, "IDLE_DECAY", 1.0)
    counts = [(1, 1), (0, 2), (0, 6), (9, 0), (0, 98)]
    monkeypatch.setattr(book_module, "UNCHOSEN", 0)
    book = book_of(5, choose="uniform", largest_group=8)
    book.per_iteration, runs = 6, 4000
    remember(book, counts)
    drawn = Counter()
    for iteration in range(1, runs + 1):
        chosen = [record.uid for record in book.at(iteration)]
        assert len(chosen) == 6
        drawn.update(chosen)
    expected = Counter()
    for entering, chance in ((False, 0.9), (True, 0.1)):
        sizes = {"a0": 1, "a1": 2, "a2": 4} | ({"a4": 4} if entering else {})
        orders = list(permutations(sizes))
        for order in orders:
            taken = [uid for uid in order for _ in range(sizes[uid])][:6]
            expected.update({uid: taken.count(uid) * chance / len(orders) for uid in sizes})
    for uid in ("a0", "a1", "a2", "a3", "a4"):  # at most four a turn: a standard error of 0.02
        assert drawn[uid] / runs == pytest.approx(expected[uid], abs=0.1)
    assert drawn["a3"] == 0


def test_where_too_few_prompts_enter_those_that_were_left_out_fill_the_places():
    solved = remember(book_of(2, largest_group=8, choose="uniform"), [(40, 0)] * 2)
    assert {record.uid for record in solved.at(1)} == {"a0", "a1"} and len(solved.at(1)) == SIZE
    assert len(solved.groups(1)) == 2


def test_a_group_of_several_places_is_remembered_as_one(monkeypatch):
    monkeypatch.setattr(book_module, "IDLE_DECAY", 1.0)
    book = book_of(4, choose="uniform", decay=1, largest_group=16)
    seen: dict[str, list[float]] = {}
    for iteration in range(12):
        places = Counter(record.uid for record in book.at(iteration))
        names = [record.uid for record in book.groups(iteration)]
        assert len(set(names)) == len(names)
        groups = [[float(uid == "a1")] * (2 * places[uid]) for uid in names]
        assert tell(book, iteration, groups) == names
        for uid, rewards in zip(names, groups, strict=True):
            seen.setdefault(uid, []).extend(rewards)
    assert max(places.values()) > 1
    for uid, memory in book.state_dict()["memories"].items():
        assert memory["successes"] == sum(seen[uid])
        assert memory["successes"] + memory["failures"] == len(seen[uid])
    for record, (_, failures) in zip(book.groups(12), book.estimates(12), strict=True):
        rewards = seen[record.uid]
        assert failures == pytest.approx((1 + rewards.count(0.0)) / (2 + len(rewards)))


# --- the forward filter -------------------------------------------------------------------------

GROUPS = {NONE: [0.0, 0.0], SOME: [0.0, 1.0], ALL: [1.0, 1.0]}


def filtered(phi, start, steps: int) -> list[float]:
    """The chance of each state after so many steps, summed over all paths from all starts."""
    chances = [0.0] * 3
    for path in product(STATES, repeat=steps + 1):
        chance = start[path[0]]
        for before, after in zip(path, path[1:], strict=False):
            chance *= phi[after][before]
        chances[path[-1]] += chance
    return chances


@given(st.lists(st.lists(st.sampled_from(STATES), min_size=SIZE, max_size=SIZE), max_size=5))
def test_beliefs_are_those_of_a_forward_filter_by_enumeration(states):
    book = book_of(choose="predictive")
    seen, last = {}, {}
    for iteration, drawn_states in enumerate(states):
        phi = book.transition()
        moves = book.state_dict()["moves"]
        chosen = tell(book, iteration, [GROUPS[state] for state in drawn_states])
        expected = [[0.95 * moves[i][j] + 0.05 for j in STATES] for i in STATES]
        for uid, state in zip(chosen, drawn_states, strict=True):
            start = [float(s == seen[uid]) for s in STATES] if uid in seen else [1 / 3] * 3
            if iteration > 0:
                before = filtered(phi, start, iteration - 1 - last.get(uid, 0))
                joint = [phi[state][j] * before[j] for j in STATES]
                for j in STATES:
                    expected[state][j] += joint[j] / sum(joint)
        seen |= dict(zip(chosen, drawn_states, strict=True))
        last |= dict.fromkeys(chosen, iteration)
        for row, wanted in zip(book.state_dict()["moves"], expected, strict=True):
            assert row == pytest.approx(wanted)
    now, phi = len(states), book.transition()
    assert all(sum(phi[i][j] for i in STATES) == pytest.approx(1) for j in STATES)
    for uid, worth in book.worth(now).items():
        start = [float(s == seen[uid]) for s in STATES] if uid in seen else [1 / 3] * 3
        assert worth == pytest.approx(filtered(phi, start, now - last.get(uid, 0))[SOME])


def test_beliefs_of_prompts_that_are_not_drawn_go_to_the_stationary_law():
    book = book_of(choose="predictive")
    for iteration in range(8):
        tell(book, iteration, [GROUPS[(iteration + i) % 3] for i in range(SIZE)])
    phi, worth = book.transition(), book.worth(2000)
    law = [1 / 3] * 3
    for _ in range(2000):
        law = [sum(phi[i][j] * law[j] for j in STATES) for i in STATES]
    assert set(worth) == {f"a{i}" for i in range(7)}
    assert all(value == pytest.approx(law[SOME]) for value in worth.values())


def test_metrics_are_of_all_prompts():
    book = book_of(6, choose="uniform", decay=1)
    tell(book, 0, [[1.0, 1.0]] * SIZE)
    metrics = book.metrics(0)
    assert metrics["book/drawn"] == 0.5
    assert metrics["book/success"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert metrics["book/entropy"] == pytest.approx(math.log(3) / math.log(6))
