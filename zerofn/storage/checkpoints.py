"""`Checkpoints`: the saves of a run; keeps the newest and the best, and resumes from the newest whole one."""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .._errors import explain, users_line
from ..core.arguments import check_count, check_flag
from ..core.state import State
from ..eager.optimizer import Optimizer
from ..ranks.backend import gather_objects
from ..ranks.group import Group
from ..ranks.process_groups import join_background_threads
from . import files as _manifest
from .files import absolute_path, discard
from .loading import load
from .saving import Saving, checkpoint_group, state_of, wait_for_all_ranks, write_checkpoint

NAME = re.compile(r"step_(\d{9,})")


class Checkpoints:
    """The saves of a run, one directory for each step, `root/step_000001000`.

    Only the newest `last` saves and the `best` saves are kept. Other saves are removed once a new save is complete on
    disk. Every rank must call the same methods. Files that are not saves of this class are never removed.

    Args:
        root: the directory of all saves; it is made if it does not exist.
        last: how many of the newest saves are kept.
        best: how many more saves are kept, those with the best scores.
        largest: whether the best score is the largest, such as an accuracy; by default the smallest, such as a loss.

    Raises:
        ValueError: `last` is not a positive int, `best` is negative, `largest` is not a bool, or `root` is "".

    Examples:
        >>> import tempfile, torch, zerofn as zf
        >>> tx = zf.sgd(1.0)
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> with tempfile.TemporaryDirectory() as root:
        ...     saves = zf.Checkpoints(root, last=2, best=1)
        ...     for loss in (3.0, 1.0, 2.0, 4.0):
        ...         state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        ...         saves.save(state, score=loss)
        ...     saves.steps, saves.best, saves.load(like=zf.init(tx, {"w": torch.zeros(1)})).params
        ([2, 3, 4], 2, {'w': tensor([-4.])})
    """

    def __init__(self, root: str | os.PathLike, *, last: int = 3, best: int = 0, largest: bool = False):
        check_count("Checkpoints", "last", last, "checkpoints")
        if best != 0:
            check_count("Checkpoints", "best", best, "checkpoints")
        check_flag("Checkpoints", "largest", largest)
        # An absolute path keeps all saves of a run in one place if the process changes its working directory.
        self.root = absolute_path("zf.Checkpoints({})", root)
        self._last, self._best, self._largest = last, best, largest

    def at(self, step: int) -> Path:
        """The directory of a step, for `zf.load`."""
        return self.root / f"step_{step:09d}"

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete save, in the order of saving. Damage is found when a save is loaded."""
        return _in_order(self._saves())

    @property
    def best(self) -> int | None:
        """The step with the best score; `None` if no save has a score."""
        return next(iter(self._ranked(self._saves())), None)

    def save(self, state: State | Optimizer, *, score: Any = None, wait: bool = True) -> Saving | None:
        """Save the current step of `state`, then remove the saves that are not to be kept.

        Args:
            state: as for `zf.save`.
            score: a number for `best`, equal on all ranks; a NaN is never the best.
            wait: as for `zf.save`.

        Raises:
            TypeError: `score` is not a number.
            ValueError: ranks give different scores.
        """
        check_flag("Checkpoints.save", "wait", wait)
        step = int(state_of(state, "Checkpoints(root).save({})").step)
        if isinstance(score, Tensor) and score.numel() == 1:
            score = score.item()
        if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
            wrong, why = f"Checkpoints.save(state, score={score!r})", "checkpoints are put in order by a number"
            raise TypeError(explain(wrong, why, "score=validation_loss.item()"))
        given = None if score is None else str(float(score))  # JSON has no NaN

        def about(group: Group) -> dict[str, Any]:
            _check_equal(given, group)
            return {"order": 1 + max([save.order for save in self._saves().values()], default=0), "score": given}

        return write_checkpoint(self.at(step), state, wait, about, self._remove_old)

    def load(self, like: State | Optimizer) -> State | None:
        """Read the newest complete save into `like`, as `zf.load`.

        A save that is damaged, or was interrupted, is skipped with a warning.

        Returns:
            The state; `None` if there is no save, so that the run begins.

        Raises:
            ValueError: it is of another pipeline or model, as for `zf.load`.
        """
        placement = state_of(like, "Checkpoints(root).load(like={})", form=True).layout.placement
        join_background_threads()
        wait_for_all_ranks("Checkpoints(root).load(like=state)", placement)
        group = checkpoint_group(placement)
        steps = self.steps if group.rank == 0 else []
        if group.size > 1:
            # All ranks take the list of the first one: others may see a shared directory differently for a moment.
            steps = gather_objects(steps, group)[0]
        for step in reversed(steps):
            try:
                return load(self.at(step), like)
            except (_manifest.Damaged, FileNotFoundError) as error:
                why = str(error).splitlines()[0]
                warnings.warn(f"{why}; the one before it is tried.", RuntimeWarning, stacklevel=users_line())
        return None

    def _saves(self) -> dict[int, _Save]:
        """The saves that have a manifest, by step."""
        found = {}
        for path in self.root.iterdir() if self.root.is_dir() else ():
            name = NAME.fullmatch(path.name)
            if name and (path / _manifest.NAME).is_file():
                try:
                    about = _manifest.read(path)
                    save = _Save(about.get("order", 0), float(about.get("score") or "nan"))
                except (ValueError, OSError):
                    save = _Save(0, math.nan, readable=False)  # `load` raises and says why
                found[int(name[1])] = save
        return found

    def _ranked(self, saves: dict[int, _Save]) -> list[int]:
        """Steps in the order of their scores, the best first; of equal scores the later save comes first."""
        sign = -1 if self._largest else 1
        scored = [step for step in saves if not math.isnan(saves[step].score)]
        return sorted(scored, key=lambda step: (sign * saves[step].score, -saves[step].order))

    def _remove_old(self, group: Group) -> None:
        if group.rank:
            return
        saves = self._saves()
        kept = {*_in_order(saves)[-self._last :], *self._ranked(saves)[: self._best]}
        for step, save in saves.items():
            # A save that cannot be read stays: the disk may fail for a moment, or a newer zerofn has written it.
            if save.readable and step not in kept:
                _remove(self.at(step))


class _Save(NamedTuple):
    order: int  # counts saves. The step would not do: a run may begin again at an earlier one
    score: float  # NaN if it has none
    readable: bool = True


def _check_equal(score: str | None, group: Group) -> None:
    """Raise unless all ranks have the same score: the manifest has one. Different scores should have been averaged."""
    if group.size == 1:
        return
    scores = gather_objects(score, group)
    if len(set(scores)) > 1:
        wrong = ", ".join(f"score={x} on rank {rank}" for rank, x in zip(group.ranks, scores, strict=True))
        right = "dist.all_reduce(loss); saves.save(state, score=loss.item() / dist.get_world_size())"
        raise ValueError(explain(f"Checkpoints.save(state, {wrong})", "a save has one score, of all ranks", right))


def _in_order(saves: dict[int, _Save]) -> list[int]:
    return sorted(saves, key=lambda step: saves[step].order)


def _remove(directory: Path) -> None:
    """Remove a save, its manifest first: if this is interrupted, no checkpoint is left."""
    discard(directory / _manifest.NAME)
    _manifest.remove_files(directory, lambda name: True)
    with contextlib.suppress(OSError):  # it still has files of the user
        directory.rmdir()
