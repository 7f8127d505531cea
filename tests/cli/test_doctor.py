from flowrl.cli.info import examine


def test_only_needed_packages_that_are_missing_or_old_are_problems(monkeypatch):
    wanted = ["flowrl-none>=2", "pydantic>=99", "typer>=0.1", 'wandb>=99; extra == "wandb"']
    monkeypatch.setattr("importlib.metadata.requires", lambda _: wanted)
    monkeypatch.setattr("flowrl.cli.info.OPTIONAL", {"wandb": "a tracker"})
    versions = {"pydantic": "2.9", "typer": "0.15"}
    monkeypatch.setattr("flowrl.cli.info._installed", versions.get)
    found = {result.topic: result for result in examine()}
    missing, old, optional = (found[name] for name in ("flowrl-none", "pydantic", "wandb"))
    assert missing.state == old.state == "problem" and "expected >=99" in old.detail
    assert missing.remedy == 'pip install "flowrl-none>=2"'
    assert optional.state == "missing" and "expected >=99: a tracker" in optional.detail
    assert found["packages"].detail == "typer 0.15"
