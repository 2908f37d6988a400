"""The one file that touches the compiled module: registration of the custom calls and `call`.

Every target's operands, attributes and results are the table of custom calls in docs/design.md;
the typed wrappers stand with the ops that use them. An operand without elements is absent.

A custom call has no derivative and no batching rule of its own: ops put `jax.custom_vjp` and
`jax.custom_batching.custom_vmap` around `call`. Inside `jax.shard_map` a result varies over
every mesh axis that an operand varies over, which `call` writes into the result's type.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxfp4 import _custom_calls

_XLA_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # XLA's name for the platform that JAX lowers for
_PLATFORMS: dict[str, list[str]] = {}  # of each target

for _platform, _targets in _custom_calls.registrations().items():
    for _name, _handler in _targets.items():
        jax.ffi.register_ffi_target(_name, _handler, platform=_XLA_PLATFORMS[_platform])
        _PLATFORMS.setdefault(_name, []).append(_platform)


def match_varying(*trees: Any) -> Any:
    """The same pytrees with every array varying over the union of their manual mesh axes.

    Outside `jax.shard_map` nothing changes. Called before a `custom_vjp`, it makes autodiff sum
    the gradient of an operand that was replicated over an axis.
    """
    leaves, structure = jax.tree.flatten(trees)
    axes = frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))

    def cast(leaf):
        missing = tuple(sorted(axes - jax.typeof(leaf).manual_axis_type.varying))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    matched = structure.unflatten([cast(leaf) for leaf in leaves])
    return matched[0] if len(trees) == 1 else matched


def absent(dtype: Any) -> jax.Array:
    """The operand that stands for none of this dtype."""
    return jnp.zeros((0,), dtype)


def call(
    name: str,
    results: Sequence[tuple[tuple[int, ...], Any]],
    *operands: jax.Array,
    **attributes: Any,
) -> Sequence[jax.Array]:
    """Runs the custom call `jaxfp4_<name>`; one array for each (shape, dtype) of `results`.

    Attributes must be NumPy scalars or bools, of the width that the handler binds.
    """
    target = f"jaxfp4_{name}"
    arrays = match_varying(operands)
    for position, array in enumerate(arrays):
        if any(axis is not None for axis in jax.typeof(array).sharding.spec):
            raise NotImplementedError(
                f"operand {position} of {name} has the type {jax.typeof(array)}, sharded over "
                "Explicit mesh axes, and the op does not partition itself: call it in "
                "jax.shard_map, or make the mesh with Auto axes, where operands are gathered"
            )
    like = jax.typeof(arrays[0])
    types = [
        like.update(
            shape=shape,
            dtype=jnp.dtype(dtype),
            sharding=like.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
        )
        for shape, dtype in results
    ]

    def run(*arrays):
        return jax.ffi.ffi_call(target, types)(*arrays, **attributes)

    # Lowering for a platform that the target is not built for raises, naming the platform.
    return jax.lax.platform_dependent(*arrays, **dict.fromkeys(_PLATFORMS[target], run))
