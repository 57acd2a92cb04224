"""Wires that make other lengths and shapes of what has come: refused by name where a state is made."""

from dataclasses import dataclass

import pytest
import torch
from refusals import Refusals
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.core.layout import make_layout  # inside: layouts of leaves that no model has
from zerofn.core.pipeline import pipeline  # inside: a chain resolved for leaves that are given
from zerofn.core.rank_agreement import misjoined, wires_over  # inside: what ranks ask each other
from zerofn.core.wires import Sharding  # inside: a wire by itself
from zerofn.extend import Group, Transform, as_it_is, over_ranks, transform
from zerofn.testing import check_transform


@dataclass(frozen=True)
class Shorter(Sharding):
    """Without the last element of each leaf."""

    def join_parts(self, rows, leaves, into=None):
        return [full[:-1] for full in super().join_parts(rows, leaves, into)]


@dataclass(frozen=True)
class FirstOnly(Sharding):
    def join_parts(self, rows, leaves, into=None):
        return super().join_parts(rows, leaves, into)[:1]


@dataclass(frozen=True)
class Flat(Sharding):
    """Its view leaves leaves flat."""

    def view(self, x, leaf):
        return super().view(x, leaf).reshape(-1)


@dataclass(frozen=True)
class Whole(Sharding):
    """It stores all of a leaf."""

    def store(self, x, leaf):
        return x.reshape(-1)


WRONG = {
    Shorter: r"weight: `join_parts` gives (23,) on rank 0, and not (24,)",
    FirstOnly: r"weight: `join_parts` gives 1 tensors of 2 leaves",
    Flat: r"weight: `view` gives (24,) on rank 0, and not (4, 6)",
    Whole: r"weight: `store` gives (24,) on rank 0, and not (12,)",
}


@transform
def wired(kind, resident=False):
    def view(layout, ranks):
        return over_ranks(kind(ranks("wired", None)), resident)

    return Transform("wired", needs="element", view_fn=view, through=as_it_is)


def tried():
    found = {}
    for kind in (Sharding, *WRONG):
        for resident in (False, True):
            tx, model = zf.chain(wired(kind, resident), zf.sgd(0.1)), nn.Linear(6, 4)
            for make in (lambda: zf.init(tx, dict(model.named_parameters())), lambda: zf.attach(model, tx)):  # noqa: B023
                try:
                    make()
                    told = ""
                except ValueError as error:
                    told = str(error)
                found.setdefault((kind.__name__, resident), []).append(told)
    return found


def test_a_wire_that_gives_other_lengths_is_refused_on_every_rank():
    """torch refused it where the model computes, in words of its own, or broadcast it."""
    first, second = zf.launch(tried, 2, timeout=limit(60))
    assert first == second
    for kind, expected in WRONG.items():
        for resident in (False, True):
            for told in first[kind.__name__, resident]:
                assert told.startswith("wired: what its wire gives does not fit its leaves\n"), told
                assert f"\n  {expected}" in told and "\n  write: join_parts that gives each leaf flat" in told
    assert all(told == "" for resident in (False, True) for told in first["Sharding", resident])


def test_wires_over_two_axes_and_leaves_of_no_elements_fit():
    def groups(function, mesh):
        return Group(mesh, 2, (mesh, 2) if function == "shard" else (mesh, 3))

    for rank in (0, 1):
        tx = zf.chain(zf.shard(rank), zf.reduce_scatter(rank), zf.sgd(0.1))
        layout, _ = make_layout({"w": torch.ones(5, 3), "e": torch.ones(0, 2), "s": torch.ones(())})
        pipe = pipeline(tx, layout, "a test", groups)
        assert len(pipe.stages) == 2 and not [row for view in pipe.stages for row in misjoined(view, layout.leaves)]


@dataclass(frozen=True)
class Strict(Sharding):
    """It looks at what it is given: gradients of its leaves, which behind another wire are shards."""

    def pack(self, grads, leaves, numels, dtype, device):
        assert [g.numel() for g in grads] == [leaf.numel for leaf in leaves] == list(numels)
        return super().pack(grads, leaves, numels, dtype, device)


def test_a_wire_behind_another_is_asked_what_it_sends_of_shards():
    sent = {}
    for rank in (0, 1):

        def groups(function, mesh, rank=rank):
            return Group(rank, 2, (0, 1) if function == "shard" else (0, 2))

        tx = zf.chain(zf.shard(rank), wired(Strict), zf.sgd(0.1))
        layout, _ = make_layout({"w": torch.ones(8, 3)})
        pipe = pipeline(tx, layout, "a test", groups)
        sent[rank] = [wires_over(pipe, view.wire.group) for view in pipe.stages]
    # Of 24 elements in fp32 half is sent of a half, or of a whole; and a flag for each leaf and rank.
    assert sent[0] == sent[1] == ["shard (48, 52)", "wired (24, 28)"]


# ---- found ----

ROWS = Refusals()


@ROWS(AssertionError, "a wire gives whole leaves", over=list(WRONG))
def one_that_joins_other_leaves(kind):
    tx = wired(kind)
    yield
    check_transform(tx)


@pytest.mark.parametrize("row", ROWS)
def test_check_transform_finds_it_in_one_process(row):
    row.check()
