"""Metrics over several processes."""

import json

import pytest

from flowrl.training.metrics import over_processes


class Two:
    """The runtime of a process beside another that has sent `text`."""

    world_size, rank = 2, 0

    def __init__(self, other: dict[str, tuple[float, float]]):
        self.text = json.dumps(other)

    def merge(self, texts):
        return {"000001": self.text} | texts


def test_metrics_of_processes_are_joined_by_rows_counts_and_maxima():
    other = {"loss": (4.0, 1), "tree/leaves": (3.0, 5), "a_max": (1.0, 9), "latent/norm": (4.0, 1)}
    own = {"loss": 1.0, "tree/leaves": 6.0, "a_max": 2.0, "latent/norm": 2.0}
    weights = {"loss": 3, "tree/leaves": 2, "a_max": 1, "latent/norm": 1}
    found = over_processes(own, weights, Two(other | {"policy/kl": (7.0, 2)}))  # type: ignore[arg-type]
    norm = pytest.approx(10**0.5)
    assert found == {
        "loss": 1.75, "tree/leaves": 9.0, "a_max": 2.0, "latent/norm": norm, "policy/kl": 7.0,
    }  # fmt: skip
