"""Load what an evaluation without training needs: prompts, pipeline, LoRAs, evaluator."""

from collections.abc import Sequence
from typing import Any

from flowrl.assembly.learner import (
    ProvidedObjects,
    build_evaluated_pipeline,
    build_evaluator,
    check_unseen,
    evaluation_prompts,
)
from flowrl.backbones.lora_files import fit_lora
from flowrl.backbones.lora_formats import LoRA
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.spec import RewardSpec, check_evaluation
from flowrl.training.evaluate import Evaluator
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import announced


def held_out_prompts(config: Config, specs: Sequence[RewardSpec]) -> list[PromptRecord]:
    """Return the held-out prompts of a recipe, checked before anything is loaded.

    Raises UserError when there are none, or `evaluation` asks what they cannot give.
    """
    prompts = evaluation_prompts(config, ProvidedObjects())
    if not prompts:
        raise UserError("evaluation.prompts is null, expected held-out prompts to evaluate on")
    check_evaluation(specs, prompts)
    check_unseen(config, prompts)
    return prompts


def load_evaluator(
    config: Config,
    runtime: Runtime,
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    loras: Sequence[LoRA],
) -> tuple[Evaluator, list[LoRA]]:
    """Load the pipeline; return what evaluates it, and the LoRAs with its layers' names.

    prompts: the recipe's, at least one. Raises UserError for a LoRA that does not fit.
    """
    pipeline: Any
    with announced(f"loading {config.pipeline.path}", show=runtime.is_main):
        pipeline, texts = build_evaluated_pipeline(config, runtime, prompts)
    fitted = [fit_lora(lora, pipeline.transformer, type(pipeline)) for lora in loras]
    evaluator = build_evaluator(config, pipeline, specs, ProvidedObjects(), texts, runtime)
    assert evaluator is not None  # there are prompts
    return evaluator, fitted


def one_process(config: Config, task: str) -> Runtime:
    """Return the runtime of a single-process task. Raises UserError for several processes."""
    runtime = Runtime(device=config.pipeline.device)
    if runtime.world_size > 1:
        raise UserError(f"{task} by one process: start this without a launcher")
    return runtime
