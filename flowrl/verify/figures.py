"""What all checks share: a result with a figure, and how far two tensors are apart."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flowrl.errors import CheckResult, UserError


def passed(topic: str, detail: str) -> CheckResult:
    return CheckResult(topic=topic, state="ok", detail=detail)


def failed(topic: str, detail: str, remedy: str) -> CheckResult:
    return CheckResult(topic=topic, state="problem", detail=detail, remedy=remedy)


def unsure(topic: str, detail: str, remedy: str = "") -> CheckResult:
    return CheckResult(topic=topic, state="warning", detail=detail, remedy=remedy)


def judged(topic: str, holds: bool, detail: str, remedy: str) -> CheckResult:
    """Return "ok" where the fact holds, else a problem with what to do."""
    return passed(topic, detail) if holds else failed(topic, detail, remedy)


def guarded(topic: str, check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    """Yield a check's results; what it raises, as a user's own code may, is one more problem."""
    try:
        yield from check()
    except UserError as error:
        yield failed(topic, str(error), "")
    except Exception as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        yield failed(topic, detail, "Correct that; --debug shows where it happens.")


def distance(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, 0 for equal tensors and inf beside NaN."""
    found, expected = found.double(), expected.double()
    if torch.equal(found, expected):
        return 0.0
    relative = (found - expected).norm() / expected.norm().clamp(min=1e-30)
    return relative.item() if relative.isfinite() else float("inf")


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors, 0 where one is 0."""
    a, b = a.double().flatten(), b.double().flatten()
    return (a @ b / (a.norm() * b.norm()).clamp(min=1e-30)).item()
