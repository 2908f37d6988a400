"""How `jax.vmap` runs a custom call whose operands have a leading axis of rows.

The batch becomes more rows, so one custom call does the whole batch. An operand that is shared by
all rows (a norm's weight) stays as it is; where it is batched too, the batch is a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def batching_rule(run: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the batching rule (size, batched, *operands) -> (results, which are batched) of
    `run`, a custom_vmap function of arrays.

    A batch without elements never reaches the rule, which could not tell from it how many rows an
    element has: its results are empty.
    """

    def register(rule):
        @run.def_vmap
        def batch(size, batched, *operands):
            if size > 0:
                return rule(size, batched, *operands)
            element = jax.eval_shape(
                run,
                *(
                    jax.ShapeDtypeStruct(x.shape[1:] if is_batched else x.shape, x.dtype)
                    for x, is_batched in zip(operands, batched, strict=True)
                ),
            )
            empty = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), element)
            return empty, jax.tree.map(lambda _: True, empty)

        return rule

    return register


def over_rows(function: Callable[..., Any], shared: Sequence[int] = ()) -> Callable[..., Any]:
    """`function` with a batching rule that folds the batch into the rows.

    Every operand but those whose positions are in `shared`, and every result, has a leading axis
    of rows. A row's result may depend on that row and the shared operands alone.
    """

    @custom_vmap
    def run(*operands):
        return function(*operands)

    @batching_rule(run)
    def _(size, batched, *operands):
        if any(batched[i] for i in shared):
            results = loop(run, batched, operands)
        else:
            rows = [i for i in range(len(operands)) if i not in shared]
            folded = fold(size, [batched[i] for i in rows], [operands[i] for i in rows])
            arguments = list(operands)
            for i, operand in zip(rows, folded, strict=True):
                arguments[i] = operand
            results = unfold(size, run(*arguments))
        return results, jax.tree.map(lambda _: True, results)

    return run


def broadcast(size: int, batched: Sequence[bool], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Operands [B, ...], those that are not batched repeated for every element of the batch."""
    return [
        operand if is_batched else jnp.broadcast_to(operand, (size, *operand.shape))
        for operand, is_batched in zip(operands, batched, strict=True)
    ]


def first_rows(size: int, rows: int) -> jax.Array:
    """int32 [B]: where each element's rows begin once the batch is folded into the rows.

    Raises ValueError where an int32 could not say so.
    """
    if size * rows >= 2**31:
        raise ValueError(
            f"vmap over {size} elements of {rows} rows: row indices pass 2^31; use lax.map"
        )
    return jnp.arange(size, dtype=jnp.int32) * jnp.int32(rows)


def merge(x: jax.Array) -> jax.Array:
    """x [B, rows, ...] as [B * rows, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def fold(size: int, batched: Sequence[bool], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Operands [B, rows, ...], or [rows, ...] where not batched, as [B * rows, ...]."""
    return [merge(x) for x in broadcast(size, batched, operands)]


def unfold(size: int, results: Any) -> Any:
    """Results [B * rows, ...] as [B, rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), results)


def loop(function: Callable[..., Any], batched: Sequence[bool], operands: Sequence[Any]) -> Any:
    """The results of `function` on each element of the batch in turn."""
    mapped = [x for x, is_batched in zip(operands, batched, strict=True) if is_batched]

    def one(elements):
        left = iter(elements)
        return function(*(next(left) if b else x for x, b in zip(operands, batched, strict=True)))

    return jax.lax.map(one, mapped)
