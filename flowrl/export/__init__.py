"""What a run leaves: LoRA formats, the Hub, the model card, the gallery, the summary."""
