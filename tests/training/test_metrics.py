"""Metrics of several processes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.training.metrics import over_processes


def test_metrics_of_processes_are_joined_by_rows_counts_and_maxima():
    other = {"loss": (4.0, 1), "tree/leaves": (3.0, 5), "a_max": (1.0, 9), "latent/norm": (4.0, 1)}
    text = json.dumps(other | {"policy/kl": (7.0, 2)})
    runtime: Any = SimpleNamespace(
        world_size=2, rank=0, merge=lambda texts: {"000001": text} | texts
    )
    own = {"loss": 1.0, "tree/leaves": 6.0, "a_max": 2.0, "latent/norm": 2.0}
    weights = {"loss": 3, "tree/leaves": 2, "a_max": 1, "latent/norm": 1}
    found = over_processes(own, weights, runtime)
    norm = pytest.approx(10**0.5)
    assert found == {
        "loss": 1.75, "tree/leaves": 9.0, "a_max": 2.0, "latent/norm": norm, "policy/kl": 7.0,
    }  # fmt: skip
