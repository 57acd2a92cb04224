"""Names with characters that a terminal obeys stand escaped in messages, warnings and tables."""

import pytest
import torch

import zerofn as zf

NAMES = ["w\x1b[31m", "w\nwrite: rm", "w\r", "w\x07", "w\u202e"]


def raised(program):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        program()
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_messages(name, tmp_path):
    tx, params = zf.adamw(0.1), {name: torch.zeros(3)}
    state = zf.init(tx, params)
    zf.save(tmp_path / "a", state)
    other = zf.init(tx, {name: torch.zeros(4)})
    texts = {
        "init": raised(lambda: zf.init(tx, {name: torch.tensor([torch.nan])})),
        "kind": raised(lambda: zf.init(tx, {name: torch.zeros(3, dtype=torch.int64)})),
        "update": raised(lambda: zf.update(tx, {name: torch.zeros(4)}, state)),
        "load": raised(lambda: zf.load(tmp_path / "a", like=other)),
        "structure": raised(lambda: zf.update(tx, {"other": torch.zeros(3)}, state)),
        "describe": str(zf.describe(state)),
        "plan": str(zf.plan(tx, params, 2)),
        "report": str(
            zf.load(
                tmp_path / "a",
                like=zf.init(zf.chain(tx, zf.ema(0.9)), params),
                strict=False,
                tx=zf.chain(tx, zf.ema(0.9)),
            )[1]
        ),
    }
    shown = name.encode("unicode_escape").decode()
    for where, text in texts.items():
        assert all(line.isprintable() for line in text.split("\n")), (where, text)
        assert where == "structure" or shown in text, (where, text)
