"""Copies of `offload` on streams of their own, on a device that does not exist: every access to memory is ordered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import virtual_cuda
from time_limits import limit

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(virtual_cuda.COMPILER is None, reason="no C++ compiler to build the device with"),
    # torch's own kernels for GPUs are registered there already, and the process would end.
    pytest.mark.skipif(
        (torch.version.cuda or torch.version.hip) is not None, reason="the device needs the CPU build of torch"
    ),
]
CHAINS = ["adamw", "accumulation, clip", "two", "low precision", "codes", "groups", "on the host"]
PROGRAMS = ["whole steps", "a backward that fails", "a step that fails", "two streams", "states are read and loaded"]
WITHIN = ["adamw", "low precision", "codes"]


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessPoolExecutor]:
    with virtual_cuda.processes() as pool:
        yield pool


# In each run; the others are like one of them.
OFTEN = ["adamw", "low precision", "codes", "on the host"]


def pairs(chains: list[str]) -> list[Any]:
    """Every program with every chain: with the first one, and whole steps of some, in each run."""
    return [
        pytest.param(
            chain,
            program,
            marks=pytest.mark.slow if chain != chains[0] and (program != PROGRAMS[0] or chain not in OFTEN) else (),
        )
        for chain in chains
        for program in PROGRAMS
    ]


def ask(pool: ProcessPoolExecutor, *args):
    return pool.submit(virtual_cuda.call, "ordered_streams", *args).result(timeout=limit())


def test_the_checker_finds_what_is_unordered_and_nothing_else(device):
    early = {"_read_early", "_free_early", "_host_early"}
    assert ask(device, "judged") == {name: name in early for name in (*early, "_read", "_recorded", "_host")}


@pytest.mark.parametrize(("chain", "program"), pairs(CHAINS))
def test_every_access_is_ordered_and_nothing_stays_on_the_device(device, chain, program):
    unordered, kept, copies = ask(device, "offloaded", chain, program, False)
    assert unordered == [] and kept == 0
    assert copies or chain == "on the host"


@pytest.mark.parametrize(("chain", "program"), pairs(WITHIN))
def test_within_backward(device, chain, program):
    unordered, kept, copies = ask(device, "offloaded", chain, program, True)
    assert unordered == [] and kept == 0 and copies


@pytest.mark.parametrize(("program", "within"), [("a backward that fails", True), ("a step that fails", False)])
def test_the_checker_finds_a_copy_that_is_forgotten(device, program, within):
    unordered, _, _ = ask(device, "offloaded", "adamw", program, within, True)
    assert unordered and "freed by" in unordered[0]
