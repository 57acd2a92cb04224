"""`load(strict=False)`: what fits is loaded, the pipeline makes the rest anew, and a report says which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .._errors import explain
from ..core.pipeline import Pipeline, init_transforms
from ..core.state import State
from ..core.state_entries import Entry, entries, rebuild
from ..eager.optimizer import Optimizer
from ..eager.param_groups import packed
from ..ranks.backend import gather_objects
from ..ranks.group import Group


@dataclass(frozen=True)
class Loaded:
    """What `zf.load(..., strict=False)` has done, by the names of a checkpoint: `adamw/exp_avg/blocks.0.weight`.

    Attributes:
        loaded: what was read.
        made_anew: what was not read, and why. The pipeline has made it for the parameters that were loaded; a parameter
            or a buffer among it is unchanged.
        left_out: what only the checkpoint has.
    """

    loaded: tuple[str, ...]
    made_anew: dict[str, str]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        rows = [f"loaded {len(self.loaded)} tensors and numbers"]
        rows += [f"  made anew: {key} ({why})" for key, why in self.made_anew.items()]
        return "\n".join(rows + [f"  left out: {key}" for key in self.left_out])


@dataclass
class PartialLoad:
    """Entries that do not fit, collected while a checkpoint is read.

    Attributes:
        directory: of the checkpoint, for messages.
        anew: by key, why an entry is made anew.
        left_out: keys that only the checkpoint has.
    """

    directory: Any
    anew: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def note(self, bad: list[tuple[str, str]], wanted: list[Entry]) -> None:
        """Note what to make anew. With one tensor of a leaf go all that the same transform keeps of the leaf.

        A count kept without its moments would give a bias correction for moments that are lost.
        """
        reasons = dict(bad)
        about = {e.key: (e.owner, e.path if e.of_leaf else None) for e in wanted}
        first = {about[key]: key for key in reversed(reasons) if key in about}
        for e in wanted:
            if (cause := first.get(about[e.key])) is not None:
                self.anew[e.key] = reasons.get(e.key, f"{cause} is, which belongs to it")
        self.left_out += [key for key in reasons if key not in about]

    def agree(self, group: Group) -> None:
        """Make `anew` the same on all ranks: a rank that has no element of a slot cannot see a misfit."""
        for other in gather_objects(self.anew, group):
            self.anew |= {key: why for key, why in other.items() if key not in self.anew}

    def check(self, wanted: list[Entry]) -> None:
        """Raise if none of the parameters fits: the checkpoint is of another model."""
        if all(e.key in self.anew for e in wanted if e.owner == "params"):
            wrong = f"zf.load({str(self.directory)!r}, ..., strict=False) found none of the parameters"
            rows = [f"{key}: {why}" for key, why in list(self.anew.items())[:3]]
            raise ValueError(explain(wrong, "\n".join(rows), "the checkpoint of a model with some of the same paths"))

    def state(self, like: State, pipe: Pipeline, read: Callable[[Entry], Any]) -> State:
        """What was read, and what the pipeline makes anew for these parameters."""
        if not self.anew:
            return rebuild(like, read)
        kept = lambda e: e.value.clone() if isinstance(e.value, Tensor) else e.value  # noqa: E731
        start = rebuild(like, lambda e: kept(e) if e.key in self.anew else read(e))
        made = {e.key: e.value for e in entries(replace(start, transforms=init_transforms(pipe, start.leaves)))}
        return rebuild(like, lambda e: made[e.key] if e.key in self.anew else read(e))

    def report(self, wanted: list[Entry]) -> Loaded:
        return Loaded(tuple(e.key for e in wanted if e.key not in self.anew), self.anew, tuple(self.left_out))


def groups_by_name(opt: Optimizer, saved: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The optimizer's param_groups, each with what the checkpoint has for its name."""
    if saved is None:
        return None
    known = {group["name"]: group for group in saved}
    return [known.get(group["name"], packed(group)) for group in opt._own.groups.to_save()]
