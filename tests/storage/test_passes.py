"""What `zf.plan` says of the passes of a step, against the kernels that the step really runs."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
from threading import Thread, get_ident

import pytest
import torch
from compilers import needs_compiler
from one_launch import one_launch
from torch import nn
from transforms_table import LAYERS, ROWS, row_params

import zerofn as zf
from zerofn.core import executor  # inside: buckets of any size
from zerofn.kernels import fused_adam, lists, print_c  # inside: kernels for small leaves
from zerofn.kernels.codes import Coded  # inside: columns that are kept as codes

pytestmark = needs_compiler

BF16 = torch.bfloat16


@zf.leafwise(init=torch.zeros_like, needs="element")
def momentum(grad, param, state, *, beta=0.9):
    state = beta * state + grad
    return state, state


@zf.leafwise(needs="element")
def squashed(grad, param):
    return grad.tanh()


LINE_OF_TANH = inspect.currentframe().f_lineno - 3


@zf.leafwise
def unit(grad, param):
    return grad / grad.norm()


def moves(old, new):
    return {"moved": (new - old).square().sum(), "size": old.square().sum()}


def is_matrix(path):
    return path.endswith("weight")


def parted():
    return zf.partition({"m": zf.muon(lr=0.1), "r": zf.adamw(0.1)}, lambda path: "m" if is_matrix(path) else "r")


CHAINS = {
    "sgd": lambda: [zf.sgd(0.1)],
    "adamw": lambda: [zf.adamw(0.1)],
    "lion": lambda: [zf.lion(0.1)],
    "lamb": lambda: [zf.lamb(0.1)],
    "clip, adamw, ema": lambda: [zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.ema(0.9)],
    "momentum, sgd": lambda: [momentum(), zf.sgd(0.1)],
    "momentum, squashed, sgd": lambda: [momentum(), squashed(), zf.sgd(0.1)],
    "accumulate, clip, adamw": lambda: [zf.accumulate(3), zf.clip_by_global_norm(1.0), zf.adamw(0.1)],
    "accumulate, lion": lambda: [zf.accumulate(3), zf.lion(0.1)],
    "bf16, lion": lambda: [zf.precision(store_dtype=BF16, rounding="stochastic"), zf.lion(0.1)],
    "masters, adamw": lambda: [zf.precision(param_dtype=BF16, store_dtype="bf16+8"), zf.adamw(0.1)],
    "codes, adamw": lambda: [zf.quantize(zf.adamw(0.1), block=8)],
    "codes, lion": lambda: [zf.quantize(zf.lion(0.1), bits=4, block=8)],
    "clip, low_precision_adam": lambda: [zf.clip_by_global_norm(1.0), zf.low_precision_adam(0.1)],
    "kahan": lambda: [zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1, rounding="kahan")],
    "cautious": lambda: [zf.cautious(zf.scale_by_adam()), zf.scale_by_lr(0.1)],
    "nadam": lambda: [zf.nadam(0.1)],
    "shampoo": lambda: [zf.shampoo(0.1)],
    "schedule_free": lambda: [zf.schedule_free(zf.adamw(0.1))],
    "partition": lambda: [parted()],
    "masked": lambda: [zf.masked(zf.add_decayed_weights(0.1), is_matrix), zf.lion(0.1)],
    "adafactor": lambda: [zf.adafactor(0.1)],
    "clip, adamw, watch": lambda: [zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.watch(moves)],
    "watch": lambda: [zf.lion(0.1), zf.watch(moves)],
}
OVER_RANKS = {
    "all_reduce": lambda: [zf.all_reduce(), zf.clip_by_global_norm(1.0), zf.adamw(0.1)],
    "ZeRO-1": lambda: [zf.accumulate(3), zf.reduce_scatter(), zf.lion(0.1)],
    "ZeRO-2": lambda: [zf.reduce_scatter(), zf.accumulate(3), zf.lion(0.1)],
    "ZeRO-3": lambda: [zf.shard(), momentum(), zf.adamw(0.1)],
    "owners": lambda: [zf.shard(), parted()],
    "owners of gradients": lambda: [zf.reduce_scatter(), zf.masked(unit(), is_matrix), zf.sgd(0.1)],
}


def model(bias=True):
    torch.manual_seed(0)
    # The last bias does not fill vectors: torch's kernel rounds its elements otherwise.
    linear = functools.partial(nn.Linear, bias=bias)
    return nn.Sequential(linear(16, 64), nn.Tanh(), linear(64, 40), nn.Tanh(), linear(40, 7))


def moved(column):
    """The bytes of the tensors of a column."""
    return sum(y.nbytes for x in column for y in (x.tensors if type(x) is Coded else (x,)))


def small(patch):
    """Kernels for small leaves, and several buckets."""
    patch.setattr(lists, "LARGE", 1)
    patch.setattr(fused_adam, "LARGE", 1)
    patch.setattr(executor, "BUCKET_BYTES", 2048)


def bytes_that_run(tx, net, rows=()):
    """The bytes that the C kernels of the last step read and write, by program, and what is said of them."""
    found, run = {}, print_c.run
    opt = zf.attach(net, tx)

    def counted(program, columns, *given, **more):
        # Statistics of rows are no numbers of leaves.
        first = next(column for column in columns if type(column[0]) is not Coded)
        whole = [[x for x, y in zip(column, first, strict=True) if y.numel() not in rows] for column in columns]
        if whole[0]:
            old, read = found.get(program, (0, 0)), program.of_elements(whole[: len(program.loads)])
            found[program] = old[0] + sum(map(moved, read)), old[1] + sum(moved(whole[i]) for i, _ in program.stores)
        return run(program, columns, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        said = zf.describe(opt).passes
        patch.setattr(print_c, "run", counted)
        for _ in range(6):
            for _ in range(math.prod(part.facts.window for part in tx.members)):
                found.clear()
                net(torch.ones(4, 16).to(next(net.parameters()).dtype)).float().square().mean().backward()
                opt.step()
                opt.zero_grad()
    assert not said.why, said.why
    return found, said


def by_program(passes):
    found = {}
    for x in passes:
        if x.program is not None and not x.held:
            old = found.get(x.program, (0, 0))
            found[x.program] = old[0] + x.read, old[1] + x.written
    return found


@pytest.mark.parametrize("name", CHAINS)
def test_bytes_that_are_said_are_those_of_the_kernels_that_run(name):
    # Rows of a matrix have as many statistics as its bias has elements; and there are preconditioners of its sides.
    statistics = {"adafactor": (64, 40, 16, 7, 3, 1), "shampoo": (64**2, 40**2, 16**2, 7**2)}.get(name, ())
    tx = zf.chain(*CHAINS[name]())
    ran, said = bytes_that_run(tx, model(bias=name != "adafactor"), rows=statistics)
    assert by_program(said.rows) == ran and ran


@pytest.mark.parametrize("name", row_params("laws", ROWS))
def test_the_passes_of_every_transform_are_known(name):
    tx = ROWS[name].trained(LAYERS)
    table = zf.plan(tx, model())
    assert not table.passes.why and table.passes.rows
    assert repr(table).endswith(repr(table.passes)) and table._repr_html_()


def over_ranks(name):
    rank = torch.distributed.get_rank()
    tx = zf.chain(*OVER_RANKS[name]())
    ran, said = bytes_that_run(tx, model())
    planned = zf.plan(tx, model(), world_size=2, rank=rank)
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        return [sorted(x.values()) for x in (by_program(planned.passes.rows), by_program(said.rows), ran)]


@functools.cache
def all_results():
    return one_launch(2, over_ranks, [(name,) for name in OVER_RANKS])


@pytest.mark.parametrize("name", OVER_RANKS)
def test_each_rank_runs_the_kernels_that_are_said_of_it(name):
    for planned, said, ran in all_results()[name,]:
        assert planned == said == ran != []


def passes(tx, params, **more):
    table = zf.plan(tx, params, **more)
    assert not table.passes.why
    return [(x.transforms, x.by, len(x.leaves), x.reads, x.writes, x.held) for x in table.passes.rows]


def large(rest=()):
    return {"w": torch.empty(1024, 1024, device="meta"), "v": torch.empty(*rest, 300, device="meta")}


def test_a_plan_says_what_is_joined_and_what_runs_by_torch():
    tx = zf.chain(momentum(), squashed(), zf.clip_by_value(1.0), zf.sgd(0.1))
    assert passes(tx, large((512,))) == [
        (("momentum",), "one kernel", 2, 8, 4, False),
        (("clip_by_value", "sgd"), "one kernel", 2, 8, 4, False),
        (("squashed",), "torch's operations", 2, 0, 0, False),
    ]


def test_a_plan_says_what_is_looked_at_before_and_what_a_held_micro_step_does():
    tx = zf.chain(zf.accumulate(4), zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.ema(0.9))
    # 300 elements fill no vectors: torch's kernel rounds the last 12, so that leaf is updated apart.
    assert passes(tx, large()) == [
        (("accumulate",), "one kernel", 2, 8, 4, True),
        (("clip_by_global_norm",), "a look at gradients", 2, 4, 0, False),
        (("accumulate",), "one kernel", 2, 8, 4, False),
        (("clip_by_global_norm", "adamw", "ema"), "one kernel", 1, 20, 16, False),
        (("clip_by_global_norm",), "torch's operations", 1, 0, 0, False),
        (("adamw",), "torch's operations", 1, 0, 0, False),
        (("ema",), "torch's operations", 1, 0, 0, False),
    ]


def test_old_parameters_that_are_watched_stay_in_registers():
    tx = zf.chain(zf.accumulate(2), zf.clip_by_value(1.0), zf.lion(0.1), zf.watch(moves))
    assert passes(tx, large((512,))) == [
        (("accumulate",), "one kernel", 2, 8, 4, True),
        (("accumulate", "clip_by_value", "lion", "watch"), "one kernel", 2, 16, 12, False),
    ]


def test_small_leaves_run_by_torch():
    assert passes(zf.lion(0.1), {"w": torch.empty(255, 257)})[-1] == (("lion",), "torch's operations", 1, 0, 0, False)
    assert passes(zf.lion(0.1), {"w": torch.empty(256, 256)}) == [(("lion",), "one kernel", 1, 12, 8, False)]


SHOWN = """
passes of a step  by                  leaves  of each number     read  written
momentum          one kernel          all 2   8 + 4 B         9.2 MiB  4.6 MiB
sgd               one kernel          all 2   8 + 4 B         9.2 MiB  4.6 MiB
squashed          torch's operations  all 2   -                     -        -
squashed is no kernel: tanh, in squashed, line LINE of test_passes.py: return grad.tanh()
2 passes read 18.3 MiB and write 9.2 MiB, and torch's operations
"""


def test_what_a_plan_and_an_attached_model_show():
    tx = zf.chain(momentum(), squashed(), zf.sgd(0.1))
    table = zf.plan(tx, large((512,)))
    line = str(LINE_OF_TANH)
    assert repr(table.passes).splitlines() == SHOWN.replace("LINE", line).strip().splitlines()
    assert repr(table).endswith(repr(table.passes)) and "momentum" in table._repr_html_()
    opt = zf.attach(nn.Linear(512, 512, bias=False), tx)
    before = torch.get_rng_state()
    shown = zf.describe(opt)
    assert repr(shown).endswith(repr(shown.passes)) and len(shown.passes.rows) == len(table.passes.rows)
    assert torch.equal(before, torch.get_rng_state())
    assert zf.describe(opt.state).passes is None


def test_a_table_pickles_with_its_passes_and_without_the_chain():
    mine = zf.leafwise(lambda grad, param: 2 * grad, needs="element")
    table = zf.plan(zf.chain(mine(), zf.sgd(0.1)), large())
    again = pickle.loads(pickle.dumps(table))
    assert again == table and repr(again) == repr(table) and again.passes == table.passes


def test_another_thread_trains_by_its_kernels_while_somebody_looks(monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 1)
    ran, said, run = [], [], print_c.run
    monkeypatch.setattr(print_c, "run", lambda *given, **more: ran.append(get_ident()) or run(*given, **more))
    opt = zf.attach(net := model(), zf.chain(zf.lion(0.1), zf.ema(0.9)))

    def train():
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        opt.step()

    @zf.leafwise(needs="element")
    def meanwhile(grad, param):
        thread = Thread(target=train)
        thread.start()
        thread.join()
        said.append(thread.ident)
        return 2 * grad

    rows = zf.plan(zf.chain(meanwhile(), zf.sgd(0.1)), large()).passes.rows
    assert {name for x in rows for name in x.transforms} <= {"meanwhile", "sgd", "grad_norm"}
    assert said and set(ran) == set(said)


def test_a_function_that_raises_on_small_tensors_spoils_no_table():
    @zf.leafwise
    def wide(grad, param):
        return grad[:, :300].repeat(1, 2)

    table = zf.plan(zf.chain(wide(), zf.sgd(0.1)), {"w": torch.empty(300, 600)})
    assert table.bytes and not table.passes.rows
    assert repr(table).splitlines()[-1].startswith("passes of a step: not known, since a step on small tensors raised")
