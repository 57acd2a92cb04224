"""Checkpoints over ranks: open windows, plans and hybrid meshes; what fails on one rank fails on all.

Within a world size going on is exact. States of all forms on other numbers of ranks are in
`tests/eager/test_states_of_every_form.py`.
"""

import errno
import os
import signal
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.core.state_entries import entries  # inside: every tensor of a state with the key of a checkpoint

BF16 = torch.bfloat16
BATCH = 12  # divides by 1, 2, 3 and 4

PIPELINES = {
    "zero3": lambda: zf.chain(zf.shard(), zf.clip_by_global_norm(0.5), zf.adamw(1e-2), zf.ema(0.9)),
    "low": lambda: zf.chain(
        zf.shard(),
        zf.precision(store_dtype=BF16, grad_dtype=torch.float32),
        zf.accumulate(2),
        zf.low_precision_adam(1e-2, rounding="kahan"),
    ),
    "scaled": lambda: zf.chain(
        zf.shard(),
        zf.precision(param_dtype=torch.float16),
        zf.scale_loss("dynamic", init_scale=2.0**40, backoff_factor=2.0**-10),
        zf.adamw(1e-2),
    ),
    "zero2": lambda: zf.chain(zf.reduce_scatter(), zf.accumulate(2), zf.adamw(1e-2)),
    "zero1": lambda: zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.sgd(0.1)),
    "replicas": lambda: zf.chain(zf.all_reduce(), zf.adam(1e-2)),
}


class Model(nn.Module):
    """Leaves that cut unevenly, that are smaller than the world, empty, tied."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.ones(0, 2))
        self.last = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(5, 3)
        self.tied.weight = self.last.weight

    def forward(self, x):
        h = self.first(x.to(self.gain.dtype)).tanh() * self.gain
        return self.last(h) + self.one * self.tied(h * h) + self.none.sum()


def model(seed=0):
    torch.manual_seed(seed)
    return Model()


def named(seed=0):
    return OrderedDict(model(seed).named_parameters(remove_duplicate=False))


def batch(i):
    """This rank's part of the batch of a step."""
    whole = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(i))
    group = zf.collectives.world_group("test")
    return whole.view(group.size, -1, 3)[group.rank]


def pure(name, seed=0):
    tx = PIPELINES[name]()
    step = zf.make_step(lambda p, x: (torch.func.functional_call(model(), dict(p), (x,)).float() ** 2).mean(), tx)
    return tx, zf.init(tx, named(seed)), step


def run(step, state, steps):
    for i in steps:
        state, _ = step(state, batch(i))
    return state


def same(a, b, but=None):
    for x, y in zip(entries(a), entries(b), strict=True):
        if x.path and x.owner == but:
            continue
        assert x.key == y.key
        assert x.value.dtype == y.value.dtype
        assert torch.equal(x.value, y.value), x.key


def full(tx, state):
    return {k: x.clone() for k, x in zf.full_params(tx, state).items()}


def save_and_go_on(directory, names):
    """Save at 4 steps, and, in the middle of an accumulation window, at 5; go on with both."""
    found = {}
    for name in names:
        tx, state, step = pure(name)
        for at in (4, 5):
            state = run(step, state, range(at - 4 if at == 4 else 4, at))
            where = Path(directory) / f"{name}{at}"
            zf.save(where, state)
            loaded = zf.load(where, like=zf.init(tx, named(1)))
            same(loaded, state)
            later, others = (run(step, s, range(at, at + 3)) for s in (state, loaded))
            same(later, others)
            found[name, at] = full(tx, state), full(tx, later)
    save_without_a_format(Path(directory) / "old")
    return found


def early():
    """A window before the reduction, and stochastic rounding."""
    cast = zf.precision(store_dtype=BF16, grad_dtype=torch.float32)
    return zf.chain(cast, zf.accumulate(2), zf.reduce_scatter(), zf.low_precision_adam(1e-2))


def save_without_a_format(directory):
    """As states were when there was one way to draw random bits."""
    state = zf.init(early(), named())
    ones = {leaf.path: torch.ones(leaf.shape) for leaf in state.layout.leaves}
    for _ in range(4):
        state, _ = zf.update(early(), state.layout.join_once(ones), state)
    del state.transforms["low_precision_adam"]["rounding_format"]
    zf.save(directory, state)


# Those whose windows may be open.
OFTEN = ["low", "zero1"]


@pytest.fixture(scope="module", params=[OFTEN, pytest.param(list(PIPELINES), marks=pytest.mark.slow)], ids=["", "all"])
def saved(tmp_path_factory, request):
    """Checkpoints of 1, 2 and 3 ranks, what each rank had, and of which pipelines."""
    directory = tmp_path_factory.mktemp("saved")
    (directory / "1").mkdir()
    answers = {1: [save_and_go_on(directory / "1", request.param)]}
    for n in (2, 3):
        answers[n] = zf.launch(save_and_go_on, n, str(directory / str(n)), request.param, timeout=limit())
    return directory, answers, request.param


@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_was_saved_before_there_were_formats_goes_on_by_the_first(saved, n):
    directory, *_ = saved
    like = zf.init(early(), named(1))
    state = zf.load(directory / str(n) / "old", like=like)
    assert int(like.transforms["low_precision_adam"]["rounding_format"]) == 2
    assert int(state.transforms["low_precision_adam"]["rounding_format"]) == 1
    assert int(state.step) == 2 and int(state.transforms["accumulate"]["count"]) == 0


def test_a_window_that_is_open(saved):
    """Behind a reduction it is one sum in shards, which any number of ranks reads."""
    directory, _, names = saved
    for name in {"low", "zero2"} & {*names}:
        _, like, step = pure(name)
        state = zf.load(directory / "3" / f"{name}5", like=like)
        assert int(state.transforms["accumulate"]["count"]) == 1
        alone = run(step, zf.load(directory / "3" / f"{name}4", like=like), range(4, 5))
        assert state.transforms["accumulate"]["seen"] == alone.transforms["accumulate"]["seen"]
        for k, x in state.transforms["accumulate"]["sum"].items():
            # In bf16 each rank rounds its gradient to 8 bits before they are summed.
            tolerance = 2e-3 if name == "low" else 1e-6
            torch.testing.assert_close(x, alone.transforms["accumulate"]["sum"][k], rtol=1e-5, atol=tolerance)


def load_open(directory):
    """What is told of a window before the reduction; and what comes of giving it up, or of the last update."""
    tx, like, step = pure("zero1", seed=1)
    told = ""
    try:
        zf.load(Path(directory) / "zero15", like=like)
    except ValueError as error:
        told = str(error)
    given_up, report = zf.load(Path(directory) / "zero15", like=like, strict=False, tx=tx)
    before = zf.load(Path(directory) / "zero14", like=like)
    return told, str(report), full(tx, run(step, given_up, range(4, 7))), full(tx, run(step, before, range(4, 7)))


@pytest.mark.parametrize("n, m", [(1, 2), (2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_window_whose_sums_are_each_ranks_own_is_of_as_many_ranks(saved, n, m):
    directory, *_ = saved
    for told, report, *both in zf.launch(load_open, m, str(directory / str(n)), timeout=limit()):
        assert f"on {m} ranks in the middle of a window" in told and f"{n} ranks saved it" in told, told
        assert "opt.is_boundary" in told and "strict=False" in told
        assert f"accumulate/count (in the middle of a window of {n} ranks, here are {m})" in report, report
        # The window begins anew with the next batch, and with the moments of the last update.
        assert all(torch.equal(x, both[1][k]) for k, x in both[0].items())


def unused_on_first(directory):
    tx = zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.sgd(1.0))
    state = zf.init(tx, {"a": torch.zeros(5)})
    # Rank 0, whose sums are read on another number of ranks, has no gradient in this window.
    grads = {"a": None if zf.collectives.world_group("test").rank == 0 else torch.ones(5)}
    state, _ = zf.update(tx, grads, state)
    zf.save(directory, state)


def test_a_window_without_a_gradient_on_the_first_rank_is_open(tmp_path):
    zf.launch(unused_on_first, 2, str(tmp_path), timeout=limit())
    tx = zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.sgd(1.0))
    with pytest.raises(ValueError, match="in the middle of a window"):
        zf.load(tmp_path, like=zf.init(tx, {"a": torch.zeros(5)}))


# ---------------------------------------------------------------------------------- tables over ranks


def tables(names):
    found = {}
    for name in names:
        tx = PIPELINES[name]()
        state = zf.init(tx, named())
        opt = zf.attach(model(), tx)
        assert zf.describe(opt.state) == zf.describe(state)
        found[name] = zf.describe(state)
        group = zf.collectives.world_group("test")
        assert zf.plan(tx, model(), world_size=group.size, rank=group.rank) == found[name]
    return found


@pytest.mark.parametrize("n", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_plan_is_describe_on_every_rank(n):
    """Planned in one process, which has no ranks."""
    for rank, found in enumerate(zf.launch(tables, n, list(PIPELINES), timeout=limit())):
        for name, table in found.items():
            planned = zf.plan(PIPELINES[name](), model(), world_size=n, rank=rank)
            assert planned == table
            assert str(planned).startswith(str(table))
            if name == "zero3":
                leaves = [p.detach() for p in model().parameters()]
                # By rows, in torch's own chunks; a number is its first rank's.
                parts = [(p if p.ndim else p.reshape(-1)).chunk(n) for p in leaves]
                shards = [each[rank].numel() if rank < len(each) else 0 for each in parts]
                floats = [row for row in table.rows if row.dtype == torch.float32]
                assert sum(row.bytes for row in floats) == 4 * 4 * sum(shards)


def test_plan_of_a_large_world():
    """The formula of ZeRO-3: 16 bytes a parameter, over the ranks."""
    params = {"w": torch.empty(1 << 20, 1 << 10, device="meta")}
    tx = zf.chain(zf.shard(), zf.accumulate(2), zf.adamw(1e-3))
    assert zf.plan(tx, params, world_size=64).bytes_per_parameter == pytest.approx(16 / 64, rel=1e-6)
    late = zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.adamw(1e-3))
    assert zf.plan(late, params, world_size=64).bytes_per_parameter == pytest.approx(4 + 12 / 64, rel=1e-6)


def hybrid(directory):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tx = zf.chain(zf.shard(mesh["shard"]), zf.all_reduce(mesh["replicate"]), zf.adamw(1e-2))
    step = zf.make_step(lambda p, x: (torch.func.functional_call(model(), dict(p), (x,)).float() ** 2).mean(), tx)
    state = run(step, zf.init(tx, named()), range(3))
    zf.save(directory, state)
    same(zf.load(directory, like=zf.init(tx, named(1))), state)
    rank = zf.collectives.world_group("test").rank
    assert zf.plan(tx, named(), world_size=4, rank=rank) == zf.describe(state)
    return full(tx, state)


def test_hybrid_sharding(tmp_path):
    answers = zf.launch(hybrid, 4, str(tmp_path), timeout=limit())
    tx = zf.adamw(1e-2)
    state = zf.load(tmp_path, like=zf.init(tx, named()))
    for answer in answers:
        assert all(torch.equal(x, state.params[k]) for k, x in answer.items())
    # A replica writes nothing twice.
    size = sum(p.stat().st_size for p in tmp_path.glob("*.distcp"))
    zf.save(tmp_path / "one", state)
    alone = sum(p.stat().st_size for p in (tmp_path / "one").glob("*.distcp"))
    assert size < 2 * alone


# ---------------------------------------------------------------------------- what fails, on every rank


def raises(kind, text, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as error:
        said = str(error) + "\n".join(getattr(error, "__notes__", []))
        assert text in said, said
        return said
    raise AssertionError(f"no {kind.__name__}")


def failures(directory):
    directory = Path(directory)
    group = zf.collectives.world_group("test")
    tx, state, step = pure("zero3")
    old = run(step, state, range(2))
    zf.save(directory, old)
    before = sorted(p.name for p in directory.iterdir())
    new = run(step, old, range(2, 4))

    # A full disk, on the last rank only.
    real = os.fsync
    if group.rank == group.size - 1:

        def full_disk(handle):
            raise OSError(errno.ENOSPC, "No space left on device")

        os.fsync = full_disk
    said = raises(OSError, "No space left on device", zf.save, directory, new)
    os.fsync = real
    assert f"rank {group.size - 1}" in said
    zf.collectives.world_group("test")
    same(zf.load(directory, like=state), old)
    assert sorted(p.name for p in directory.iterdir()) == before

    # Another model and another pipeline: every rank says the same.
    other = zf.init(tx, {"w": torch.zeros(7)})
    said = raises(ValueError, "params/w: missing", zf.load, directory, like=other)
    assert "params/first.weight: unexpected" in said
    raises(
        ValueError,
        "ema/average/gain: unexpected",
        zf.load,
        directory,
        like=zf.init(zf.chain(zf.shard(), zf.adamw(1e-2)), named()),
    )

    # One byte of what one rank wrote: those that read it, and those that do not, hear of it.
    group_barrier(group)
    file = sorted(directory.glob("*.distcp"))[-1]
    if group.rank == 0:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    group_barrier(group)
    raises(ValueError, "is damaged", zf.load, directory, like=state)
    group_barrier(group)
    if group.rank == 0:
        file.write_bytes(data[:100])
    group_barrier(group)
    raises(ValueError, "it ends after 100 bytes", zf.load, directory, like=state)

    # A checkpoint that one rank cannot see.
    mine = directory if group.rank == 0 else directory / "elsewhere"
    raises(FileNotFoundError, "no checkpoint in", zf.load, mine, like=state)

    # What should be equal everywhere and is not.
    torch.manual_seed(0)
    new.transforms["adamw"]["step"].fill_(group.rank)
    raises(ValueError, "adamw/step: differs between ranks", zf.save, directory, new)
    return True


def group_barrier(group):
    from zerofn.ranks.backend import barrier  # inside: the collectives below, of one process and of several

    barrier(group)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_failures_reach_every_rank(n, tmp_path):
    assert zf.launch(failures, n, str(tmp_path / "checkpoint"), timeout=limit()) == [True] * n


def die_while_saving(directory):
    _, state, step = pure("zero3")
    zf.save(directory, state)
    state = run(step, state, range(2))
    if zf.collectives.world_group("test").rank == 1:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    zf.save(directory, state)


def test_a_rank_that_dies_while_saving(tmp_path):
    with pytest.raises(zf.RankError, match="rank 1"):
        zf.launch(die_while_saving, 2, str(tmp_path), timeout=limit())
    tx, like, _ = pure("zero3", seed=1)
    state = zf.load(tmp_path, like=like)
    assert all(torch.equal(x, named()[k]) for k, x in zf.full_params(tx, state).items())
    zf.save(tmp_path, state)
    assert len(list(tmp_path.iterdir())) == 2


def with_a_leaf_of_nothing(scatter):
    """A slot without elements beside a leaf without any, of a transform that owners run for another one's sake."""
    parts = {"matrices": zf.muon(lr=0.1), "rest": zf.sgd(0.1)}
    rest = zf.offload(zf.partition(parts, lambda path: "matrices" if path == "w" else "rest"))
    tx = zf.chain(*([zf.reduce_scatter()] if scatter else []), rest)
    return zf.init(tx, {"empty": torch.zeros(2, 0, 3), "w": torch.ones(4, 4)})


def save_with_nothing(directory):
    zf.save(directory, with_a_leaf_of_nothing(True))


def test_a_leaf_without_elements_fits_whatever_its_shape(tmp_path):
    zf.launch(save_with_nothing, 2, str(tmp_path), timeout=limit())
    assert zf.load(tmp_path, like=with_a_leaf_of_nothing(False)).leaves["empty"].shape == (2, 0, 3)
