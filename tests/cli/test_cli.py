import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.main import get_command

from flowrl import __version__
from flowrl.cli import app, main
from flowrl.config import load_config


@pytest.fixture
def built(monkeypatch):
    """Stands for everything below the command line; records how it is called."""
    calls = []
    module = ModuleType("flowrl.api")

    def align(config, *, resume, accept_changes):
        calls.extend([config, resume, accept_changes])
        return SimpleNamespace(comparisons=[], lora=None, gallery=None, card=None, stopped="")

    def record(*args, **kwargs):
        calls.append((args, kwargs))
        return [{"file": "a.png", "ocr": float("nan"), "brightness": 0.25}]

    def score(*args):
        return SimpleNamespace(rows=record(*args), missing=["reward 'ocr' does not apply"])

    module.align, module.table = align, list  # type: ignore[attr-defined]
    for name in ("sample", "evaluate", "gallery"):
        setattr(module, name, record)
    module.score = score  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flowrl.api", module)
    return calls


def test_help_lists_every_command_and_teaches_each_by_examples_uncut(flowrl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = flowrl("--help")
    assert code == 0 and "flowrl train quickstart" in out
    for command in get_command(app).commands:
        assert f" {command} " in out
        code, text, _ = flowrl(command, "--help")
        assert code == 0 and "…" not in text, command
        assert command == "doctor" or f"flowrl {command} " in text.split("Example", 1)[1]
    assert flowrl("--version")[1].strip() == f"flowrl {__version__}"


def test_train_builds_the_configuration_and_passes_on_where_to_resume(flowrl, built, tmp_path):
    step = tmp_path / "checkpoints" / "step-5"
    step.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("extends: quickstart\nrun: {seed: 3}")
    for words, resume in (
        ("quickstart run.seed=3", "auto"),
        ("quickstart run.seed=3 --resume auto", "auto"),
        ("quickstart run.seed=3 --resume latest", "latest"),
        ("--resume latest quickstart run.seed=3", "latest"),
        (f"--resume {step}", str(step)),  # a run's folder brings its own recipe
    ):
        built.clear()
        assert flowrl("train", *words.split())[0] == 0
        moved = [f"run.output_dir={tmp_path}"] if str(tmp_path) in words else []
        recipe = ["run.seed=3", *moved]
        assert built == [load_config("quickstart", recipe), resume, False], words


def test_gpus_start_the_same_command_in_as_many_processes(flowrl, built, monkeypatch):
    started = []

    def run_processes(command, count, *, cpu):
        started.append((command[3:], count, cpu))
        return 75

    monkeypatch.setattr("flowrl.utils.launching.run_processes", run_processes)
    words = ["quickstart", "run.seed=3", "--resume", "latest", "pipeline.device=cpu"]
    code, out, _ = flowrl("train", *words, "--gpus", "3")
    assert code == 75 and "Starting 3 processes, which share the CPU." in out and not built
    same = ["train", "quickstart", "run.seed=3", "pipeline.device=cpu", "--resume", "latest"]
    assert started == [(same, 3, True)]
    assert flowrl("train", *words, "--gpus", "1")[0] == 0 and built and len(started) == 1


def test_a_mistake_is_one_sentence_without_traceback(flowrl, built):
    for words, told in (
        ("train", "flowrl train quickstart"),
        ("train --resume nowhere", "no config.yaml"),
        ("train quickstart optim.lrr=3", "optim.lrr"),
        ("sample tiny-sd3", "give a prompt"),
        ("gallery", "--base"),
        ("gallery --base tiny-sd3", "--lora"),
        ("explain optim.lrr", "optim.lr?"),
        ("collect quickstart", "--groups 512"),
        ("collect quickstart", "--pairs pairs.jsonl"),
    ):
        code, out, err = flowrl(*words.split())
        assert (code, out, err.count("\n")) == (1, "", 1), words
        assert err.startswith("error: ") and told in err, words
    code, _, err = flowrl("trian", "quickstart")
    assert code == 2 and "train" in err
    assert not built


def test_an_unexpected_error_is_short_and_debug_shows_the_traceback(flowrl, built, monkeypatch):
    def fail(config, **_):
        raise RuntimeError("[red]wheels came off[/red]")

    monkeypatch.setattr(sys.modules["flowrl.api"], "align", fail)
    code, _, err = flowrl("train", "quickstart")
    assert code == 1
    assert "error: RuntimeError: [red]wheels came off[/red]\n" in err
    assert "--debug" in err and "Traceback" not in err
    for words in (["--debug", "train", "nowhere"], ["train", "nowhere", "--debug"]):
        with pytest.raises(Exception, match="There is no recipe 'nowhere'"):
            main(words)
