"""How messages are built: the wrong code, why it is wrong, the right code; and all bad leaves in one message."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType
from typing import Any

# Keywords of optax, DeepSpeed, FSDP2 and the Hugging Face Trainer, and what they are here.
SYNONYMS = {
    "learning_rate": "lr",
    "b1": "betas",
    "b2": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "epsilon": "eps",
    "adam_epsilon": "eps",
    "wd": "weight_decay",
    "mu_dtype": "state_dtype",
    "max_grad_norm": "max_norm",
    "clip_norm": "max_norm",
    "every_k_schedule": "every",
    "gradient_accumulation_steps": "every",
    "steps": "every",
    "loss_scale": "scale",
    "dtype": "param_dtype",
    "compute_dtype": "param_dtype",
    "process_group": "mesh",
    "group": "mesh",
}


def explain(wrong: str, why: str, right: str) -> str:
    """One message in the project's form.

    Examples:
        >>> print(explain("adam(lr=-1)", "a learning rate is not negative", "adam(lr=1e-3)"))
        adam(lr=-1)
          why:   a learning rate is not negative
          write: adam(lr=1e-3)
    """
    indent = "\n         "
    return f"{wrong}\n  why:   {why.replace(chr(10), indent)}\n  write: {right.replace(chr(10), indent)}"


def bad_leaves(what: str, leaves: Iterable[tuple[str, str]], right: str) -> str:
    """A message that lists every offending leaf with its path.

    Examples:
        >>> print(bad_leaves("muon is for matrices", [("bias", "of shape (3,)")], "zf.partition(...)"))
        muon is for matrices
          bias: of shape (3,)
          write: zf.partition(...)
    """
    rows = "\n".join(f"  {path or '<root>'}: {reason}" for path, reason in leaves)
    return f"{what}\n{rows}\n  write: {right}"


def users_line() -> int:
    """The `stacklevel` with which a warning given by the caller names a line of the user's.

    That is the first line outside of zerofn, of torch (whose decorators lie in between), and of the package that calls
    this. Functions cannot be counted instead: `Checkpoints.load` calls `zf.load`, and a pipeline calls a transform's
    `init_fn`.
    """
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    # `__main__` is the user's program.
    passed = {"zerofn", "torch", _package_of(frame)} - {"__main__"}
    while frame is not None and _package_of(frame) in passed:
        level, frame = level + 1, frame.f_back
    return level


def _package_of(frame: FrameType | None) -> str:
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]


def kind_of(x: Any) -> str:
    """The type of `x`, with an article.

    Examples:
        >>> kind_of("3"), kind_of(3), kind_of(OSError())
        ('a str', 'an int', 'an OSError')
    """
    name = type(x).__name__
    return f"a{'n' * (name[0] in 'aeiouAEIO')} {name}"


def unknown_keyword(function: str, given: str, known: Iterable[str]) -> str:
    """The message for an unknown keyword, with a hint by synonym first and by spelling second.

    Examples:
        >>> unknown_keyword("adam", "learning_rate", ["lr", "betas"])
        "adam() has no keyword 'learning_rate'. Did you mean lr=? It takes: lr, betas."
    """
    known = list(known)
    hint = SYNONYMS.get(given)
    if hint not in known:
        close = get_close_matches(given, known, n=1)
        hint = close[0] if close else None
    tail = f" Did you mean {hint}=?" if hint else ""
    return f"{function}() has no keyword {given!r}.{tail} It takes: {', '.join(known) or 'nothing'}."
