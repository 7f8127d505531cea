"""Score several LoRAs after their training, on the same prompts and noise by one pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flowrl.assembly.learner import build_rewards
from flowrl.assembly.start import runtime_to_evaluate
from flowrl.backbones.lora_files import load_lora, unload_lora
from flowrl.backbones.lora_formats import open_lora
from flowrl.config import Config
from flowrl.evaluation.loading import held_out_prompts, load_evaluator
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.spec import closing
from flowrl.training.evaluate import Evaluator
from flowrl.utils.distributed import Runtime
from scripts.arena.runs import GOLD, Run


def finish(write_page: Callable[[Path], Path], data: Path, failed: Sequence[str]) -> None:
    """Write the page of the worlds that have data; exit with 1 where a run did not finish."""
    if [*data.glob("world-*.csv")]:
        print(write_page(data))
    if failed:
        raise SystemExit(f"{len(failed)} runs did not finish: {', '.join(failed)}")


def unscored(run: Run) -> Run:
    """Return a run that trains alike and evaluates nothing."""
    return replace(run, config=run.config.changed("evaluation", prompts=None))


@contextmanager
def opened(config: Config) -> Iterator[tuple[Evaluator, Runtime]]:
    """Give what evaluates a recipe's pipeline, until the block ends."""
    runtime, specs = runtime_to_evaluate(config), build_rewards(config)
    with closing(specs):
        prompts = held_out_prompts(config, specs)
        evaluator, _ = load_evaluator(config, runtime, specs, prompts, [])
        yield evaluator, runtime


def gold_of(
    evaluator: Evaluator, runtime: Runtime, lora: Path | None = None,
    prompts: Sequence[PromptRecord] | None = None,
) -> list[float]:  # fmt: skip
    """Return the gold score of each image, of the base or of a run's LoRA.

    prompts: in place of the evaluator's, which have the same noise where only words differ.
    """
    pipeline = evaluator.backbone.pipeline
    if lora is not None:
        load_lora(pipeline, open_lora(lora))
    try:
        asked = replace(evaluator, prompts=prompts or evaluator.prompts)
        return asked(evaluator.backbone.velocity, runtime).measures()[GOLD].tolist()
    finally:
        if lora is not None:
            unload_lora(pipeline)
