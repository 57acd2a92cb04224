"""How chains, schedules and states are shown: as one would write them, and in a notebook as small pictures."""

from __future__ import annotations

import io
import pickle
from html.parser import HTMLParser

import optree
import public_names
import pytest
import torch
from hypothesis import given, settings
from random_programs import pipelines
from time_limits import limit

import zerofn as zf
from zerofn import schedules
from zerofn.core.html import BYTES, SECONDS, table  # inside: what every notebook's tables are made of

NAMES = {**public_names.NAMES, "torch": torch, "schedules": schedules}


class Shape(HTMLParser):
    """Tags that were opened and not closed, and all text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@settings(max_examples=40)
@given(pipelines())
def test_a_chain_prints_as_one_would_write_it(parts):
    # A mask that is a function prints as its name.
    parts = [p for p in parts if p.name not in ("masked", "partition")]
    for tx in (zf.chain(*parts), *parts):
        assert eval(repr(tx), dict(NAMES)) == tx


def test_defaults_are_left_out_and_nothing_else():
    assert repr(zf.shard()) == "shard()"
    assert repr(zf.accumulate(4)) == "accumulate(every=4)"
    assert repr(zf.adamw(0.002, betas=(0.9, 0.95))) == "adamw(lr=0.002, betas=(0.9, 0.95))"
    # True is 1 to Python, and is not how one would write it.
    assert repr(zf.scale_loss(hysteresis=2)) == "scale_loss(hysteresis=2)"
    assert repr(zf.sgd(0.1).named("head")) == "sgd(lr=0.1).named('head')"


def test_transforms_with_tensors_among_their_arguments_compare_by_their_numbers():
    @zf.leafwise(needs="element")
    def weighted(grad, param, *, by):
        return grad * by

    assert weighted(by=torch.ones(3)) == weighted(by=torch.ones(3))
    assert weighted(by=torch.ones(3)) != weighted(by=torch.tensor([1.0, 1.0, 2.0]))
    assert weighted(by=torch.ones(3)) != weighted(by=torch.ones(2))
    assert zf.chain(weighted(by={"a": torch.ones(2)}), zf.sgd(1)) == zf.chain(
        weighted(by={"a": torch.ones(2)}), zf.sgd(1.0)
    )


SCHEDULES = {
    "constant": schedules.constant(0.1),
    "linear": schedules.linear(1.0, 0.0, 4),
    "warmup": schedules.warmup(3e-4, 10),
    "warmup of one": schedules.warmup(3e-4, 1),
    "cosine": schedules.cosine(1.0, 10, 0.1),
    "warmup_cosine": schedules.warmup_cosine(3e-4, 10, 100),
    "step": schedules.step(1.0, 10, 0.5),
    "layer_keep": schedules.layer_keep(0.5, 0.01),
    "by hand": schedules.Piecewise(schedules.constant(0.1), 5, schedules.linear(0.1, 0.0, 20)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_print_as_one_would_write_them(name):
    schedule = SCHEDULES[name]
    again = eval(repr(schedule), dict(NAMES))
    assert again == schedule and repr(again) == repr(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert "0000000" not in repr(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_a_curve(name):
    html = SCHEDULES[name]._repr_html_()
    shape = Shape(html)
    assert not shape.open and "<polyline" in html
    values = [SCHEDULES[name](i) for i in range(SCHEDULES[name].length + 1)]
    assert f"{max(values):.4g}" in shape.text


def test_a_chain_is_a_road():
    shape = Shape(zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.adamw(0.5))._repr_html_())
    assert not shape.open
    # Arguments are to be seen without a mouse.
    assert "model→shard→clip_by_global_normmax_norm=1.0→adamwlr=0.5→state" in shape.text


def test_what_is_shown_is_text_and_no_markup():
    tx = zf.sgd(0.1).named("<b>")
    shape = Shape(zf.chain(tx)._repr_html_())
    assert "<b>" in shape.text and "b" not in shape.open


def test_states_and_tables_show_their_bytes_as_bars():
    tx = zf.adamw(1e-3)
    state = zf.init(tx, {"w": torch.zeros(1000)})
    for shown in (state, zf.describe(state), zf.plan(tx, {"w": torch.zeros(1000)})):
        html = shown._repr_html_()
        shape = Shape(html)
        assert not shape.open and "adamw" in shape.text and "params" in shape.text and "float32" in shape.text
        # Two moments and the counters, beside the parameters: the longest bar has 200 points.
        assert "width:200px" in html and "width:100px" in html
        # One unit for the table, which is that of its largest row.
        assert "KiB" in shape.text and "3.91" in shape.text and ">0.00" not in html.replace("state", "")


def shown_on_a_rank():
    """The state of one step sharded, and of one replicated."""
    chains = [zf.chain(reduce(), zf.adamw(1e-3)) for reduce in (zf.reduce_scatter, zf.all_reduce)]
    return [zf.attach(torch.nn.Linear(64, 64), tx).state._repr_html_() for tx in chains]


def test_states_show_what_a_rank_has_whole_and_what_as_a_shard():
    for sharded, replicated in zf.launch(shown_on_a_rank, 2, timeout=limit()):
        assert sharded.count("shard<") == 2 and replicated.count("whole<") == 2
        assert "whole<" not in sharded and "shard<" not in replicated
    stacked = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *[zf.init(zf.sgd(1.0), {"w": torch.ones(3)})] * 2)
    assert "whole" in stacked._repr_html_() and "shard" not in stacked._repr_html_()


def test_seconds_have_digits_and_whole_numbers_have_none():
    assert ">1.25<" in table(["phase"], [(["forward"], 1.25)], SECONDS)
    assert ">1<" in table(["part"], [(["step"], 1.0)], BYTES)


def test_what_has_no_bytes_has_no_row():
    state = zf.init(
        zf.chain(zf.clip_by_global_norm(1.0), zf.sgd(0.1)), {"w": torch.zeros(1000), "none": torch.zeros(0)}
    )
    for shown in (state, zf.describe(state)):
        html = shown._repr_html_()
        assert ">clip_by_global_norm<" not in html and ">params<" in html


def test_an_attached_model_shows_its_chain_its_metrics_and_its_state():
    model = torch.nn.Linear(3, 2)
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-3)))
    assert "grad_norm" not in Shape(opt._repr_html_()).text
    model(torch.ones(3)).sum().backward()
    opt.step()
    shape = Shape(opt._repr_html_())
    assert not shape.open
    for word in ("Linear, attached", "model→clip_by_global_norm", "grad_norm", "step 1", "float32", "bytes"):
        assert word in shape.text, word


def test_metrics_are_a_dict_that_is_shown_as_a_table():
    model = torch.nn.Linear(3, 2)
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-3)))
    assert "none yet" in Shape(opt.metrics._repr_html_()).text
    model(torch.ones(3)).sum().backward()
    opt.step()
    shape = Shape(opt.metrics._repr_html_())
    assert not shape.open and "metrics of the last step" in shape.text
    for name, x in opt.metrics.items():
        assert name in shape.text and f"{x.item():.4g}" in shape.text, name
    # What takes a dict takes it: both kinds of trees, a file without its class, a compiler.
    plain = {name: float(x) for name, x in opt.metrics.items()}
    assert torch.utils._pytree.tree_map(float, opt.metrics) == plain
    assert optree.tree_map(float, opt.metrics) == plain
    by_name = [plain[name] for name in sorted(plain)]
    assert list(map(float, torch.utils._pytree.tree_leaves(opt.metrics))) == by_name != list(plain.values())
    zf.testing.assert_trees_equal(opt.metrics, dict(opt.metrics))
    file = io.BytesIO()
    torch.save(opt.metrics, file)
    file.seek(0)
    assert {name: float(x) for name, x in torch.load(file).items()} == plain
    doubled = torch.compile(lambda metrics: 2 * metrics["grad_norm"], backend="eager", fullgraph=True)
    assert doubled(opt.metrics) == 2 * plain["grad_norm"]
