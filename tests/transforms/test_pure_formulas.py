"""A transform is a formula: how it is run, in place, recorded, batched or compiled, is asked by runners and kernels."""

import ast
from pathlib import Path

import pytest
import torch

import zerofn as zf
from zerofn.extend import Context, like, may, optimizer, towards, where

PACKAGE = Path(zf.__file__).parent
# Transforms, and the wires that the built-in ones are made of.
FILES = [*sorted((PACKAGE / "transforms").glob("*.py")), PACKAGE / "core" / "wires.py"]
ASKS = {"recorded", "donate", "donate_to_kernels", "concrete", "certain", "differentiated", "is_compiling"}

COUNTS = {"count", "counts", "step", "form", "emit", "due"}


def questions(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        if name in ASKS:
            found.append(f"line {node.lineno}: {name}")
        if isinstance(node, ast.Compare):
            for op, x in zip(node.ops, node.comparators, strict=True):
                if isinstance(op, ast.Is | ast.IsNot) and isinstance(x, ast.Constant) and isinstance(x.value, bool):
                    found.append(f"line {node.lineno}: is {x.value}")
        # In a graph and in a batch a count, or a number of the state, is a tensor.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            of = ast.unparse(node.args[0]).rpartition(".")[2]
            if of in COUNTS and "Tensor" in ast.unparse(node.args[1]):
                found.append(f"line {node.lineno}: is {of} a tensor")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_transform_does_not_ask_how_it_is_run(path):
    assert questions(ast.parse(path.read_text())) == []


def test_questions_are_found():
    text = "if ctx.recorded or due is False or concrete(x) or isinstance(group.count, Tensor): pass"
    assert len(questions(ast.parse(text))) == 4


LAYOUT = zf.init(zf.sgd(0.1), {"w": torch.zeros(1)}).layout
# What it writes, from the old value and another one, and the same by torch alone.
WORDS = {
    "put add": (lambda ctx, old, x: ctx.put(torch.add, old, x), lambda old, x: old + x),
    "put div": (lambda ctx, old, x: ctx.put(torch.div, old, 3), lambda old, x: old / 3),
    "put towards": (
        lambda ctx, old, x: ctx.put(towards, old, x, 0.25),
        lambda old, x: old + (x.to(old.dtype) - old) * 0.25,
    ),
    "copied": (lambda ctx, old, x: ctx.copied(old, x), lambda old, x: x),
}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("shape", [(5,), (), (0, 3)], ids=str)
@pytest.mark.parametrize("how", ["plain", "donated", "recorded"])
@pytest.mark.parametrize("word", WORDS)
def test_a_word_writes_where_the_state_is_donated_alone(word, how, shape, dtypes):
    act, formula = WORDS[word]
    old, x = torch.randn(shape).to(dtypes[0]), torch.randn(shape).to(dtypes[1])
    before, given = old.clone(), x.clone()
    expected = formula(old, x).to(old.dtype)
    ctx = Context(LAYOUT, donate=how == "donated", recorded=how == "recorded", prefix="mine")
    found = act(ctx, old, x)
    assert found.dtype == old.dtype and torch.equal(found, expected)
    assert torch.equal(x, given)
    assert (found is old) == (how == "donated") == bool(ctx.written)
    assert how == "donated" or torch.equal(old, before)
    # What is kept in a state shares no memory with the caller's gradient.
    assert how == "recorded" or not found.numel() or found.data_ptr() != x.data_ptr()


def test_words_are_recorded_and_batched():
    ctx, x = Context(LAYOUT, recorded=True), torch.randn(3, 4)
    old = torch.randn(3, 4)
    for act, formula in WORDS.values():
        assert torch.equal(torch.vmap(lambda a, b, act=act: act(ctx, a, b))(old, x), formula(old, x))
        (slope,) = torch.func.vjp(lambda b, act=act: act(ctx, old, b), x)[1](torch.ones(3, 4))
        (expected,) = torch.func.vjp(lambda b, formula=formula: formula(old, b), x)[1](torch.ones(3, 4))
        assert torch.equal(slope, expected)


def test_a_check_reads_what_python_can_read_alone():
    def checked(x, recorded):
        said = "x\n  why:   too many\n  write: two"
        Context(LAYOUT, recorded=recorded).check(x, lambda n: n < 3, lambda: ValueError(said))
        return x

    checked(torch.tensor(2), False)
    for recorded in (False, True):
        with pytest.raises(ValueError, match="too many"):
            checked(torch.tensor(3), recorded)
    assert torch.vmap(lambda x: checked(x, True))(torch.tensor([2, 3])).tolist() == [2, 3]


def test_a_choice_computes_what_may_be_chosen():
    calls = []

    def make(x):
        return lambda: (calls.append(x), torch.tensor(x))[1]

    assert where(True, make(1.0), make(2.0)) == 1.0 and where(False, make(3.0), make(4.0)) == 4.0
    assert calls == [1.0, 4.0]
    assert where(torch.tensor(False), make(5.0), make(6.0)) == 6.0 and calls[2:] == [5.0, 6.0]
    batch = torch.vmap(lambda c: where(c, torch.tensor(1), torch.tensor(2)))(torch.tensor([True, False]))
    assert batch.tolist() == [1, 2]
    assert may(True) and may(torch.tensor(False)) and not may(False)


HALF, SINGLE = torch.bfloat16, torch.float32
# What a formula is given for a parameter in bf16, a gradient in fp32, a rate in fp64 and a number in fp32.
GIVEN = [
    ({}, [HALF, SINGLE, HALF, torch.float64, SINGLE], 1 + 2**-10),
    ({"rounds_grads": True}, [HALF] * 5, 1.0),
    ({"in_fp32": True}, [SINGLE] * 5, 1 + 2**-10),
    ({"in_fp32": True, "rounds_grads": True}, [SINGLE] * 5, 1.0),
]


@pytest.mark.parametrize(("how", "dtypes", "gradient"), GIVEN, ids=str)
def test_a_formula_is_given_tensors_and_numbers_in_one_dtype(how, dtypes, gradient):
    found = []

    def formula(p, g, slots, at):
        found.append([x.dtype for x in (p, g, slots["m"], at.lr, at.numbers["beta"])])
        assert g.double().item() == gradient
        return p - (at.lr * g).to(p.dtype), {"m": slots["m"] + p}

    rate = torch.tensor(0.5, dtype=torch.float64)
    tx = optimizer("mine", rate, {"m": like}, formula, numbers={"beta": torch.tensor(0.9)}, **how)
    state = zf.init(tx, {"w": torch.ones(1, dtype=HALF)})
    state, _ = zf.update(tx, {"w": torch.full((1,), 1 + 2**-10)}, state)
    assert found == [dtypes]
    # Whatever it computes in, what is stored keeps its dtype.
    assert state.params["w"].dtype == state.transforms["mine"]["m"]["w"].dtype == HALF
