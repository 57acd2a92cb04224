"""Groups of a third party: with other names of arguments, and with an update half of their own."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from stages import FIRST
from time_limits import limit

import zerofn as zf
from zerofn.extend import Transform, transform

GRADIENT = torch.arange(1.0, 13).reshape(4, 3)


def everything(path: str) -> str:
    return "a"


@zf.leafwise(needs="leaf")
def by_norm(grad, param):
    return grad / grad.norm()


@transform
def by_kind(policies: Mapping[str, Transform], kinds: Callable[[str], str]) -> Transform:
    """`partition` with other names of arguments."""
    group = zf.partition(dict(policies), kinds)
    return replace(group, name="by_kind", named_fn=None, members_fn=_members("by_kind", group))


@transform
def halved(policies: Mapping[str, Transform], kinds: Callable[[str], str]) -> Transform:
    """`partition`, and half of what comes of it."""
    group = zf.partition(dict(policies), kinds)

    def update(grads, state, params, carry, ctx):
        out, new = group.update_fn(grads, state, params, carry, ctx)
        return {path: 0.5 * x for path, x in out.items()}, new

    return replace(group, name="halved", update_fn=update, named_fn=None, members_fn=_members("halved", group))


def _members(name: str, group: Transform):
    found = group.members_fn
    assert found is not None
    return lambda layout: {prefix.replace("partition.", f"{name}."): x for prefix, x in found(layout).items()}


def test_offload_goes_to_the_members_of_any_group() -> None:
    tx = zf.offload(by_kind({"a": zf.adamw(1e-2)}, everything))
    assert [part.members[0].parts for part in tx.parts] == [(zf.adamw(1e-2),)]

    def after_a_step(tx: Transform) -> torch.Tensor:
        state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.ones(2)}))
        return state.params["w"]

    assert torch.equal(after_a_step(zf.chain(tx)), after_a_step(zf.chain(zf.adamw(1e-2))))
    assert not torch.equal(after_a_step(zf.chain(tx)), torch.ones(2))


def step_of_halved(stage: str) -> torch.Tensor:
    tx = zf.chain(FIRST[stage](), halved({"a": by_norm()}, everything), zf.sgd(lr=1.0))
    state = zf.init(tx, {"w": torch.zeros(4, 3)})
    state, _ = zf.make_step(lambda params: (params["w"] * GRADIENT).sum(), tx)(state)
    return zf.full_params(tx, state)["w"]


@pytest.mark.parametrize("stage", FIRST)
def test_an_update_of_its_own_is_kept_where_members_need_whole_leaves(stage: str) -> None:
    expected = -0.5 * GRADIENT / GRADIENT.norm()
    torch.testing.assert_close(step_of_halved(stage), expected)
    for found in zf.launch(step_of_halved, 2, stage, timeout=limit()):
        torch.testing.assert_close(found, expected)


KINDS = {"w": "matrix", "v": "vector"}


def nested(policy: Callable, inside: Callable) -> Transform:
    """A group inside of a partition, which knows the kinds of its own leaves alone."""
    inner = inside({"matrix": zf.sgd(lr=0.1), "vector": zf.sgd(lr=0.2)}, policy)
    return zf.partition({"known": inner, "bias": zf.sgd(lr=0.5)}, lambda path: "known" if path in KINDS else "bias")


INSIDE = {
    "partition": zf.partition,
    "a chain of them": lambda of, kinds: zf.chain(
        zf.masked(zf.clip_by_value(9.0), lambda path: bool(KINDS[path])), zf.partition(of, kinds)
    ),
    "on the host": lambda of, kinds: zf.offload(zf.partition(of, kinds)),
    "two deep": lambda of, kinds: zf.partition({"all": zf.partition(of, kinds)}, lambda path: KINDS[path] and "all"),
    "of one's own": by_kind,
    "with its own update": halved,
}  # fmt: skip


def asked_of_its_own(inside: str, stage: str) -> list:
    asked: set[str] = set()

    def kinds(path: str) -> str:
        asked.add(path)
        return KINDS[path]

    tx = zf.chain(FIRST[stage](), nested(kinds, INSIDE[inside]))
    model = torch.nn.ParameterDict({name: torch.ones(2, 3) for name in ("w", "v", "c")})
    opt = zf.attach(model, tx)
    sum(p.sum() for p in model.values()).backward()
    opt.step()
    state = zf.init(tx, {name: torch.ones(2, 3) for name in ("w", "v", "c")})
    state, _ = zf.make_step(lambda params: sum(p.sum() for p in params.values()), tx)(state)
    assert asked == set(KINDS)
    with opt.gathered():
        found = [{name: p.detach().clone() for name, p in model.items()}, zf.full_params(tx, state)]
    return found


def every_group_and_stage() -> dict:
    return {(inside, stage): asked_of_its_own(inside, stage) for inside in INSIDE for stage in FIRST}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_inside_of_another_is_asked_of_its_own_leaves_alone(ranks: int) -> None:
    for of_rank in zf.launch(every_group_and_stage, ranks, timeout=limit(120)):
        for (inside, stage), found in of_rank.items():
            half = 0.5 if inside == "with its own update" else 1.0
            want = {"w": half * 0.9, "v": half * 0.8, "c": 0.5}
            for params in found:
                for name, x in params.items():
                    where = f"{inside}, {stage}: {name}"
                    torch.testing.assert_close(x, torch.full((2, 3), want[name]), msg=where)
