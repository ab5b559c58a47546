"""Weights and inputs of 8-bit floating-point numbers with scales (W8A8, as DeepSeek-V3 and Qwen release theirs)."""
