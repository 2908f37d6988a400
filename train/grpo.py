"""The policy-gradient loss of GRPO and its relatives, as pure functions of log-probs.

For token t of completion i, with rho = pi / pi_old and the completion's advantage A:

    objective = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)     PPO clip, DAPO's two ends
                for A < 0 no lower than dual_clip * A                    dual clip
                - kl_coef * KL(pi || reference)                          see kl.py
    loss      = - sum over the mask of weight * min(pi_old / pi_sampler, cap) * objective
                - entropy_coef * sum over the mask of weight * entropy

Weights, for a batch with completions i of n_i tokens:

    token-mean        1 / sum_i n_i                     DAPO
    sequence-mean     1 / (n_i * completions)           GRPO (DeepSeekMath), GSPO
    constant-length   1 / (max_length * completions)    Dr. GRPO

**The batch may be cut in any way.** What needs the whole batch is one number, `loss_normaliser`,
computed from the whole batch's mask before cutting and passed to `policy_loss` for each piece;
losses and gradients of the pieces are then *added*. Completions without a token in the mask count
neither above nor below the fraction bar, and the number is at least 1, so an empty mask gives loss
0 and gradient 0.

The mask says which tokens the loss is over and is never inferred from token ids, so padding and
end-of-sequence may share one id. What the arrays hold outside the mask has no effect.

Sources: GRPO, Shao et al. 2024 (DeepSeekMath); clip-higher and token-mean, Yu et al. 2025 (DAPO);
constant length, Liu et al. 2025 (Dr. GRPO); sequence ratio, Zheng et al. 2025 (GSPO); dual clip,
Ye et al. 2020 ("Mastering complex control in MOBA games"); truncated importance sampling, Yao et
al. 2025 ("Your efficient RL framework secretly brings you off-policy RL training").
Advantages are in advantages.py; the overlong penalty is a reward and lives with the rewards.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from train.advantages import AdvantageStd
from train.kl import Estimator, bounded_exp, kl_loss
from train.options import check, check_choice

Aggregation = Literal["token-mean", "sequence-mean", "constant-length"]
RatioLevel = Literal["token", "sequence"]
KlPlace = Literal["loss", "reward"]


def _option(name: str) -> str:
    """A field's name on the command line."""
    return f"loss.{name.replace('_', '-')}"


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is optimised. Hashable, so that it can be a static argument of jit."""

    aggregation: Aggregation = "token-mean"
    """How tokens are weighted: all alike (token-mean, DAPO), each completion alike (sequence-mean,
    GRPO), or all alike over a constant length (constant-length, Dr. GRPO)."""
    ratio: RatioLevel = "token"
    """Importance ratio of each token, or one for the whole completion (sequence, GSPO)."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped above at 1 + clip_high (DAPO's clip-higher; PPO has 0.2)."""
    dual_clip: float | None = None
    """Largest ratio that counts when the advantage is negative, above 1 + clip_high; None: no
    limit."""
    advantage_std: AdvantageStd = "group"
    """Standard deviation that divides the advantages: of the group (GRPO), of the batch, or none
    (Dr. GRPO)."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the reference model; 0: no reference model."""
    kl_estimator: Estimator = "k3"
    """Estimator of that divergence's value (the gradient is exact in expectation for all)."""
    kl_place: KlPlace = "loss"
    """Whether the divergence is added to the loss or subtracted from the reward (only k1)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    sampler_ratio_cap: float | None = None
    """Truncated importance sampling: weigh tokens by pi_old / pi_sampler up to this cap, with
    grpo.old-logprob=recompute; None: no weighting."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("aggregation", Aggregation),
            ("ratio", RatioLevel),
            ("advantage_std", AdvantageStd),
            ("kl_estimator", Estimator),
            ("kl_place", KlPlace),
        ):
            check_choice(_option(name), getattr(self, name), kind)
        self._check("clip_low", 0.0 <= self.clip_low <= 1.0, "between 0 and 1")
        self._check("clip_high", 0.0 <= self.clip_high < math.inf, "0 or more, and finite")
        self._check("kl_coef", 0.0 <= self.kl_coef < math.inf, "0 or more, and finite")
        self._check("entropy_coef", math.isfinite(self.entropy_coef), "finite")
        if self.dual_clip is not None:
            limit = 1.0 + self.clip_high
            self._check("dual_clip", limit < self.dual_clip, f"None or above {limit}")
        if self.sampler_ratio_cap is not None:
            self._check("sampler_ratio_cap", self.sampler_ratio_cap > 0.0, "None or above 0")
        if self.kl_place == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"loss.kl-estimator={self.kl_estimator!r} with loss.kl-place='reward': must be "
                "'k1' there, the gradients of the others are not those of the divergence"
            )

    def _check(self, name: str, legal: bool, rule: str) -> None:
        check(_option(name), getattr(self, name), legal, rule)


def loss_normaliser(
    mask: jax.Array, aggregation: Aggregation, *, max_length: int | None = None
) -> jax.Array:
    """The number that divides the loss of a whole batch. Compute it before cutting the batch.

    Args:
      mask: bool[N, T], the tokens that the loss is over, of the whole batch.
      aggregation: see the module's docstring.
      max_length: the constant length, in tokens (the limit on new tokens); only, and always, with
        "constant-length".

    Returns:
      f32[], at least 1.
    """
    if (max_length is None) == (aggregation == "constant-length"):
        raise ValueError(
            f"max_length={max_length} with aggregation={aggregation!r}: give it with "
            "'constant-length' and with no other"
        )
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length}: must be at least 1")
    if aggregation == "token-mean":
        total = mask.sum(dtype=jnp.float32)
    else:
        total = mask.any(axis=-1).sum(dtype=jnp.float32) * float(max_length or 1)
    return jnp.maximum(total, 1.0)


def token_weights(mask: jax.Array, aggregation: Aggregation, normaliser: jax.Array) -> jax.Array:
    """Weight of each token in the loss: f32[N, T], 0 outside the mask bool[N, T]."""
    weights = mask.astype(jnp.float32)
    if aggregation == "sequence-mean":
        weights /= jnp.maximum(weights.sum(axis=-1, keepdims=True), 1.0)
    return weights / normaliser


def importance_ratio(
    logprob: jax.Array, old_logprob: jax.Array, mask: jax.Array, level: RatioLevel
) -> jax.Array:
    """pi / pi_old of each token, with its gradient: f32[N, T].

    "sequence" is the paper's GSPO-token: every token has the value exp(mean over the mask of the
    log-ratio) and the derivative with respect to its own log-prob alone; summed over a completion
    that is the gradient of GSPO's objective. Outside the mask the ratio is 1.
    """
    log_ratio = jnp.where(mask, logprob - lax.stop_gradient(old_logprob), 0.0)
    if level == "sequence":
        tokens = jnp.maximum(mask.sum(axis=-1, keepdims=True, dtype=jnp.float32), 1.0)
        mean = lax.stop_gradient(log_ratio.sum(axis=-1, keepdims=True) / tokens)
        log_ratio = jnp.where(mask, mean + (log_ratio - lax.stop_gradient(log_ratio)), 0.0)
    return bounded_exp(log_ratio)


def clipped(ratio: jax.Array, advantages: jax.Array, config: LossConfig) -> dict[str, jax.Array]:
    """Where clipping stops the gradient: "low", "high" and "dual", bool[N, T] each.

    Args:
      ratio: f32[N, T].
      advantages: f32[N].
    """
    advantage = advantages[:, None]
    limit = jnp.inf if config.dual_clip is None else config.dual_clip
    return {
        "low": (advantage < 0.0) & (ratio < 1.0 - config.clip_low),
        "high": (advantage > 0.0) & (ratio > 1.0 + config.clip_high),
        "dual": (advantage < 0.0) & (ratio > limit),
    }


def sampler_weight(
    old_logprob: jax.Array, sampler_logprob: jax.Array, mask: jax.Array, cap: float
) -> jax.Array:
    """min(pi_old / pi_sampler, cap) of each token, f32[N, T]; 1 outside the mask, no gradient."""
    log_ratio = jnp.where(mask, old_logprob - sampler_logprob, 0.0)
    return lax.stop_gradient(jnp.where(mask, jnp.minimum(bounded_exp(log_ratio), cap), 1.0))


def policy_loss(
    logprob: jax.Array,
    *,
    old_logprob: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    normaliser: jax.Array,
    config: LossConfig,
    sampler_logprob: jax.Array | None = None,
    reference_logprob: jax.Array | None = None,
    entropy: jax.Array | None = None,
) -> jax.Array:
    """The loss of a batch, or the share that a piece of a batch has in it.

    Args:
      logprob: f32[N, T], log-probs of the tokens under the policy that is trained.
      old_logprob: f32[N, T], under the learner's policy at the start of the update (on the first
        step `stop_gradient(logprob)` itself: the ratio is then exactly 1).
      advantages: f32[N].
      mask: bool[N, T], the tokens that the loss is over.
      normaliser: f32[], `loss_normaliser` of the whole batch.
      config: the choices.
      sampler_logprob: f32[N, T], under the distribution that was sampled from; needed when
        `config.sampler_ratio_cap` is set.
      reference_logprob: f32[N, T]; needed when `config.kl_coef` > 0 and the divergence is placed
        in the loss.
      entropy: f32[N, T], of the next-token distributions, with its gradient; needed when
        `config.entropy_coef` is not 0.

    Returns:
      f32[]; the pieces' losses add up to the loss of the batch, and so do their gradients.

    Raises:
      ValueError, TypeError: while tracing, on shapes, a mask that is not bool, or an array that
        the configuration needs and that is missing.
    """
    in_loss_kl = config.kl_coef > 0.0 and config.kl_place == "loss"
    for option, needed, name, array in (
        ("sampler_ratio_cap", config.sampler_ratio_cap is not None, "sampler_logprob",
         sampler_logprob),
        ("kl_coef", in_loss_kl, "reference_logprob", reference_logprob),
        ("entropy_coef", config.entropy_coef != 0.0, "entropy", entropy),
    ):  # fmt: skip
        if needed and array is None:
            value = getattr(config, option)
            raise ValueError(f"{_option(option)}={value} needs {name}, which is None")
    _check_arrays(
        logprob, advantages, old_logprob=old_logprob, mask=mask, sampler_logprob=sampler_logprob,
        reference_logprob=reference_logprob, entropy=entropy,
    )  # fmt: skip
    weights = token_weights(mask, config.aggregation, normaliser)
    objective = _clipped_objective(logprob, old_logprob, advantages, mask, config)
    if in_loss_kl and reference_logprob is not None:
        divergence = kl_loss(
            jnp.where(mask, logprob, 0.0),
            jnp.where(mask, old_logprob, 0.0),
            jnp.where(mask, reference_logprob, 0.0),
            config.kl_estimator,
        )
        objective -= config.kl_coef * divergence
    if config.sampler_ratio_cap is not None and sampler_logprob is not None:
        objective *= sampler_weight(old_logprob, sampler_logprob, mask, config.sampler_ratio_cap)
    if config.entropy_coef != 0.0 and entropy is not None:
        objective += config.entropy_coef * entropy
    return -jnp.sum(weights * jnp.where(mask, objective, 0.0))


def _clipped_objective(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    config: LossConfig,
) -> jax.Array:
    """PPO's objective of each token with its clips, before any weighting: f32[N, T]."""
    ratio = importance_ratio(logprob, old_logprob, mask, config.ratio)
    where = clipped(ratio, advantages, config)
    # Written with `where` and not with `minimum`, which would halve the gradient at a tie.
    ratio = jnp.where(where["low"], 1.0 - config.clip_low, ratio)
    ratio = jnp.where(where["high"], 1.0 + config.clip_high, ratio)
    if config.dual_clip is not None:
        ratio = jnp.where(where["dual"], config.dual_clip, ratio)
    return ratio * lax.stop_gradient(advantages)[:, None]


def _check_arrays(logprob: jax.Array, advantages: jax.Array, **others: jax.Array | None) -> None:
    for name, array in others.items():
        if array is not None and array.shape != logprob.shape:
            raise ValueError(f"{name} has shape {array.shape}, logprob {logprob.shape}")
    mask = others["mask"]
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"mask has dtype {mask.dtype}: must be bool")
    if advantages.shape != logprob.shape[:1]:
        raise ValueError(f"advantages has shape {advantages.shape}, logprob {logprob.shape}")
