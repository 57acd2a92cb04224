"""What functions of a transform give that nobody could use is refused by its name, where it is given."""

import functools
import re
from collections import OrderedDict, namedtuple

import pytest
import torch
from one_launch import one_launch
from time_limits import limit

import zerofn as zf
from zerofn.extend import Facts, Prepared, Scope, Transform


def halves(grads, state, params, carry, ctx):
    return {path: g / 2 for path, g in grads.items()}, state


Pair = namedtuple("Pair", "a b")


def zeros(leaves):
    return {path: torch.zeros_like(x) for path, x in leaves.items()}


def mine(**functions):
    return Transform("mine", Scope.LEAF, "element", **{"update_fn": halves, **functions})


WRONG = {
    "prepares nothing": (
        lambda: mine(prepare_fn=lambda *_: None),
        r"prepare_fn that gives a NoneType(.|\n)*Prepared\(",
    ),
    "prepares nothing of its own": (
        lambda: mine(prepare_fn=lambda *_: None, facts=Facts(keeps=False)),
        r"prepare_fn that gives a NoneType(.|\n)*Prepared\(",
    ),
    "emits nothing": (
        lambda: mine(prepare_fn=lambda *_: Prepared(emit=None)),
        r"Prepared\(emit=None\)(.|\n)*emit is a bool(.|\n)*emit=torch.isfinite",
    ),
    "emits nothing of its own": (
        lambda: mine(prepare_fn=lambda *_: Prepared(emit=None), facts=Facts(keeps=False)),
        r"Prepared\(emit=None\)",
    ),
    "emits a number": (lambda: mine(prepare_fn=lambda *_: Prepared(emit=1)), r"Prepared\(emit=1\)"),
    "emits two": (
        lambda: mine(prepare_fn=lambda *_: Prepared(emit=torch.tensor([True, False]))),
        r"emit=<tensor of shape \(2,\), torch.bool(.|\n)*flags.all\(\)",
    ),
    "emits two of its own": (
        lambda: mine(prepare_fn=lambda *_: Prepared(emit=torch.ones(2)), facts=Facts(keeps=False)),
        r"emit=<tensor of shape \(2,\), torch.float32",
    ),
    "init of one": (
        lambda: mine(init_fn=lambda leaves: {}),
        r"init_fn\(leaves\)(.|\n)*with \(leaves, layout\)(.|\n)*def init_fn\(leaves, layout\)",
    ),
    "update of three": (
        lambda: mine(update_fn=lambda grads, state, params: (grads, state)),
        r"update_fn\(grads, state, params\)(.|\n)*def update_fn\(grads, state, params, carry, ctx\)",
    ),
    "view of one": (lambda: mine(view_fn=lambda layout: None), r"view_fn\(layout\)(.|\n)*layout, ranks"),
    "no state": (lambda: mine(init_fn=lambda leaves, _: None), r"init_fn that gives a NoneType(.|\n)*\"value\""),
    "a tuple of views": (
        lambda: mine(view_fn=lambda layout, ranks: (1, 2)),
        r"view_fn that gives a tuple(.|\n)*View\(",
    ),
    "by path itself": (lambda: mine(init_fn=lambda leaves, _: zeros(leaves)), r"by path itself(.|\n)*in a named entry"),
    "one name with a slash": (
        lambda: mine(init_fn=lambda leaves, _: {"a": {"z": torch.zeros(())}, "a/z": torch.zeros(())}),
        r"two entries of a state by the name 'a/z'",
    ),
    "a key that is no name": (
        lambda: mine(init_fn=lambda leaves, _: {"o": {0: torch.zeros(())}}),
        r"a state with the key 0(.|\n)*keys that are strings",
    ),
    "a tuple": (
        lambda: mine(init_fn=lambda leaves, _: {"o": (zeros(leaves), zeros(leaves))}),
        r"whose entry 'o' is a tuple(.|\n)*write: .*a dict",
    ),
    "a NamedTuple": (
        lambda: mine(init_fn=lambda leaves, _: {"o": {"p": Pair(zeros(leaves), zeros(leaves))}}),
        r"whose entry 'o'\['p'\] is a Pair(.|\n)*write: .*a dict",
    ),
    "a dict of another class": (
        lambda: mine(init_fn=lambda leaves, _: {"o": OrderedDict(zeros(leaves))}),
        r"whose entry 'o' is an OrderedDict(.|\n)*write: .*a dict",
    ),
    "a list of a leaf": (
        lambda: mine(init_fn=lambda leaves, _: {"o": {path: [x, x] for path, x in zeros(leaves).items()}}),
        r"whose entry 'o'\['[wb]'\] is a list(.|\n)*write: .*a dict",
    ),
    "a number of Python": (
        lambda: mine(init_fn=lambda leaves, _: {"n": 0}),
        r"whose entry 'n' is an int(.|\n)*write: torch.tensor\(0\)",
    ),
    "nothing": (lambda: mine(init_fn=lambda leaves, _: {"n": None}), r"whose entry 'n' is a NoneType"),
    "an object of its own memory": (
        lambda: mine(init_fn=lambda leaves, _: {"o": object()}, facts=Facts(keeps=False)),
        r"whose entry 'o' is an object",
    ),
    "an update that makes a tuple": (
        lambda: mine(
            init_fn=lambda leaves, _: {"o": {"m": zeros(leaves), "n": zeros(leaves)}},
            update_fn=lambda grads, state, params, carry, ctx: (grads, {"o": (state["o"]["m"], state["o"]["n"])}),
        ),
        r"whose entry 'o' is a tuple(.|\n)*write: .*a dict",
    ),
    "a number among paths": (
        lambda: mine(init_fn=lambda leaves, _: {"o": {**zeros(leaves), "count": torch.zeros(())}}),
        r"'o' has '[wb]' beside 'count'(.|\n)*'count' in an entry of its own",
    ),
    "a number by the path of a leaf": (
        lambda: mine(init_fn=lambda leaves, _: {"o": {"m": zeros(leaves), "w": torch.zeros(())}}),
        r"'o' has 'w' beside 'm'(.|\n)*another name, as 'n_w'",
    ),
    "names of leaves above paths": (
        lambda: mine(init_fn=lambda leaves, _: {"o": {"w": zeros(leaves), "b": zeros(leaves)}}),
        r"'o' has dicts by path by the names of parameters(.|\n)*'n_w'",
    ),
}


def told(case):
    make, _ = WRONG[case]
    found = []
    for route in (zf.init, zf.attach):
        params = {"w": torch.ones(3), "b": torch.ones(2)}
        model = torch.nn.ParameterDict(params)
        try:
            tx = zf.chain(zf.all_reduce(), make(), zf.sgd(1.0))
            if route is zf.attach:
                opt = zf.attach(model, tx)
                sum(p.sum() for p in model.values()).backward()
                opt.step()
            else:
                zf.update(tx, params, zf.init(tx, params))
            found.append("nothing")
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


@functools.cache
def on_two_ranks():
    return one_launch(2, told, [(case,) for case in WRONG])


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_by_name(case):
    for found in (told(case), *on_two_ranks()[case,]):
        for text in found:
            assert text.startswith("mine: ") and re.search(WRONG[case][1], text), text


def test_a_slot_may_have_the_name_of_the_only_leaf():
    """Beside the other rules: by path below it, or a number that is not of the leaf's shape."""

    def update(grads, state, params, carry, ctx):
        return {p: g + state["w"]["w"] for p, g in grads.items()}, {"w": {"w": grads["w"]}}

    states = [lambda leaves, _: {"w": zeros(leaves)}, lambda leaves, _: {"w": torch.zeros(())}]
    for init, of in zip(states, (update, halves), strict=True):
        tx = zf.chain(mine(init_fn=init, update_fn=of), zf.sgd(1.0))
        state, _ = zf.update(tx, {"w": torch.ones(3)}, zf.init(tx, {"w": torch.zeros(3)}))
        assert state.params["w"].tolist() == [-1.0 if of is update else -0.5] * 3


def made_late(folder):
    """Its entries are made by the first update, at the owner of a leaf alone."""

    def update(grads, state, params, carry, ctx):
        return grads, {"m": {path: grads[path] + state["m"].get(path, 0) for path in grads}}

    late = Transform("late", needs="leaf", init_fn=lambda leaves, _: {"m": {}}, update_fn=update)
    model = torch.nn.ParameterDict({"w": torch.ones(4), "b": torch.ones(4)})
    opt = zf.attach(model, zf.chain(zf.shard(), late, zf.sgd(1.0)))
    sum(p.sum() for p in model.values()).backward()
    opt.step()
    try:
        zf.save(folder, opt)
    except ValueError as error:
        return str(error)


def test_states_of_several_structures_are_not_saved(tmp_path):
    for text in zf.launch(made_late, 2, str(tmp_path / "c"), timeout=limit()):
        assert "ranks have states of several structures" in text and "late/m/" in text
