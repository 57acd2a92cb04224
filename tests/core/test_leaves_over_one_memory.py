"""Two leaves over one memory: refused by path, in both routes; views without an element in common are leaves."""

import pytest
import torch
from torch import nn

import zerofn as zf

x = torch.arange(24.0).view(4, 6)
z = torch.zeros(())

SHARED = {
    "another shape": ({"a": x, "b": x.view(-1)}, ["b"]),
    "rows that overlap": ({"a": x[:3], "b": {"c": x[2:]}}, ["b.c"]),
    "columns that overlap": ({"a": x[:, :4], "b": x[:, 3:]}, ["b"]),
    "transposed": ({"a": x, "b": x.T}, ["b"]),
    "expanded": ({"a": z.expand(3), "b": z.expand(4)}, ["b"]),
    "nested": ([x, [x.detach(), (x[1],)]], ["1.0", "1.1.0"]),
    "another dtype": ({"a": x, "b": x.view(torch.float16)}, ["b"]),
    "meta": ([m := torch.empty(3, device="meta"), m[1:]], ["1"]),
}
APART = {
    "rows": ([x[:2], x[2:]], 2),
    "columns": ([x[:, :3], x[:, 3:]], 2),
    "every other": ([x.view(-1)[::2], x.view(-1)[1::2]], 2),
    "halves of other dtypes": ([x[:2], x.view(torch.float16)[2:]], 2),
    "empty": ([x[:0], x[:0], x[:, :0], x], 4),
    "empty by themselves": ([torch.empty(0), torch.empty(0, 3)], 2),
    "meta": ([torch.empty(3, device="meta"), torch.empty(3, device="meta")], 2),
    "tied by the object": ({"a": x, "b": [x, x]}, 1),
    "elements at one place": ([z.expand(3), x], 2),
}
tx = zf.sgd(0.1)


@pytest.mark.parametrize("call", [zf.init, zf.plan, zf.Transform.init])
@pytest.mark.parametrize("tree, named", SHARED.values(), ids=SHARED)
def test_refused_by_path(call, tree, named):
    with pytest.raises(ValueError, match="over one memory") as error:
        call(tx, tree)
    rows = [line.split(":")[0].strip() for line in str(error.value).splitlines() if "shares memory" in line]
    assert rows == named and "remove_duplicate=False" in str(error.value) and ".clone()" in str(error.value)


@pytest.mark.parametrize("tree, leaves", APART.values(), ids=APART)
def test_views_without_a_common_element_are_leaves(tree, leaves):
    assert len(zf.init(tx, tree).leaves) == leaves
    zf.plan(tx, tree)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, i):
        return self.out(self.emb(i))


@pytest.fixture
def saved(tmp_path):
    """A tied model, and its state dict from a file, in which torch keeps the tie by memory."""
    torch.manual_seed(0)
    model = Tied().double()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return model, torch.load(tmp_path / "model.pt")


def test_a_tied_model(saved):
    model, loaded = saved
    for tree in (
        model.state_dict(),
        loaded,
        dict(model.state_dict(keep_vars=True)) | {"out.weight": model.emb.weight.data},
    ):
        with pytest.raises(ValueError, match="shares memory with emb"):
            zf.init(tx, tree)
    i, y = torch.arange(4), torch.arange(1, 5)
    loss = nn.functional.cross_entropy
    step = zf.make_step(
        lambda p, i, y: loss(torch.func.functional_call(model, p, (i,), tie_weights=False), y), zf.sgd(1.0)
    )
    plain = Tied().double()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), 1.0)
    # What the error says to write: one parameter.
    state = zf.init(zf.sgd(1.0), dict(model.named_parameters(remove_duplicate=False)))
    for _ in range(3):
        state, _ = step(state, i, y)
        optimizer.zero_grad()
        loss(plain(i), y).backward()
        optimizer.step()
    for found in zf.full_params(zf.sgd(1.0), state).values():
        torch.testing.assert_close(found, plain.emb.weight.detach(), rtol=1e-12, atol=1e-12)
    # And two.
    assert len(zf.init(tx, {k: v.clone() for k, v in loaded.items()}).leaves) == 2


def test_inside_of_torch_func():
    def loss(flat, to):
        return zf.full_params(tx, zf.init(tx, {"a": flat[:to], "b": flat[3:]}))["b"].sum()

    flat = torch.arange(6.0)
    assert torch.func.grad(loss)(flat, 3).tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.func.vmap(loss, (0, None))(flat.expand(2, 6).clone(), 3).tolist() == [12, 12]
    with pytest.raises(ValueError, match="b: shares memory with a"):
        torch.func.grad(loss)(flat, 4)
