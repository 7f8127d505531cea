"""The options of everything but learning itself, each with its meaning and source."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flowrl.config.rollout import PRECISIONS, SOL_RL, DenoisingSteps, Precision
from flowrl.prompts.book import BookOptions
from flowrl.prompts.refiner import RefinerOptions
from flowrl.utils.fields import (
    Count,
    Flag,
    NonNegative,
    Options,
    Positive,
    Several,
    Text,
    Whole,
    option,
)

FLOW_GRPO_CODE = "Flow-GRPO's published settings"


class PipelineOptions(Options):
    """The text-to-image pipeline that is aligned."""

    path: Text = option(
        "tiny-sd3",
        "A diffusers pipeline: a folder, a Hub name, or tiny-sd3, tiny-flux or tiny-sana for the "
        "built-in ones.",
    )
    revision: Text | None = option(
        None, "Of a pipeline from the Hub: a branch, tag or commit; null is the newest."
    )
    attention: Text | None = option(
        None,
        "Who computes attention: a back end of diffusers such as native, flash or xformers; null "
        "leaves it to diffusers. Some transformers take native alone.",
    )
    compile: Flag | Literal["graphs"] = option(
        False,
        "Compile the transformer's repeated blocks with torch.compile, for this run's sampling, "
        "learning and evaluations: faster on a GPU after a first minute or two. It needs a C "
        "compiler. graphs also replays them as CUDA graphs, for batches so small that the GPU "
        "waits for the CPU; they keep the memory of activations, which flowrl plan does not count.",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Number format of the frozen weights and the network's arithmetic; adapters, step "
        "arithmetic and log-probabilities stay fp32.",
        "published recipes use fp16 or bf16, by the pipeline",
    )
    precision: Precision | None = option(
        None,
        "Number format of the frozen weights' matmuls in rollouts and training, so that both use "
        "the same policy; adapters stay beside them, and evaluations use "
        f"the exact weights. One of {PRECISIONS}; null computes in dtype alone. Choose equal "
        "rollout.batch_size and optim.micro_batch: another kernel's last bit, rounded to few, can "
        "move the ratio by whole nats.",
        "Jet-RL, arXiv 2601.14243, with fp8",
    )
    min_dim: Whole | None = option(
        None,
        "With precision, of training or of rollout.explore: layers stay exact unless the larger of "
        "their two sizes is above this; null is the backbone's.",
        f"1000 to 2432, by the network, in {SOL_RL}",
    )
    quantize_gradients: Flag = option(
        False,
        "With precision: also round the gradients that go back through its matmuls, in groups of "
        "the same format; the products are ordinary ones on every device, so that it shows what "
        "the numbers do and is not faster.",
        "Jet-RL, arXiv 2601.14243, with fp8",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        "auto", "Where to compute; auto takes cuda, then mps, then cpu."
    )
    max_sequence_length: Count = option(
        256,
        "Text tokens that the pipeline cuts prompts to. Short captions need few, and at the tiny "
        "size the text decides the cost.",
        "diffusers' own default for SD3; 12 hold every caption of the tiny world, 128 in "
        "Flow-GRPO's code",
    )
    decode_batch: Count = option(
        16,
        "Most images that go through the decoder at once. More are no faster: 96 at once took "
        "twice as long on a CPU as 16 at a time, and large images do not fit.",
    )
    height: Count | None = option(None, "Image height in pixels; null is the pipeline's own.")
    width: Count | None = option(None, "Image width in pixels; null is the pipeline's own.")


class LoRAOptions(Options):
    """The adapter that is trained."""

    rank: Count = option(16, "Rank of the update of each adapted layer.", "published: 32")
    alpha: Positive = option(
        32, "Strength: the update is scaled by alpha / rank.", f"alpha = 2 rank, {FLOW_GRPO_CODE}"
    )
    targets: Annotated[list[Text], Field(min_length=1)] | None = option(
        None,
        "Name endings of the adapted layers; null is the backbone's list.",
        f"the attention projections, {FLOW_GRPO_CODE}",
    )
    init_from: Text | None = option(
        None, "A LoRA file or folder to start from; null starts from no change."
    )


class PromptOptions(Options):
    """What is sampled in training."""

    train: Text = option(
        ...,
        "A .txt file (one prompt a line), a .jsonl, .json, .csv or .tsv file (`prompt` and "
        "metadata; FILE.csv:COLUMN names another column), or a split such as tiny:geneval:train.",
    )
    balance: Text | None = option(
        None, "A metadata key, for example tag, whose values are sampled equally often."
    )
    weights: dict[Text, Annotated[Whole, Field(le=1000)]] | None = option(
        None,
        "How often values of balance are sampled, 1 unless named: {colors: 3} samples colours "
        "three times as often as each other kind, 0 leaves a kind out; null is 1 for all.",
        "Flow-GRPO, arXiv 2505.05470: 7 position, 5 counting, 3 colour attribution, 1 colours, 1 "
        "two objects, 0 single object",
    )
    book: BookOptions | None = option(
        None,
        "Remember how often images of each prompt succeed, and choose the next prompts by it; null "
        "takes all in turn. It needs an iteration's scores before it chooses the next prompts.",
        "VADE, arXiv 2511.18902, and DPS, arXiv 2603.10887",
    )
    refiner: RefinerOptions | None = option(
        None,
        "Reword prompts, and learn by the rewards of the images which wordings are good; null "
        "encodes prompts as they are. Rewards are given the prompt's own words.",
        "PromptRL, arXiv 2602.01382",
    )
    held_out: Annotated[Positive, Field(lt=1)] | None = option(
        None,
        "Where evaluation.prompts is null: share of the requests of prompts.train that is kept "
        "out of training and evaluated on; null keeps none. The choice follows from the prompts "
        "alone. --prompts sets it to 0.1.",
    )
    allow_overlap: Flag = option(
        False,
        "Train although evaluation.prompts ask for what prompts.train asks for, too, in the same "
        "or in other words; else such a run is refused.",
    )

    @model_validator(mode="after")
    def _check(self) -> "PromptOptions":
        if self.weights is not None and self.balance is None:
            raise ValueError(
                "prompts.weights is set without prompts.balance: name the metadata key whose "
                "values it weighs, or set prompts.weights to null"
            )
        return self


StepCounts = DenoisingSteps | Annotated[list[DenoisingSteps], Field(min_length=1)]


class HeldOutOptions(Options):
    """Scores on held-out prompts, before, during and after training."""

    prompts: Text | None = option(
        None, "Held-out prompts, given like prompts.train; null is none but prompts.held_out."
    )
    num_images: Several = option(
        120,
        "Maximum images per evaluation, at most 8 per prompt. Intervals resample prompts: more "
        "prompts narrow them, more images per prompt do not.",
    )
    balance: Text | None = option(
        None, "A metadata key, for example tag, whose values are sampled equally often."
    )
    every: Whole = option(0, "Iterations between evaluations; 0 is only at the start and the end.")
    num_inference_steps: StepCounts = option(
        8,
        "Denoising steps, without noise. A list evaluates at each number of steps: at all of them "
        "at the start and the end, in between at the first, which also decides the best "
        "checkpoint. [5, 28] shows whether what 5 steps gain is there at 28.",
        "published: 40",
    )
    guidance_scale: NonNegative = option(1.0, "Guidance in evaluation, apart from the rollout's.")
    as_deployed: Flag = option(
        False,
        "Generate with the pipeline's own call, pipe(prompt, ...), hence with its own scheduler "
        "and its arithmetic in pipeline.dtype, and not with Euler steps in fp32. It "
        "starts from the same noise.",
    )
    seed: Whole = option(1234, "Seed of the initial noise, the same at every evaluation.")
    batch_size: Count = option(60, "Most images that go through the network at once.")

    @property
    def step_counts(self) -> tuple[int, ...]:
        """The numbers of denoising steps, at least one, the first of most weight."""
        steps = self.num_inference_steps
        return tuple(dict.fromkeys(steps)) if isinstance(steps, list) else (steps,)


class OnHackingOptions(Options):
    """What happens when the trained reward rises at the cost of what it does not measure."""

    held_out: Text | None = option(
        None,
        "Name of a reward that is only measured, with held_out: true, which decides what hacking "
        "is. null: the radar decides, by hacking/score, which is 0.5 where one of its detectors is "
        "at its tolerance; it needs some 100 images.",
    )
    patience: Count = option(
        3,
        "Evaluations in a row that look like hacking: with a trained reward above, and the "
        "held-out one below, what they were at the evaluation where the held-out one was best; or, "
        "without held_out, with a hacking/score above 0.5.",
    )
    action: Literal["stop", "rollback", "raise_kl", "warn"] = option(
        "stop",
        "stop ends the run with the weights it has. rollback ends it with earlier ones: with "
        "held_out those of its best evaluation; without, those of the best trained reward among "
        "evaluations whose hacking/score was at most 0.33, or the base's where there is none. "
        "raise_kl returns to those weights and trains on with a stronger penalty. warn prints a "
        "line.",
    )
    kl_coef: Positive = option(
        0.1,
        "With raise_kl: objective.kl_coef after the first time; four times as much after the "
        "second, and again after the third. The fourth time the run ends as by rollback.",
    )


class RunOptions(Options):
    """Where a run lives and how long it lasts."""

    output_dir: Text = option(
        "runs/flowrl",
        "Folder of the run. Where it holds another recipe's run, the next number is taken, as in "
        "runs/flowrl-2.",
    )
    seed: Whole = option(0, "Seed of everything random in training.")
    iterations: Count = option(200, "Rollouts to learn from.")
    max_minutes: Positive | None = option(
        None, "Stop cleanly after this many minutes of training; null is no limit."
    )
    checkpoint_every: Count = option(50, "Iterations between checkpoints; the end always saves.")
    keep_checkpoints: Count = option(
        2, "How many of the newest checkpoints to keep, besides the best."
    )
    sample_every: Whole = option(25, "Iterations between sample images; 0 is never.")
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = option(
        ["tensorboard"], "Where metrics go besides metrics.jsonl, which is always written."
    )
    push_to_hub: Flag = option(
        False, "Put the LoRA, its card and gallery on the Hub at the end of the run."
    )
    hub_model_id: Text | None = option(
        None,
        "With push_to_hub: name of the repository; one that is there stays public or private, a "
        "new one is public. null is the output folder's name.",
    )
    threads: Count | None = option(None, "CPU threads; null leaves it to torch.")
    on_hacking: OnHackingOptions | None = option(
        None,
        "Stop, roll back or raise the KL penalty when the trained reward rises while a held-out "
        "one falls, or when the images look hacked; the best checkpoint is then one before that. "
        "null is never.",
    )


class MemoryOptions(Options):
    """What stays on the device, and in how many bits."""

    gradient_checkpointing: Flag = option(
        False,
        "Compute a block's activations again in the backward pass instead of keeping them: one "
        "more forward for each backward pass, for a fraction of the memory.",
        "on for the largest network in Sol-RL",
    )
    base_bits: Literal[4, 8] | None = option(
        None,
        "Keep the frozen weights of the transformer in 4 bits (NF4 by bitsandbytes, on GPUs only) "
        "or 8 (int8 by torchao, also on CPUs); null keeps them in pipeline.dtype. Adapters are not "
        "rounded. Rollouts, training and this run's evaluations all use the rounded weights.",
    )
    text_encoders: Literal["keep", "offload", "free"] = option(
        "keep",
        "Keep the text encoders on the device beside the transformer, or encode all prompts of the "
        "run before the transformer is placed: then offload them to the CPU, where texts that come "
        "later are encoded, or free them for good.",
    )
    vae: Literal["keep", "offload"] = option(
        "keep",
        "Between uses: keep the autoencoder on the device, or offload it to the CPU. Objectives "
        "that follow the reward's gradient keep it anyway.",
    )
    vae_tiling: Flag = option(
        False,
        "Decode and encode images larger than 512 pixels a side in overlapping tiles of 512, as "
        "diffusers' enable_tiling does: less memory, and slightly other images.",
    )
    prompt_cache: Text | None = option(
        None,
        "A folder in which encoded prompts are kept between runs; null keeps them in memory only. "
        "If it has every prompt and text_encoders is free, the text encoders are not loaded.",
    )


class RuntimeOptions(Options):
    """Several processes: what they share, and when one of them counts as lost."""

    shard: Literal["node", "all"] | None = option(
        None,
        "Split the frozen transformer over the processes of a machine (node) or over all (all), "
        "with torch's FSDP2; null keeps a copy on every GPU. Slower, for networks that do not fit.",
    )
    timeout: Positive = option(
        1800.0,
        "Seconds that a process or rollout worker may keep the others waiting, for a slow reward, "
        "say. After them, and at once when a process has ended, the run saves, names the silent "
        "ones and ends with exit code 75.",
    )
