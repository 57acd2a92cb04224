"""The state of an attached model in force: each step puts another one in its place."""

from __future__ import annotations

from ..core.state import State
from ..core.transform import TransformState


class CurrentState:
    """Holds the state in force. Whoever needs it later keeps this, and reads `state` then.

    It refers to nothing else of the attached model, so that no cycle keeps memory of a model that is dropped.

    Attributes:
        state: set when the model's first state is made.
    """

    state: State

    def of_transform(self, name: str) -> TransformState:
        """What a transform has in it."""
        return self.state.transforms[name]
