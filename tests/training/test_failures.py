"""What ends a run from outside, at every phase: the sentence, the exit code and what is saved.

Each cell starts the command line's boundary in this process and injects one failure. A sample by
default; all sixty under `--slow`.
"""

import errno
import itertools
import os
import signal
from pathlib import Path
from typing import get_args

import pytest
import torch
from crashes import SMALLEST

import flowrl.api
import flowrl.export.summary
import flowrl.sampling.rollout
import flowrl.training.checkpoint
from flowrl.api import align
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import Policy
from flowrl.cli import report_errors
from flowrl.errors import CAUSES, MEMORY, Cause, PhaseName
from flowrl.objectives.grpo import GRPO
from flowrl.sampling.rollout import decode
from flowrl.scoring.scorer import SamplerFailure, Scoring
from flowrl.training.checkpoint import Checkpoints
from flowrl.training.evaluate import Evaluator
from flowrl.utils.stopping import signal_source

# Where each phase is met, and at which call from the first: in the second iteration where there
# are several, or at the evaluation after it.
PLACES = {
    "load": (flowrl.api, "build_learner", 1),
    "check": (flowrl.api, "check_before_training", 1),
    "encode": (PipelineBackbone, "encode", 3),  # two are of loading
    "rollout": (flowrl.sampling.rollout, "sample_tree", 3),
    "decode": (PipelineBackbone, "decode", 3),
    "score": (Scoring, "_answer", 3),
    "learn": (GRPO, "loss", 2),
    "save": (flowrl.training.checkpoint, "save_state", 2),
    "evaluate": (Evaluator, "_generate", 2),
    "gallery": (flowrl.export.summary, "write_gallery", 1),
}
INJECTED = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "ENOSPC": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "EPIPE": lambda: BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)),
    "HUP": signal.SIGHUP,
    "TERM": signal.SIGTERM,
    "INT": signal.SIGINT,
}
WORD: dict[str, Cause] = {"memory": "memory", "ENOSPC": "space", "EPIPE": "pipe"}
CODES = {"memory": 1, "ENOSPC": 1, "EPIPE": 141, "HUP": 129, "TERM": 143, "INT": 130}
BEFORE = ("load", "check")  # nothing is there to be saved
# Iterations that a checkpoint holds after an error, and after a signal: it lets the iteration end,
# and the base's evaluation.
WHOLE = {"encode": 0, "save": 2, "evaluate": 2, "gallery": 3}
WHOLE |= dict.fromkeys(("rollout", "decode", "score", "learn"), 1)
ASKED = WHOLE | dict.fromkeys(("rollout", "decode", "score", "learn"), 2)
CELLS = list(itertools.product(get_args(PhaseName), INJECTED))
SAMPLE = [("rollout", "memory"), ("save", "ENOSPC"), ("load", "TERM"), ("learn", "INT")]


@pytest.fixture(scope="module")
def config_for(tiny_config):
    def make(folder: Path):
        return tiny_config(
            rollout=SMALLEST,
            evaluation={
                "prompts": "tiny:colors:test",
                "num_images": 1,
                "num_inference_steps": 1,
                "every": 2,
            },
            run={"iterations": 3, "checkpoint_every": 2, "output_dir": str(folder)},
        )

    return make


@pytest.fixture(autouse=True)
def hangups():
    """Hangups end this process, as they do unless nohup has started it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def run_cell(config, folder: Path, pipeline, monkeypatch, capfd, phase: str, failure: str):
    """Run with one failure: (exit code, what was printed on stderr, iterations that are saved)."""
    (module, name, number), failing, calls = PLACES[phase], INJECTED[failure], []
    original = getattr(module, name)

    def injected(*args, **options):
        """Fail, or send a signal to this process, at one call of the function."""
        calls.append(name)
        if len(calls) == number:
            if not isinstance(failing, signal.Signals):
                raise failing()
            os.kill(os.getpid(), failing)
        return original(*args, **options)

    capfd.readouterr()
    code = 0
    with monkeypatch.context() as patch:
        patch.setattr(module, name, injected)
        try:
            report_errors(lambda: align(config, pipeline=pipeline), debug=False)
        except SystemExit as end:
            code = end.code
    assert len(calls) >= number, "the place was never met"
    steps = Checkpoints(folder, keep=2).steps()
    return code, capfd.readouterr().err, steps[-1] if steps else None


def expected(phase: PhaseName, failure: str) -> tuple[int, list[str], int | None]:
    """The exit code, words of the message, and the iterations that are saved."""
    if failure in WORD:
        cause = WORD[failure]
        name, _, remedy = CAUSES[cause]
        remedy = MEMORY[phase] if cause == "memory" else remedy
        words = [f"{name} in phase {phase}", remedy, "docs/troubleshooting.md"]
        if phase in BEFORE:
            return CODES[failure], words, None
        return CODES[failure], [*words, f"step-{WHOLE[phase]:06d}"], WHOLE[phase]
    word = signal_source(INJECTED[failure])
    if phase in BEFORE:
        return CODES[failure], [f"ended by {word} in phase {phase}"], None
    # The first texts that are encoded after loading are those of the base's evaluation.
    work = "evaluation" if phase in ("encode", "evaluate") else "iteration"
    return 0, [f"{word}: ends after this {work}"], ASKED[phase]


@pytest.mark.parametrize(
    ("phase", "failure"),
    [c if c in SAMPLE else pytest.param(*c, marks=pytest.mark.slow) for c in CELLS],
    ids=lambda value: value,
)
def test_a_failure_at_any_phase_is_told_and_what_is_whole_is_saved(
    phase, failure, config_for, load_tiny, tmp_path, monkeypatch, capfd
):
    config = config_for(tmp_path / "run")
    cell = run_cell(config, tmp_path / "run", load_tiny(), monkeypatch, capfd, phase, failure)
    code, words, saved = expected(phase, failure)
    assert cell[0] == code, cell
    assert all(word in cell[1] for word in words), (words, cell[1])
    assert cell[2] == saved, cell
    assert "Traceback" not in cell[1] and "not expected" not in cell[1]


# --- what the saved state is worth ----------------------------------------------------------------


@pytest.mark.slow
def test_a_policy_that_has_moved_within_an_iteration_is_not_saved(
    config_for, load_tiny, tmp_path, monkeypatch, capfd
):
    config = config_for(tmp_path / "run")
    # In the second iteration, when the optimizer has stepped.
    monkeypatch.setitem(PLACES, "learn", (Policy, "update_ema_and_count", 2))
    cell = run_cell(config, tmp_path / "run", load_tiny(), monkeypatch, capfd, "learn", "memory")
    assert cell[0] == 1 and cell[2] == 0, cell
    assert "Iteration 2 had begun to train and is not saved" in cell[1]
    assert "step-000000" in cell[1]


@pytest.mark.slow
def test_a_second_signal_and_a_mistake_save_what_is_whole(
    config_for, load_tiny, tmp_path, monkeypatch, capfd
):
    def twice() -> BaseException:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return AssertionError("the second one ended nothing")

    for name, make, code, words in (
        ("signals", twice, 143, "ended by SIGTERM in phase rollout"),
        ("mistake", lambda: ValueError("a bug"), 1, "ValueError: a bug"),
    ):
        folder = tmp_path / name
        monkeypatch.setitem(INJECTED, name, make)
        cell = run_cell(
            config_for(folder), folder, load_tiny(), monkeypatch, capfd, "rollout", name
        )
        assert cell[0] == code and cell[2] == 1, cell
        assert words in cell[1] and "step-000001, after 1 of 3 iterations" in cell[1]
        assert ("This was not expected" in cell[1]) == (name == "mistake")


def test_an_autoencoder_that_makes_no_numbers_of_good_latents_is_told_apart(
    make_learner, monkeypatch
):
    learner = make_learner()
    monkeypatch.setattr(
        PipelineBackbone, "decode", lambda backbone, x: torch.full((len(x), 3, 8, 8), torch.nan)
    )
    latents = torch.zeros(2, *learner.policy.backbone.latent_shape())
    with pytest.raises(SamplerFailure, match="phase decode: the autoencoder.*pipeline.dtype"):
        list(decode(learner.policy.backbone, latents, 2))
    assert len(list(decode(learner.policy.backbone, latents * torch.nan, 2))) == 1  # not its fault
