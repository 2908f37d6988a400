"""GRPO for Qwen3 policies with NVFP4 forward products; `python -m train --help`."""
