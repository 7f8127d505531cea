"""Low-bit arithmetic: formats, which layers stay exact, kernels, and the low-bit rollout model."""
