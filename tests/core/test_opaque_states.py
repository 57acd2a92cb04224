"""States of guests in classes that trees do not look into: refused where they have tensors, and fine without any."""

import functools
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, SimpleNamespace

import optree
import pytest
import torch
from torch import nn

import zerofn as zf
from zerofn.extend import flatten


@dataclass
class Kept:
    before: dict


@dataclass
class Known:
    before: dict


class Slotted:
    __slots__ = ("before",)

    def __init__(self, before):
        self.before = before


class Plain:
    """No tensor in it; it lies inside itself."""

    def __init__(self, before):
        self.words, self.itself, self.made_by = ["a", 1], self, torch.clone


class Kind(Enum):
    ONE = 1


class Drift:
    """Gradients, and half of the way that parameters have gone since the last step."""

    def __init__(self, wrap, unwrap=None, clone=False):
        self.wrap, self.unwrap, self.clone = wrap, unwrap or (lambda state: state.before), clone

    def kept(self, params):
        return self.wrap({path: p.clone() if self.clone else p for path, p in params.items()})

    def init(self, params):
        return self.kept(params)

    def update(self, updates, state, params=None):
        before = self.unwrap(state)
        return {path: g + 0.5 * (params[path] - before[path]) for path, g in updates.items()}, self.kept(params)


def trained(guest, steps=3):
    model = nn.ParameterDict({"w": torch.ones(2)})
    opt = zf.attach(model, zf.chain(guest, zf.sgd(0.1)))
    for _ in range(steps):
        (model["w"] ** 2).sum().backward()
        opt.step()
        opt.zero_grad()
    return model["w"].tolist(), opt


REFUSED = {
    "dataclass": (Kept, r"a Kept, with a tensor at before\.w(?s:.*)optree\.dataclasses\.dataclass\(Kept, namespace='z"),
    "namespace": (
        lambda d: SimpleNamespace(before=d),
        r"a SimpleNamespace, with a tensor at before\.w(?s:.*)optree\.register_pytree_node\(SimpleNamespace, ",
    ),
    "proxy": (
        lambda d: MappingProxyType({"before": d}),
        r"a mappingproxy(?s:.*)write: a dict, a list, a tuple or a Na",
    ),
    "slots": (Slotted, r"a Slotted, with a tensor at before\.w(?s:.*)lambda _, parts: Slotted\(\*parts\), namespace="),
    "deep": (lambda d: (1, {"a": [Kept(d)]}), r"a Kept, with a tensor at 1\.a\.0\.before\.w"),
    "partial": (lambda d: functools.partial(print, d), r"a partial, with a tensor at 0\.w"),
    "set": (lambda d: frozenset(d.values()), r"a frozenset, with a tensor at 0"),
    "module": (lambda d: nn.Linear(1, 1), r"a Linear, with a tensor at _parameters\.weight"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_in_an_object_are_refused(kind):
    wrap, told = REFUSED[kind]
    with pytest.raises(TypeError, match=r"Drift, whose state is or has " + told):
        trained(Drift(wrap))
    with pytest.raises(TypeError, match=told):
        zf.init(zf.chain(Drift(wrap), zf.sgd(0.1)), {"w": torch.ones(2)})


def test_what_an_update_makes_is_refused_too():
    class Later(Drift):
        def init(self, params):
            return self.wrap({})

    model = nn.ParameterDict({"w": torch.ones(2)})
    opt = zf.attach(model, zf.chain(Later(Kept, lambda state: {"w": torch.zeros(2)}), zf.sgd(0.1)))
    (model["w"] ** 2).sum().backward()
    with pytest.raises(TypeError, match=r"a Kept, with a tensor at before\.w"):
        opt.step()
    assert model["w"].tolist() == [1.0, 1.0]


def test_the_code_of_the_messages():
    optree.dataclasses.dataclass(Known, namespace="zerofn")

    class Own(Slotted):
        __slots__ = ()

    optree.register_pytree_node(Own, lambda s: ((s.before,), None), lambda _, parts: Own(*parts), namespace="zerofn")

    class Names(SimpleNamespace):
        pass

    optree.register_pytree_node(
        Names,
        lambda s: (vars(s).values(), (*vars(s),)),
        lambda names, parts: Names(**dict(zip(names, parts, strict=True))),
        namespace="zerofn",
    )
    for wrap in (Known, Own, lambda d: Names(before=d)):
        for clone in (False, True):
            numbers, opt = trained(Drift(wrap, clone=clone))
            _, again = trained(Drift(wrap, clone=clone), 1)
            again.load_state_dict(opt.state_dict())
            assert flatten(again.state.transforms)[0][0].tolist() == flatten(opt.state.transforms)[0][0].tolist()
            # By hand: 1, 0.8, then less half of the way each time.
            assert numbers == pytest.approx([0.5275, 0.5275], abs=1e-6)


def test_objects_without_tensors_are_fine(tmp_path):
    def wrap(d):
        return {"before": d, "others": (Plain(d), Kind.ONE, "text", 1.5, None, True, torch.float32, range(3))}

    numbers, opt = trained(Drift(wrap, lambda state: state["before"]))
    assert numbers == pytest.approx([0.5275, 0.5275], abs=1e-6)
    opt.load_state_dict(opt.state_dict())
