import socket

import pytest

from flowrl.cli import info as doctor
from flowrl.cli.info import examine, healthy


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def find(results, topic):
    return next(result for result in results if result.topic == topic)


def test_it_looks_at_versions_device_and_data_without_network(no_network):
    results = examine()
    topics = [result.topic for result in results]
    assert {"python", "torch", "diffusers", "cpu", "cuda", "presets"} <= set(topics)
    assert len(topics) == len(set(topics))
    assert find(results, "torch").state == "ok"
    for result in results:
        assert result.state == "ok" or result.remedy, result


def test_only_needed_packages_that_are_missing_old_or_double_are_problems(monkeypatch):
    monkeypatch.setitem(doctor.NEEDED, "flowrl-no-such-package", "nothing")
    monkeypatch.setattr(doctor, "OPTIONAL", {"flowrl-no-such-option": ("hue", "colour")})
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda _: ["pydantic>=99", 'wandb; extra == "wandb"']
    )
    results = examine()
    missing, old = find(results, "flowrl-no-such-package"), find(results, "pydantic")
    assert missing.state == old.state == "problem" and "expected >=99" in old.detail
    assert missing.remedy == 'pip install "flowrl-no-such-package"'
    optional = find(results, "flowrl-no-such-option")
    assert (optional.state, optional.detail) == ("missing", "optional: colour")
    assert healthy([optional]) and not healthy([optional, old]) and not healthy(results)
    monkeypatch.setattr(doctor, "_installed", lambda package: "5.0")
    assert find(examine(), "opencv").state == "problem"  # two builds
