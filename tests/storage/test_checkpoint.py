"""`save`, `load`, `export_safetensors`: going on is going on, and what is wrong says so and changes nothing."""

import builtins
import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torchopt
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.storage import files as _lock  # inside: its locks and files are looked at and broken
from zerofn.storage import files as _manifest  # inside: its locks and files are looked at and broken

BF16 = torch.bfloat16
LOW = (zf.precision(store_dtype=BF16, grad_dtype=torch.float32), zf.accumulate(3))

PIPELINES = {
    "adamw": lambda: zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(zf.schedules.warmup_cosine(1e-2, 3, 20))),
    "kahan": lambda: zf.chain(*LOW, zf.low_precision_adam(1e-2, rounding="kahan")),
    "scaled": lambda: zf.chain(
        zf.precision(param_dtype=torch.float16),
        zf.scale_loss("dynamic", init_scale=2.0**40, backoff_factor=2.0**-10, growth_interval=2),
        zf.accumulate(2),
        zf.adamw(1e-2),
    ),
    "groups": lambda: zf.chain(
        zf.partition(
            {"a": zf.chain(zf.clip_by_value(0.1), zf.adamw(1e-2)), "b": zf.sgd(0.1, momentum=0.5)},
            lambda path: "b" if path.endswith("bias") else "a",
        ),
    ),
    "guest": lambda: zf.chain(torchopt.adam(lr=0.01)),
}


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        for layer in self.inner:
            h = h + layer(h).tanh()
        seen = self.conv(h[:, None]).square().mean() + self.none.sum()
        return self.head(h * self.gain) * (1 + seen)


def model(seed=0, width=5):
    torch.manual_seed(seed)
    return Model(width)


def batch(i):
    return torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(i))


def loss_of(out, x):
    return nn.functional.cross_entropy(out.float().flatten(0, 1), x.flatten())


def pure(name):
    """A first state and a step of the pure route."""
    net = model()
    named = OrderedDict(net.named_parameters(remove_duplicate=False))
    tx = PIPELINES[name]()

    def loss_fn(params, x):
        return loss_of(torch.func.functional_call(net, dict(params), (x,)), x)

    return tx, zf.init(tx, named), zf.make_step(loss_fn, tx)


def tensors(state):
    return [x for x in torch.utils._pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]


def same(a, b):
    ours, theirs = tensors(a), tensors(b)
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == y.dtype
        assert x.device == y.device
        assert x.shape == y.shape
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (x, y)))


def bits(state):
    return [x.clone() for x in tensors(state)]


def files(directory):
    return sorted(p.name for p in Path(directory).iterdir())


def data_file(directory):
    (name,) = [n for n in files(directory) if n.endswith(".distcp")]
    return Path(directory) / name


# -------------------------------------------------------------------------------- going on is going on


@pytest.mark.parametrize("name", PIPELINES)
def test_continue_is_continue(name, tmp_path):
    """Law 9, in the middle of an accumulation window and after overflows where there are any."""
    tx, state, step = pure(name)
    start = bits(state)
    for i in range(4):
        state, _ = step(state, batch(i))
    zf.save(tmp_path / "a", state)
    like = zf.init(tx, OrderedDict(model(1).named_parameters(remove_duplicate=False)))
    before = bits(like)
    loaded = zf.load(tmp_path / "a", like=like)
    same(loaded, state)
    for x, y in zip(tensors(like), before, strict=True):
        assert torch.equal(x, y)
    if name == "kahan":
        assert int(state.transforms["accumulate"]["count"]) == 1  # a window is open
    if name == "scaled":
        assert 0 < int(state.transforms["scale_loss"]["skipped_steps"]) < 4
    for i in range(4, 9):
        state, metrics = step(state, batch(i))
        loaded, others = step(loaded, batch(i))
        assert all(torch.equal(v, others[k]) for k, v in metrics.items())
    same(loaded, state)
    moved = [not torch.equal(x, y) for x, y in zip(start, tensors(state), strict=True) if x.numel() > 1]
    assert all(moved[: len(state.leaves) - 2])  # all leaves but `none` and `gain`, which are no larger than 1


def test_learning_rates_of_torch_schedulers(tmp_path):
    """They live in `param_groups` and in no state."""

    def make(seed):
        net = model(seed)
        opt = zf.attach(net, zf.adamw(1e-2))
        return net, opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    net, opt, scheduler = make(0)
    for i in range(6):
        if i == 3:
            zf.save(tmp_path, opt)
            other, again, scheduler2 = make(1)
            zf.load(tmp_path, like=again)
            scheduler2.load_state_dict(scheduler.state_dict())
            assert again.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == 1e-2 / 8
        for n, o, s in [(net, opt, scheduler)] + ([(other, again, scheduler2)] if i >= 3 else []):
            loss_of(n(batch(i)), batch(i)).backward()
            o.step()
            o.zero_grad()
            s.step()
    same(again.state, opt.state)


def test_pure_and_attached_read_each_other(tmp_path):
    tx, state, step = pure("adamw")
    state, _ = step(state, batch(0))
    zf.save(tmp_path / "pure", state)
    opt = zf.attach(model(1), tx)
    same(zf.load(tmp_path / "pure", like=opt), state)
    zf.save(tmp_path / "eager", opt)
    same(zf.load(tmp_path / "eager", like=state), state)


def test_stacked_states(tmp_path):
    tx = zf.adamw(1e-2)
    stacked = torch.vmap(lambda w: zf.init(tx, {"w": w}))(torch.randn(3, 2, 2))
    zf.save(tmp_path, stacked)
    same(zf.load(tmp_path, like=torch.vmap(lambda w: zf.init(tx, {"w": w}))(torch.zeros(3, 2, 2))), stacked)


def test_nested_trees_and_odd_keys(tmp_path):
    tx = zf.adamw(1e-2)
    tree = {
        "a/b": [torch.randn(2), (torch.randn(1),)],
        "c@0": torch.randn(3),
        "d": torch.randn(4),
        "step": torch.ones(2),
    }
    state = zf.init(tx, tree)
    zf.save(tmp_path, state)
    same(zf.load(tmp_path, like=zf.init(tx, {**tree, "d": torch.zeros(4)})), state)
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    state.leaves["d"].copy_(special)
    zf.save(tmp_path, state)
    same(zf.load(tmp_path, like=state), state)


def test_state_dict_goes_through_torch_distributed_checkpoint(tmp_path):
    """`opt.state_dict()` as it is, with torch's own save and load."""
    import torch.distributed.checkpoint as dcp

    opt = zf.attach(model(), PIPELINES["groups"]())
    for i in range(3):
        loss_of(opt._own.model(batch(i)), batch(i)).backward()
        opt.step()
        opt.zero_grad()
    opt.param_groups[0]["lr"] = 0.5
    again = zf.attach(model(1), PIPELINES["groups"]())
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(opt.state_dict(), checkpoint_id=tmp_path)
        saved = again.state_dict()
        dcp.load(saved, checkpoint_id=tmp_path)
    again.load_state_dict(saved)
    same(again.state, opt.state)
    assert [g["lr"] for g in again.param_groups] == [0.5, 0.1]


def test_like_on_meta(tmp_path):
    """Structure without memory: what is read arrives on the CPU."""
    tx, state, _ = pure("groups")
    zf.save(tmp_path, state)
    with torch.device("meta"):
        like = zf.init(tx, OrderedDict(Model().named_parameters(remove_duplicate=False)))
    same(zf.load(tmp_path, like=like), state)


# ---------------------------------------------------------------------- what does not fit, by every path


def test_another_model_and_another_pipeline(tmp_path):
    tx = zf.adamw(1e-2)
    params = {"a": torch.ones(2, 3), "b": torch.ones(3), "c": torch.ones(4)}
    zf.save(tmp_path, zf.init(tx, params))
    like = zf.init(
        zf.chain(tx, zf.ema(0.9)), {"a": torch.ones(3, 2), "b": torch.ones(3, dtype=BF16), "d": torch.ones(1)}
    )
    before = bits(like)
    with pytest.raises(ValueError) as error:
        zf.load(tmp_path, like=like)
    text = str(error.value)
    assert str(tmp_path) in text
    for line in (
        "params/a: shape (2, 3) in the checkpoint, (3, 2) here",
        "params/b: float32 in the checkpoint, bfloat16 here",
        "params/c: unexpected: only the checkpoint has it",
        "params/d: missing: the checkpoint does not have it",
        "adamw/exp_avg/a: shape (2, 3) in the checkpoint, (3, 2) here",
        "adamw/exp_avg_sq/b: float32 in the checkpoint, bfloat16 here",
        "adamw/count/c: unexpected",
        "ema/average/a: missing",
    ):
        assert line in text, line
    assert "write: zf.load(directory, like=zf.init(tx, params))" in text
    for x, y in zip(tensors(like), before, strict=True):
        assert torch.equal(x, y)


def test_dtypes_are_converted_by_hand_only(tmp_path):
    old_tx = zf.adamw(1e-2)
    params = {"w": torch.randn(5)}
    zf.save(tmp_path, zf.init(old_tx, params))
    new_tx = zf.chain(zf.precision(store_dtype=BF16), zf.adamw(1e-2))
    with pytest.raises(ValueError, match=r"zf\.init") as error:
        zf.load(tmp_path, like=zf.init(new_tx, params))
    text = str(error.value)
    assert "params/w: float32 in the checkpoint, bfloat16 here" in text
    assert "state = zf.init(new_tx, zf.full_params(old_tx, old))" in text
    # What the message says to write:
    old = zf.load(tmp_path, like=zf.init(old_tx, params))
    state = zf.init(new_tx, zf.full_params(old_tx, old))
    assert torch.equal(state.params["w"], params["w"].to(BF16))


# ------------------------------------------------------------------------------------- a leaf without a key

ALONE = {
    "bare": lambda fill: torch.full((5,), fill),
    "empty key": lambda fill: {
        "": torch.full((5,), fill),
        "a": torch.full((3,), fill),
        "exp_avg": torch.full((), fill),
    },
    "nested": lambda fill: {"": {"": torch.full((5,), fill)}, "b": [torch.full((2,), fill)]},
}


def alone(kind, over_ranks, fill=1.0):
    """A first state and a step; what is shared by all leaves stands beside what each has."""
    first = [zf.shard()] if over_ranks else []
    cast, adam = zf.precision(store_dtype=BF16), zf.low_precision_adam(1e-2, rounding="kahan")
    tx = zf.chain(*first, cast, zf.accumulate(2, weighted=True), adam, zf.ema(0.5))

    def loss_fn(params, x):
        return sum(((p - x) ** 2).sum() for p in torch.utils._pytree.tree_leaves(params))

    step = zf.make_step(loss_fn, tx)
    return tx, zf.init(tx, ALONE[kind](fill)), lambda s, i: step(s, torch.tensor(float(i)), weight=1.0)[0]


@pytest.mark.parametrize("call", [zf.save, lambda d, state: zf.load(d, like=state), lambda d, _: zf.Checkpoints(d)])
def test_no_name_is_no_directory(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = zf.init(zf.sgd(1.0), {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="the working directory of the process"):
        call("", state)
    assert not files(tmp_path)
    zf.save(".", state)
    assert "zerofn.json" in files(tmp_path)


def alone_on_ranks(directory):
    """Save after 3 steps, load, and go on; give everything whole."""
    found = {}
    for kind in ALONE:
        tx, state, step = alone(kind, over_ranks=True)
        for i in range(3):
            state = step(state, i)
        where = Path(directory) / kind
        zf.save(where, state)
        loaded = zf.load(where, like=alone(kind, True, fill=0.0)[1])
        same(loaded, state)
        same(step(loaded, 3), step(state, 3))
        found[kind] = zf.full_params(tx, state), zf.full_params(tx, state, of="ema")
    return found


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("optimizer", ["pipeline", "guest", "groups"])
def test_a_leaf_without_a_key(kind, optimizer, tmp_path):
    """A tree that is one tensor, or a key that is an empty text, gives the path ""."""
    tx, state, step = alone(kind, over_ranks=False)
    if optimizer != "pipeline":
        tx = PIPELINES[optimizer]()
        state = zf.init(tx, ALONE[kind](1.0))
        step = lambda s, i: zf.update(tx, ALONE[kind](i + 1.0), s)[0]  # noqa: E731
    for i in range(3):
        state = step(state, i)
    zf.save(tmp_path, state)
    loaded = zf.load(tmp_path, like=zf.init(tx, ALONE[kind](0.0)))
    same(loaded, state)
    same(step(loaded, 3), step(state, 3))
    names = [row[:3] for row in zf.describe(state).rows]
    assert len(names) == len(tensors(state)) and len(set(names)) == len(names)


def test_a_leaf_without_a_key_over_ranks(tmp_path):
    answers = zf.launch(alone_on_ranks, 2, str(tmp_path), timeout=limit())
    for kind in ALONE:
        tx, state, step = alone(kind, over_ranks=False)
        loaded = zf.load(tmp_path / kind, like=zf.init(tx, ALONE[kind](0.0)))
        for i in range(3):
            state = step(state, i)
        # Every rank has the same batch, so the mean over ranks is what one process finds.
        same(loaded, state)
        for answer in answers:
            same(answer[kind][0], zf.full_params(tx, state))
            same(answer[kind][1], zf.full_params(tx, state, of="ema"))


# ------------------------------------------------------------------------------------------ bad files


@pytest.fixture
def saved(tmp_path):
    _, state, step = pure("kahan")
    for i in range(4):
        state, _ = step(state, batch(i))
    zf.save(tmp_path, state)
    return tmp_path, state


def test_one_changed_byte(saved):
    """Anywhere: in the numbers, in the library's own frame around them, in the table of contents."""
    directory, state = saved
    harmless = 0  # in the frame of a tensor without elements, which is not read
    for file, count in ((data_file(directory), 40), (directory / "zerofn.json", 40)):
        whole = file.read_bytes()
        for at in range(3, len(whole), len(whole) // count):
            changed = bytearray(whole)
            changed[at] ^= 0x11
            file.write_bytes(changed)
            try:
                loaded = zf.load(directory, like=state)
            except ValueError as error:
                assert "is damaged" in str(error) or "format version" in str(error)
            else:
                harmless += 1
                same(loaded, state)
        file.write_bytes(whole)
    assert harmless < 8
    same(zf.load(directory, like=state), state)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return builtins.exec, (f"open({str(self.path)!r}, 'w').close()",)


def test_no_code_is_run(saved):
    """Pickles that would run code, wherever a reader of torch's own format would look, with right checksums."""
    import zlib

    directory, state = saved
    fired = directory / "fired"
    bomb = pickle.dumps(Bomb(fired))
    pickle.loads(bomb)
    assert fired.exists()  # the bomb works
    fired.unlink()
    (directory / ".metadata").write_bytes(bomb)
    same(zf.load(directory, like=state), state)
    assert not fired.exists()
    body = json.loads((directory / "zerofn.json").read_text())
    buffer = directory / "bomb.pt"
    torch.save(Bomb(fired), buffer)
    evil = buffer.read_bytes()
    name = "0" * 12 + "_0_0.distcp"
    (directory / name).write_bytes(evil)
    chunks = body["tensors"]["params/embed.weight"]["chunks"]
    chunks[0][2:] = [name, 0, len(evil), zlib.crc32(evil)]
    del body["checksum"]
    body["checksum"] = _manifest._checksum(body)
    (directory / "zerofn.json").write_text(json.dumps(body))
    with pytest.raises(ValueError, match=r"something else than numbers; it was not run") as told:
        zf.load(directory, like=state)
    assert "weights_only" not in str(told.value)
    assert not fired.exists()
    # Nor does a table of contents reach outside of its directory.
    chunks[0][2] = "../other.distcp"
    del body["checksum"]
    body["checksum"] = _manifest._checksum(body)
    (directory / "zerofn.json").write_text(json.dumps(body))
    with pytest.raises(ValueError, match="is damaged"):
        zf.load(directory, like=state)


# ------------------------------------------------------------------------------------- saves that fail


def test_a_save_replaces_and_leaves_nothing_behind(saved):
    directory, state = saved
    first = data_file(directory)
    (directory / "notes.txt").write_text("mine")
    (directory / ("a" * 12 + "_0_0.distcp")).write_text("of a save that died")
    zf.save(directory, state)
    assert not first.exists()
    assert files(directory) == sorted([data_file(directory).name, "notes.txt", "zerofn.json"])
    same(zf.load(directory, like=state), state)


@pytest.mark.parametrize("limit", [0, 5_000, 40_000])
def test_a_full_disk(limit, tmp_path):
    """A limit on the size of files, which the system enforces in the same place as a full disk."""
    tx = zf.adamw(1e-2)
    old, new = (zf.init(tx, {"w": torch.full((60, 60), v), "b": torch.ones(3)}) for v in (1.0, 2.0))
    for there in (False, True):
        directory = tmp_path / str(there)
        if there:
            zf.save(directory, old)
        before = files(directory) if there else []
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"could not write[\s\S]*File too large[\s\S]*as it was") as error:
                zf.save(directory, new)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert error.value.errno == errno.EFBIG
        assert files(directory) == before
        if there:
            same(zf.load(directory, like=new), old)
        zf.save(directory, new)
        same(zf.load(directory, like=old), new)


def test_no_space_for_the_table_of_contents(saved, monkeypatch):
    directory, state = saved
    before = files(directory)
    real = os.fsync

    def full(handle):
        if "zerofn.json." in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        zf.save(directory, state)
    assert error.value.errno == errno.ENOSPC
    assert files(directory) == before
    monkeypatch.undo()
    same(zf.load(directory, like=state), state)


def test_an_interrupt_is_an_interrupt(saved, monkeypatch):
    directory, state = saved
    before = files(directory)

    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zf.save(directory, state)
    monkeypatch.undo()
    assert files(directory) == before


def locked(directory, exclusive):
    lock = _lock.Lock()
    lock.acquire(directory, exclusive)
    return lock


def dies_with_a_lock(directory):
    locked(directory, exclusive=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_of_a_dead_process_is_gone(saved):
    directory, state = saved
    with pytest.raises(zf.RankError, match="SIGKILL"):
        zf.launch(dies_with_a_lock, 1, directory, init=False, timeout=limit())
    start = time.monotonic()
    zf.save(directory, state)
    assert time.monotonic() - start < limit(5)


# ----------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_export(dtype, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model

    net = model().to(dtype)
    opt = zf.attach(net, zf.chain(zf.sgd(0.1), zf.ema(0.5)))
    out = tmp_path / "model.safetensors"
    zf.export_safetensors(out, opt.state)
    tensors = load_file(out)
    names = dict(net.named_parameters(remove_duplicate=False))
    assert set(tensors) == set(names) - {"head.weight"}
    for name, x in tensors.items():
        assert x.dtype == dtype
        assert torch.equal(x, names[name].detach())
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    other = model(1).to(dtype)
    assert load_model(other, out) == (set(), [])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert other.head.weight is other.embed.weight
    assert files(tmp_path) == ["model.safetensors"]


def test_export_of_averages_and_trees(tmp_path):
    from safetensors.torch import load_file

    tx = zf.chain(zf.sgd(1.0), zf.ema(0.5))
    state = zf.init(tx, {"a": [torch.zeros(2), torch.zeros(2, 2).T], "s": torch.zeros(())})
    state, _ = zf.update(tx, {"a": [torch.ones(2), torch.ones(2, 2)], "s": torch.ones(())}, state)
    zf.export_safetensors(tmp_path / "x", state, of="ema")
    found = load_file(tmp_path / "x")
    assert {k: (v.shape, v.unique().tolist()) for k, v in found.items()} == {
        "a.0": ((2,), [-0.5]),
        "a.1": ((2, 2), [-0.5]),
        "s": ((), [-0.5]),
    }
    with pytest.raises(ValueError, match=r"of='sgd'\)\n  why:   this state has \['ema'\]"):
        zf.export_safetensors(tmp_path / "x", state, of="sgd")
    with pytest.raises(ValueError, match=r"add zf\.ema"):
        zf.export_safetensors(tmp_path / "x", zf.init(zf.sgd(1.0), [torch.ones(1)]), of="ema")


def test_export_that_fails(tmp_path, monkeypatch):
    state = zf.init(zf.sgd(1.0), [torch.ones(10_000)])
    out = tmp_path / "x"
    out.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="x"):
            zf.export_safetensors(out, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_text() == "old"
    assert files(tmp_path) == ["x"]
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'zerofn\[safetensors\]'"):
        zf.export_safetensors(out, state)


@pytest.mark.slow
def test_import_stays_light():
    """torch.distributed.checkpoint takes 0.7 s and safetensors is an extra: both wait until they are used."""
    wait = "m.split('.')[0] == 'safetensors' or m.endswith('distributed.checkpoint')"
    code = f"import sys, zerofn; print([m for m in sys.modules if {wait}])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
