import socket
import sys

import pytest

from flowrl.cli import info as doctor
from flowrl.cli.info import examine, healthy


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def find(findings, topic):
    return next(finding for finding in findings if finding.topic == topic)


def test_it_looks_at_versions_device_and_data_without_network(no_network):
    findings = examine()
    topics = [finding.topic for finding in findings]
    assert {"python", "torch", "diffusers", "cpu", "cuda", "rewards", "presets"} <= set(topics)
    assert len(topics) == len(set(topics))
    assert find(findings, "torch").state == "ok"
    for finding in findings:
        assert finding.state == "ok" or finding.remedy, finding


def test_only_needed_packages_that_are_missing_old_or_double_are_problems(monkeypatch):
    monkeypatch.setitem(doctor.NEEDED, "flowrl-no-such-package", "nothing")
    monkeypatch.setattr(doctor, "OPTIONAL", {"flowrl-no-such-option": ("hue", "colour")})
    monkeypatch.setattr(doctor, "requires", lambda _: ["pydantic>=99", 'wandb; extra == "wandb"'])
    findings = examine()
    missing, old = find(findings, "flowrl-no-such-package"), find(findings, "pydantic")
    assert missing.state == old.state == "problem" and "expected >=99" in old.detail
    assert missing.remedy == 'pip install "flowrl-no-such-package"'
    optional = find(findings, "flowrl-no-such-option")
    assert (optional.state, optional.detail) == ("missing", "optional: colour")
    assert healthy([optional]) and not healthy([optional, old]) and not healthy(findings)
    monkeypatch.setattr(doctor, "_installed", lambda package: "5.0")
    assert find(examine(), "opencv").state == "problem"  # two builds


def test_another_folder_named_rewards_is_found(monkeypatch, tmp_path):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    finding = find(examine(), "rewards")
    assert finding.state == "problem"
    assert str(tmp_path) in finding.detail
