"""Whether there is a C compiler; C compilers that hang, fail or only copy, and what they have built."""

import functools
import os
import time
from pathlib import Path

import pytest
import torch

from zerofn.kernels import native as _native  # inside: how kernels are built, loaded and kept

# Of a test of a kernel in C: with ZEROFN_NATIVE=0 there is no compiler either.
needs_compiler = pytest.mark.skipif(_native.quiet_compiler() is None, reason="no C compiler")

REAL = _native.of_system(os.environ.get("PATH"))


def script(where, text, name="compiler"):
    """A compiler of our own."""
    file = where / name
    file.write_text("#!/bin/sh\n" + text + "\n")
    file.chmod(0o755)
    return str(file)


@functools.cache
def _built(where):
    """The content of a kernel of float32."""
    defines = ["-DZF_KIND=0"]
    _native.compile_to(REAL, _native._SOURCE, defines, str(where / "built"))
    return (where / "built").read_bytes()


def copier(where):
    """A compiler that builds by copying, at once, and counts its calls."""
    (where / "built").write_bytes(_built(where.parent))
    return script(where, f'echo . >> {where}/calls\nfor last; do :; done\ncp {where}/built "$last"')


def calls(where):
    """How often a `copier` has run."""
    return len((where / "calls").read_text().split()) if (where / "calls").exists() else 0


def build(command):
    """A kernel from this compiler, by way of the disk."""
    _native._build.cache_clear()
    return _native._build((command,), torch.float32)


def kept(where):
    """What lies on disk."""
    return sorted((where / "cache" / "zerofn" / "kernels").iterdir())


def gone(process):
    """Whether a process ends, or has."""
    for _ in range(100):
        try:
            if "State:\tZ" in Path(f"/proc/{process}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
