"""Qwen3 policies in Flax NNX, and their Hugging Face checkpoints."""

from models.cache import Cache
from models.config import Qwen3Config
from models.hf_checkpoint import load_hf, save_hf
from models.layers import LayerRecipes, QuantizedLayer
from models.moe import Routes, check_routes
from models.qwen3 import Output, Qwen3

__all__ = [
    "Cache",
    "LayerRecipes",
    "Output",
    "QuantizedLayer",
    "Qwen3",
    "Qwen3Config",
    "Routes",
    "check_routes",
    "load_hf",
    "save_hf",
]
