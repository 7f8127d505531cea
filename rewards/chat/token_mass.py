"""What the probabilities of an answer's first token say, whatever its spelling."""

import itertools
from collections.abc import Iterable, Mapping

LEAST_MASS = 0.5
ALTERNATIVES = 20  # spellings of a token: the most that vLLM gives unless told otherwise
_SPACES = str.maketrans({"\u2581": " ", "\u0120": " ", "\u010a": " "})  # as tokenizers write them

Spellings = Iterable[tuple[str, float]]  # (token, probability), likeliest first or in any order


def spelled(token: str) -> str:
    """Return a token without white space around it, in one case: " Yes" and "YES" are "yes"."""
    return token.translate(_SPACES).strip().casefold()


def merged(first: Spellings) -> dict[str, float]:
    """Return probability of each answer, its spellings added up, likeliest first."""
    mass: dict[str, float] = {}
    for token, probability in first:
        mass[spelled(token)] = mass.get(spelled(token), 0.0) + probability
    return dict(sorted(mass.items(), key=lambda item: -item[1]))


def on(first: Spellings, accepted: Iterable[str]) -> float:
    """Return the probability that the answer is one of `accepted`."""
    mass = merged(first)
    return sum(mass.get(answer, 0.0) for answer in {spelled(a) for a in accepted})


def check_first_tokens(answers: Iterable[str]) -> None:
    """Raise ValueError when one answer is the beginning of another.

    A tokenizer may cut the longer one there, as those do that write digits one by one.
    """
    for short, long in itertools.permutations(answers, 2):
        if spelled(long).startswith(spelled(short)):
            raise ValueError(
                f"{short!r} is the beginning of {long!r}, and their first tokens may be the same: "
                "take answers that begin differently, such as letters"
            )


def expectation(first: Spellings, scores: Mapping[str, float], least: float = LEAST_MASS) -> float:
    """Return the mean score of the accepted answers.

    sum_s p_s * score_s / M, with p_s the probability of answer s and M = sum_s p_s: what all other
    tokens have is left out. Raises ValueError when M < `least`: then the question was not answered.
    """
    mass = merged(first)
    held = {answer: mass.get(spelled(answer), 0.0) for answer in scores}
    total = sum(held.values())
    if not total >= least:
        raise ValueError(
            f"only {total:.2f} of the probability lies on {', '.join(scores)}, at least {least:g} "
            f"is needed (likeliest: {', '.join(map(repr, list(mass)[:3]))}): ask for the answer "
            "alone in template, or take mode text"
        )
    return sum(p * scores[answer] for answer, p in held.items()) / total
