"""`ConfigReader`: takes keys out of a DeepSpeed configuration, and reports those that are left."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from .._errors import bad_leaves, explain, users_line
from .deepspeed_arguments import Values, from_arguments, is_arguments
from .deepspeed_keys import ASIDE, BLOCKS, NEUTRAL, REPLACEMENTS, TUNING, nearest
from .deepspeed_values import Check


class ConfigReader:
    """A configuration from which keys are taken one by one; `close` reports what is left.

    Args:
        config: a mapping, or the path of a file.
        values: what stands for "auto": a mapping, in the structure of the configuration or by dotted path; or
            `TrainingArguments`.

    Attributes:
        left: the entries that nobody has taken, by dotted path.
        values: the values that no "auto" has used, by dotted path.
        lacking: of `TrainingArguments`, by path what they would have to say.
        unfilled: paths of "auto" without a value.
        bad: paths that are refused, each with the reason.
        idle: paths of keys that have no effect.
        aside: blocks that change no number, and that are written elsewhere.
    """

    def __init__(self, config: Any, values: Any = None):
        if isinstance(config, str | os.PathLike):
            config = _read(config)
        if not isinstance(config, Mapping):
            raise TypeError(f"from_deepspeed({type(config).__name__}): give a dict, or the path of a JSON file.")
        self.left: dict[str, Any] = {_renamed(path, config): x for path, x in _leaves(config, "")}
        self.unfilled: list[str] = []
        self.bad: list[tuple[str, str]] = []
        self.idle: list[str] = []
        self.aside: list[str] = []
        self.lacking: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        if is_arguments(values):
            self._match(from_arguments(values))
        elif values is None or isinstance(values, Mapping):
            self.values = dict(_leaves(values or {}, ""))
        else:
            why = f"it is a {type(values).__name__}"
            right = "a dict, as {'optimizer.params.lr': 3e-4}, or the TrainingArguments of the Hugging Face Trainer"
            raise TypeError(explain("from_deepspeed(config, values=...)", why, right))

    def _match(self, given: Values) -> None:
        """Fill in what arguments say, and refuse what they contradict, as the Trainer does."""
        self.lacking = given.lacking
        for path, (value, name, compared) in given.known.items():
            here = self.left.get(path)
            here = list(here) if isinstance(here, tuple) else here
            if here == "auto":
                self.values[path] = value
            elif compared and here is not None and here != value:
                self.bad.append((path, f"{here!r}, and {value!r} by {name} of the TrainingArguments; or write 'auto'"))

    def take(self, path: str, default: Any = None, check: Check | None = None, needed: bool = True) -> Any:
        """Take the entry at a dotted path out; the default if it is absent, or if `check` refuses it.

        Without a default, null counts as absent; so does an "auto" without a value that is not `needed`.
        """
        if path not in self.left:
            return default
        value = self.left.pop(path)
        if isinstance(value, str) and value == "auto":
            if path not in self.values:
                if needed:
                    self.report_unfilled(path)
                return default
            value = self.values.pop(path)
        if check is not None and not (value is None is default) and (reason := check(value)):
            self.refuse(path, reason)
            return default
        return value

    def block(self, path: str) -> dict[str, Any]:
        """Take all entries below a path out."""
        found = {k: self.take(k) for k in list(self.left) if k.startswith(path + ".")}
        return {k[len(path) + 1 :]: v for k, v in found.items()}

    def report_unfilled(self, path: str) -> None:
        """Report an "auto" without a value, unless its path is refused already."""
        if path not in dict(self.bad):
            self.unfilled.append(path)

    def refuse(self, path: str, reason: str) -> None:
        """Report a bad key; not one whose "auto" has no value yet, since `None` is in its place."""
        if path not in self.unfilled:
            self.bad.append((path, reason))

    def close(self) -> None:
        """Raise for all that is bad or left over; warn of keys that have no effect."""
        for path, value in self.left.items():
            self._pass_over(path, value)
        self.bad += [(p, self._auto(p)) for p in self.unfilled]
        unused = "values={{{0!r}: ...}}, but the configuration has no 'auto' there"
        self.bad += [(p, unused.format(p)) for p in self.values]
        if self.bad:
            raise ValueError(bad_leaves("from_deepspeed: keys that have no pipeline", self.bad, self._advice()))
        notes = [f"{', '.join(self.idle)} say how DeepSpeed runs and have no effect here."] if self.idle else []
        notes += [f"{head} is yours to write: {ASIDE[head]}." for head in dict.fromkeys(self.aside) if ASIDE[head]]
        if notes:
            warnings.warn(f"from_deepspeed: {' '.join(notes)}", stacklevel=users_line())

    def _pass_over(self, path: str, value: Any) -> None:
        """Settle a key that became no transform."""
        heads = (path, *_parents(path))
        block, _, name = path.rpartition(".")
        aside = next((p for p in heads if p in ASIDE), None)
        instead = next((REPLACEMENTS[p] for p in heads if p in REPLACEMENTS), None)
        if self._off(path) or path == block:
            return
        if name in TUNING.get(block, ()):
            self.idle.append(path)
        elif aside is not None:
            if ASIDE[aside] == "":
                self.idle.append(path)
            elif value not in (None, False, 0, "none"):
                self.aside.append(aside)
        elif instead is None:
            # A comment, as many people write one into JSON.
            if not name.startswith(("_", "#", "//")):
                self.refuse(path, f"{value!r} is no block of keys" if path in BLOCKS else f"unknown{nearest(path)}")
        elif value is not False and value not in (None, "none", *NEUTRAL.get(path, ())):
            self.refuse(path, f"not supported; use {instead}")

    def _auto(self, path: str) -> str:
        if path in self.lacking:
            return f"'auto'; {self.lacking[path]}"
        return "'auto' is filled in by the Hugging Face Trainer; here you give its value"

    def _advice(self) -> str:
        advice = []
        told = [p for p in self.unfilled if p not in self.lacking]
        if told:
            advice.append(f"from_deepspeed(config, values={{{', '.join(f'{p!r}: ...' for p in told)}}})")
        if len(self.bad) > len(told):
            advice.append("each as its line says, or the configuration without it")
        return " and ".join(advice)

    def _off(self, path: str) -> bool:
        """Whether a key is in a block that is switched off, as in many templates."""
        heads = _parents(path)
        top = path.partition(".")[0]
        if top in {*REPLACEMENTS, *ASIDE} and any(self.left.get(f"{head}.enabled") is False for head in heads):
            return True
        param = "zero_optimization.offload_param"
        return path.startswith(f"{param}.") and self.left.get(f"{param}.device") in (None, "none")


# DeepSpeed's older names of blocks.
OLDER = {"bfloat16": "bf16"}


def _renamed(path: str, config: Mapping[str, Any]) -> str:
    top, dot, rest = path.partition(".")
    return f"{OLDER[top]}{dot}{rest}" if top in OLDER and OLDER[top] not in config else path


def _read(path: str | os.PathLike[str]) -> Any:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file, object_pairs_hook=_unique_keys)
        except ValueError as error:
            # Cut short, no text, or a key twice. The error of json does not name the file.
            name, why = os.fspath(path), f"the file cannot be read as JSON: {error}"
            right = f"python -m json.tool {name}, which shows where (comments are none of JSON); or a dict"
            raise ValueError(explain(f"from_deepspeed({name!r})", why, right)) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [k for k, _ in pairs]
        raise ValueError(f"twice in one block: {', '.join(sorted({repr(k) for k in keys if keys.count(k) > 1}))}")
    return found


def _leaves(block: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in block.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + str(key), value))
    return found


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
