"""The state of an attached model in force: each step puts another one in its place."""

from __future__ import annotations

from .._errors import explain
from ..core.state import State
from ..core.state_fate import Fate, mark
from ..core.transform import TransformState


class CurrentState:
    """Holds the state in force. Whoever needs it later keeps this, and reads `state` then.

    It refers to nothing else of the attached model, so that no cycle keeps memory of a model that is dropped.

    Attributes:
        state: set when the model's first state is made.
        torn: whether a step or a load was writing into it when it raised. No step is made of it until one is loaded.
    """

    state: State
    torn: bool = False

    @property
    def begun(self) -> bool:
        """Whether there is a first state."""
        return hasattr(self, "state")

    def tear(self) -> None:
        """A step or a load that was writing into the state has raised, or begins to write."""
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
        """Another state has been copied into its memory, to the end."""
        self.torn = False
        mark(self.state.micro_step, Fate.NONE)

    def of_transform(self, name: str) -> TransformState:
        """What a transform has in it."""
        return self.state.transforms[name]
