"""Low-precision number formats in plain torch: NVFP4, MXFP4, MXFP8 and FP8, and their layouts."""
