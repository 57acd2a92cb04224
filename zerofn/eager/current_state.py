"""`CurrentState` refers to the state of an attached model; each step replaces it."""

from __future__ import annotations

from .._errors import explain
from ..core.state import Fate, State, mark
from ..core.transform import TransformState


class CurrentState:
    """Holds the current state. Code that needs it later keeps this object, and reads `state` then.

    It refers to nothing else of the attached model, so that no cycle keeps memory of a model that is dropped.

    Attributes:
        state: set when the model's first state is made.
        torn: whether a step or a load raised while writing into it. Steps then raise until a state is loaded.
    """

    state: State
    torn: bool = False

    @property
    def begun(self) -> bool:
        """Whether there is a first state."""
        return hasattr(self, "state")

    def tear(self) -> None:
        """Mark the state as torn: a step or a load begins to write into it, or has raised while writing."""
        self.torn = True
        mark(self.state.micro_step, Fate.TORN)

    def check(self, where: str) -> None:
        """Raise a RuntimeError for a use of a torn state."""
        if self.torn:
            wrong = f"{where} after a step or a load that raised while it was writing into the state"
            why = "some leaves or sums have their new values, the others and the counters their old ones"
            right = "zf.load(directory, like=opt), or opt.load_state_dict(saved), to go back to what was saved;\n"
            right += "opt.load_state(opt.state) to go on from what is there"
            raise RuntimeError(explain(wrong, why, right))

    def mend(self) -> None:
        """Unmark the state: another one has been copied into its memory completely."""
        self.torn = False
        mark(self.state.micro_step, Fate.NONE)

    def of_transform(self, name: str) -> TransformState:
        """The state of one transform."""
        return self.state.arriving[name]
