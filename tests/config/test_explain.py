"""What an option means."""

from flowrl.config import Config
from flowrl.config.explain import default_text, explain
from flowrl.config.messages import walk
from flowrl.config.yaml12 import load_yaml


def test_explain_says_meaning_type_default_and_source():
    text = explain("learning_rate")
    assert text.startswith("optim.lr\n")
    for part in ("number, above 0", "0.0003", "Flow-GRPO"):
        assert part in text


def test_every_option_has_a_meaning_and_a_default_that_a_recipe_takes():
    options = list(walk(Config))
    assert all(option.meaning.strip() for option in options)
    assert len(explain().splitlines()) == len(Config.model_fields)
    for option in options:
        assert option.required or load_yaml(default_text(option)) is not ...
    for path in sorted({option.path for option in options})[::20]:  # each takes time
        assert path in explain(path) or path.replace(".0", "") in explain(path)
