"""`ConfigReader`: takes keys out of a DeepSpeed configuration, and reports those that are left."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from .._errors import bad_leaves, explain
from .deepspeed_keys import BLOCKS, REPLACEMENTS, TUNING
from .deepspeed_values import Check


class ConfigReader:
    """A configuration from which keys are taken one by one; `close` reports what is left.

    Args:
        config: a mapping, or the path of a file.
        auto: values in the place of "auto", in the structure of the configuration or by dotted path.

    Attributes:
        left: the entries that nobody has taken, by dotted path.
        auto: the values that no "auto" has used, by dotted path.
        unfilled: paths of "auto" without a value.
        bad: paths that are refused, each with the reason.
        idle: paths of keys that have no effect.
    """

    def __init__(self, config: Any, auto: Mapping[str, Any] | None = None):
        if auto is not None and not isinstance(auto, Mapping):
            raise TypeError(f"from_deepspeed(config, auto={auto!r}): give a dict, as {{'optimizer.params.lr': 3e-4}}.")
        if isinstance(config, str | os.PathLike):
            config = _read(config)
        if not isinstance(config, Mapping):
            raise TypeError(f"from_deepspeed({type(config).__name__}): give a dict, or the path of a JSON file.")
        self.left: dict[str, Any] = dict(_leaves(config, ""))
        self.auto: dict[str, Any] = dict(_leaves(auto or {}, ""))
        self.unfilled: list[str] = []
        self.bad: list[tuple[str, str]] = []
        self.idle: list[str] = []

    def take(self, path: str, default: Any = None, check: Check | None = None, needed: bool = True) -> Any:
        """Take the entry at a dotted path out; the default if it is absent, or if `check` refuses it.

        Without a default, null counts as absent; so does an "auto" without a value that is not `needed`.
        """
        if path not in self.left:
            return default
        value = self.left.pop(path)
        if isinstance(value, str) and value == "auto":
            if path not in self.auto:
                if needed:
                    self.report_unfilled(path)
                return default
            value = self.auto.pop(path)
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
            head, _, name = path.rpartition(".")
            instead = next((REPLACEMENTS[p] for p in (path, *_parents(path)) if p in REPLACEMENTS), None)
            if self._off(path):
                continue
            if name in TUNING.get(head, ()):
                self.idle.append(path)
            elif instead is None:
                self.refuse(path, f"{value!r} is no block of keys" if path in BLOCKS else "unknown")
            elif (
                value is not False
                and value not in (None, "none")
                and (path, value) != ("gradient_predivide_factor", 1.0)
            ):
                self.refuse(path, f"not supported; use {instead}")
        why = "'auto' is filled in by the Hugging Face Trainer; here you give its value"
        self.bad += [(p, why) for p in self.unfilled]
        self.bad += [(p, f"auto={{{p!r}: ...}}, but the configuration has no 'auto' there") for p in self.auto]
        if self.bad:
            values = f"auto={{{', '.join(f'{p!r}: ...' for p in self.unfilled)}}}"
            advice = [f"from_deepspeed(config, {values})"] if self.unfilled else []
            if len(self.bad) > len(self.unfilled):
                advice.append("each as its line says, or the configuration without it")
            right = " and ".join(advice)
            raise ValueError(bad_leaves("from_deepspeed: keys that have no pipeline", self.bad, right))
        if self.idle:
            warnings.warn(
                f"from_deepspeed: {', '.join(self.idle)} say how DeepSpeed runs and have no effect here.", stacklevel=3
            )

    def _off(self, path: str) -> bool:
        """Whether a key is in a block that is switched off, as in many templates."""
        heads = _parents(path)
        top = path.partition(".")[0]
        if top in REPLACEMENTS and any(self.left.get(f"{head}.enabled") is False for head in heads):
            return True
        param = "zero_optimization.offload_param"
        return path.startswith(f"{param}.") and self.left.get(f"{param}.device") in (None, "none")


def _read(path: str | os.PathLike[str]) -> Any:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file, object_pairs_hook=_unique_keys)
        except ValueError as error:
            # Cut short, no text, or a key twice. The error of json does not name the file.
            name, why = os.fspath(path), f"the file cannot be read as JSON: {error}"
            right = f"python -m json.tool {name}, which shows where; or a dict"
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
