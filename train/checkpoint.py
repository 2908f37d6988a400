"""Checkpoints: everything that the next step depends on, written by Orbax.

A checkpoint of step s is a folder `checkpoints/s` with the arrays (parameters, optimiser state,
counts, the run's random key, and the reference policy where there is one) and a JSON file (the
prompt cursor and the fingerprint of the weights). Prepared weights are not stored: they are made
again, and the fingerprint says whether they came out the same.

Orbax writes into a temporary folder and renames it when all is on disk, so a run that is killed
while it saves continues from the step before. Saving blocks until then: an error in it stops the
run instead of being noticed at the next resume.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Progress:
    """The part of a checkpoint that is not arrays.

    step: training steps done.
    cursor: `PromptCursor.state()`.
    weight_hash: `weights.weight_hash` of the parameters and what was prepared from them.
    """

    step: int
    cursor: dict[str, int]
    weight_hash: str


class CheckpointFolder:
    """The checkpoints of one run. A context manager.

    Args:
      run: the run's folder.
      keep: how many are kept; older ones are deleted.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self._path = run.absolute() / FOLDER
        self._manager = ocp.CheckpointManager(
            self._path,
            item_handlers={
                "arrays": ocp.StandardCheckpointHandler(),
                "progress": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
        )

    def save(self, arrays: Any, progress: Progress) -> None:
        """Writes one checkpoint; `arrays` is any pytree. Returns when it is complete on disk.

        Raises:
          ValueError: there is a checkpoint of this step already.
          OSError and what else Orbax raises: it could not be written.
        """
        saved = self._manager.save(
            progress.step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(_named(arrays)),
                progress=ocp.args.JsonSave(
                    {"cursor": progress.cursor, "weight_hash": progress.weight_hash}
                ),
            ),
        )
        if not saved:
            raise ValueError(f"{self._path} already has a checkpoint of step {progress.step}")

    def restore(self, like: Any) -> tuple[Any, Progress]:
        """The last complete checkpoint.

        Args:
          like: a pytree of arrays or `jax.ShapeDtypeStruct`s, structured as what was saved.

        Raises:
          FileNotFoundError: there is none.
          ValueError: the arrays on disk are not those that are asked for; the message lists them.
        """
        step = self._manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"no complete checkpoint in {self._path}")
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))
            for name, leaf in _named(like).items()
        }
        self._check(step, wanted)
        found: Any = self._manager.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(wanted), progress=ocp.args.JsonRestore()
            ),
        )
        leaves = [found.arrays[name] for name in wanted]
        progress = Progress(step, found.progress["cursor"], found.progress["weight_hash"])
        return jax.tree.unflatten(jax.tree.structure(like), leaves), progress

    def _check(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        """Orbax itself would pad, cut or convert in silence."""
        metadata = self._manager.item_metadata(step)["arrays"]
        found = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in metadata.items()}
        asked = {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
        if found != asked:
            names = sorted(n for n in found.keys() | asked.keys() if found.get(n) != asked.get(n))
            lines = [f"  {n}: on disk {found.get(n)}, this run {asked.get(n)}" for n in names]
            raise ValueError(
                f"the checkpoint of step {step} in {self._path} is of another run:\n"
                + "\n".join(lines)
            )

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> "CheckpointFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their path; flat, so that no library has to rebuild our classes."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
