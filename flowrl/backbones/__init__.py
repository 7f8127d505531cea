"""One file a model family, and what all need: loading, text cache, LoRA, offload, guidance."""
