from flowrl.cli import info as doctor
from flowrl.cli.info import examine, healthy


def find(results, topic):
    return next(result for result in results if result.topic == topic)


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
