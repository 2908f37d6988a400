"""Small Qwen3 models and the padded batches that the model tests run them on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfp4
from models import Qwen3, Qwen3Config
from models.hf_checkpoint import named_tensors

DENSE = Qwen3Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.2,
)
MOE = dataclasses.replace(
    DENSE, num_hidden_layers=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32
)
# Hidden size 40, not a multiple of the 4 heads of 16: nothing may derive one from the other.
ODD_HEADS = dataclasses.replace(DENSE, hidden_size=40, head_dim=16)
QWEN2 = dataclasses.replace(DENSE, head_dim=16, qk_norm=False, qkv_bias=True)
MIXED = dataclasses.replace(
    MOE, num_hidden_layers=4, mlp_only_layers=(3,), decoder_sparse_step=2, norm_topk_prob=False
)
CONFIGS = {
    "head_dim": ODD_HEADS,
    "tied": dataclasses.replace(ODD_HEADS, tie_word_embeddings=True),
    "qwen2": QWEN2,
    "moe": MOE,
    "moe unnormalised": dataclasses.replace(MOE, norm_topk_prob=False),
    "moe mixed with dense": MIXED,
}


def build(config: Qwen3Config, policy: jaxfp4.Policy, **options) -> Qwen3:
    """A model with values that depend on a parameter's name alone, norms and biases not trivial.

    They come from NumPy, so that nothing is compiled for them.
    """
    model = nnx.eval_shape(lambda: Qwen3(config, policy, rngs=nnx.Rngs(0), **options))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        rng = np.random.default_rng(list("/".join(path).encode()))
        value = config.initializer_range * rng.standard_normal(variable.shape)
        if "norm" in path[-1]:
            value += 1
        variable.set_value(jnp.asarray(value, variable.dtype))
    return model


def parameters(model: Qwen3 | nnx.State, config: Qwen3Config) -> dict[str, np.ndarray]:
    """The parameters (or a tree of their shape) by Hugging Face name, on the host."""
    state = nnx.state(model, nnx.Param) if isinstance(model, Qwen3) else model
    return dict(named_tensors(jax.tree.map(np.asarray, state), config))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of different lengths in one padded array; padding holds illegal token ids."""

    sequences: list[np.ndarray]
    left: list[int]
    slots: int

    @property
    def start(self) -> jax.Array:
        return jnp.asarray(self.left, jnp.int32)

    @property
    def end(self) -> jax.Array:
        ends = [low + len(s) for low, s in zip(self.left, self.sequences, strict=True)]
        return jnp.asarray(ends, jnp.int32)

    @property
    def tokens(self) -> jax.Array:
        tokens = np.full((len(self.sequences), self.slots), -1, np.int32)
        for row, sequence in enumerate(self.sequences):
            tokens[row, self.left[row] : self.left[row] + len(sequence)] = sequence
        return jnp.asarray(tokens)

    def real(self, values: jax.Array) -> list[np.ndarray]:
        """values[b, t, ...] at the real tokens of each row."""
        array = np.asarray(values)
        return [
            array[row, low : low + len(sequence)]
            for row, (low, sequence) in enumerate(zip(self.left, self.sequences, strict=True))
        ]


def sequences(lengths: list[int], vocab_size: int = 97) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, vocab_size, n).astype(np.int32) for n in lengths]
