"""The options that trade time for memory."""

from typing import Literal

from flowrl.utils.fields import Flag, Section, Text, option


class Memory(Section):
    """What stays on the device, and in how many bits."""

    gradient_checkpointing: Flag = option(
        False,
        "Compute a block's activations again in the backward pass instead of keeping them: one "
        "more forward for each backward pass, for a fraction of the memory.",
        "on for FLUX in Sol-RL",
    )
    base_bits: Literal[4, 8] | None = option(
        None,
        "Keep the frozen weights of the transformer in 4 or 8 bits; null keeps them in "
        "pipeline.dtype. Adapters are not rounded. Rollouts, training and this run's evaluations "
        "all use the rounded weights.",
    )
    base_library: Literal["bitsandbytes", "torchao"] = option(
        "bitsandbytes",
        "With base_bits: who keeps and multiplies them. bitsandbytes has NF4 and LLM.int8, on GPUs "
        "alone; torchao has 8 bits, on CPUs too.",
    )
    text_encoders: Literal["keep", "offload", "free"] = option(
        "keep",
        "Between uses: keep the text encoders on the device, offload them to the CPU, or free them "
        "for good once every prompt of the run is encoded.",
    )
    vae: Literal["keep", "offload"] = option(
        "keep",
        "Between uses: keep the autoencoder on the device, or offload it to the CPU. Objectives "
        "that follow the reward's gradient keep it anyway.",
    )
    prompt_cache: Text | None = option(
        None,
        "A folder in which encoded prompts are kept between runs; null keeps them in memory only. "
        "With text_encoders: free and every prompt in it, the text encoders are not even loaded.",
    )
