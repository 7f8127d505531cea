import socket

import pytest

from flowrl.cli import info as doctor
from flowrl.cli.info import examine, healthy
from flowrl.errors import CheckResult


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


def test_whatever_is_missing_comes_with_a_way_to_get_it():
    for finding in examine():
        assert finding.state == "ok" or finding.remedy, finding


def test_a_package_that_is_not_there_is_a_problem(monkeypatch):
    monkeypatch.setitem(doctor.NEEDED, "flowrl-no-such-package", "nothing")
    findings = examine()
    missing = find(findings, "flowrl-no-such-package")
    assert missing.state == "problem"
    assert missing.remedy == 'pip install "flowrl-no-such-package"'
    assert not healthy(findings)


def test_a_version_outside_the_range_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["pydantic>=99", 'wandb; extra == "wandb"'])
    finding = find(examine(), "pydantic")
    assert finding.state == "problem"
    assert "expected >=99" in finding.detail


def test_an_optional_package_that_is_not_there_is_no_problem(monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"flowrl-no-such-package": ("hue", "colour")})
    finding = find(examine(), "flowrl-no-such-package")
    assert (finding.state, finding.detail) == ("missing", "optional: colour")
    assert healthy([finding])


def test_another_folder_named_rewards_is_found(monkeypatch, tmp_path):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "rewards", raising=False)
    finding = find(examine(), "rewards")
    assert finding.state == "problem"
    assert str(tmp_path) in finding.detail


def test_two_builds_of_opencv_are_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda package: "5.0")
    assert find(examine(), "opencv").state == "problem"


def test_only_problems_make_a_machine_unfit():
    fine = CheckResult(topic="a", state="missing", detail="")
    assert healthy([fine])
    assert not healthy([fine, CheckResult(topic="b", state="problem", detail="")])
