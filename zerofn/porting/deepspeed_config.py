"""A DeepSpeed configuration from which keys are taken one by one, and what is said of those that are left."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from .._errors import bad_leaves, explain
from .deepspeed_keys import BLOCKS, INSTEAD, TUNING
from .deepspeed_values import Check


class Reader:
    """A configuration from which keys are taken one by one, so that what is left over is known.

    Args:
        config: a mapping, or the path of a file.
        auto: what stands for "auto", in the structure of the configuration or by dotted path.
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
        # Paths of "auto" that nobody has given a value.
        self.unknown: list[str] = []
        self.bad: list[tuple[str, str]] = []
        self.idle: list[str] = []

    def take(self, path: str, default: Any = None, check: Check | None = None, needed: bool = True) -> Any:
        """The entry at a dotted path, which is then dealt with; the default where `check` has a reason against it.

        A null is as if the key were absent, where there is no default; so is an "auto" that is not `needed`.
        """
        if path not in self.left:
            return default
        value = self.left.pop(path)
        if isinstance(value, str) and value == "auto":
            if path not in self.auto:
                if needed:
                    self.ask(path)
                return default
            value = self.auto.pop(path)
        if check is not None and not (value is None is default) and (reason := check(value)):
            self.refuse(path, reason)
            return default
        return value

    def block(self, path: str) -> dict[str, Any]:
        """All entries below a path."""
        found = {k: self.take(k) for k in list(self.left) if k.startswith(path + ".")}
        return {k[len(path) + 1 :]: v for k, v in found.items()}

    def ask(self, path: str) -> None:
        """Note an "auto" that somebody must give a value, unless the value that was given is bad."""
        if path not in dict(self.bad):
            self.unknown.append(path)

    def refuse(self, path: str, reason: str) -> None:
        """Note a bad key, unless its value is asked for, which is `None` until then; `close` raises."""
        if path not in self.unknown:
            self.bad.append((path, reason))

    def close(self) -> None:
        """Raise for everything bad or left over; warn of what has no effect."""
        for path, value in self.left.items():
            head, _, name = path.rpartition(".")
            instead = next((INSTEAD[p] for p in (path, *_parents(path)) if p in INSTEAD), None)
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
        self.bad += [
            (p, "'auto' is filled in by the Hugging Face Trainer; here you give its value") for p in self.unknown
        ]
        self.bad += [(p, f"auto={{{p!r}: ...}}, but the configuration has no 'auto' there") for p in self.auto]
        if self.bad:
            values = f"auto={{{', '.join(f'{p!r}: ...' for p in self.unknown)}}}"
            asked = f"from_deepspeed(config, {values})" if self.unknown else ""
            others = "each as its line says, or the configuration without it"
            right = " and ".join(([asked] if asked else []) + ([others] if len(self.bad) > len(self.unknown) else []))
            raise ValueError(bad_leaves("from_deepspeed: keys that have no pipeline", self.bad, right))
        if self.idle:
            warnings.warn(
                f"from_deepspeed: {', '.join(self.idle)} say how DeepSpeed runs and have no effect here.", stacklevel=3
            )

    def _off(self, path: str) -> bool:
        """Whether a key belongs to a block that is switched off, as templates have them."""
        heads = _parents(path)
        top = path.partition(".")[0]
        if top in INSTEAD and any(self.left.get(f"{head}.enabled") is False for head in heads):
            return True
        param = "zero_optimization.offload_param"
        return path.startswith(f"{param}.") and self.left.get(f"{param}.device") in (None, "none")


def _read(path: str | os.PathLike[str]) -> Any:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file, object_pairs_hook=_once)
        except ValueError as error:
            # Cut short, not text, or a key twice: json does not know the name of the file.
            raise ValueError(
                explain(
                    f"from_deepspeed({os.fspath(path)!r})",
                    f"the file cannot be read as JSON: {error}",
                    f"python -m json.tool {os.fspath(path)}, which shows where; or a dict",
                )
            ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
