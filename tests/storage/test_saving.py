"""Saves that go on beside training, and the saves of a run: which are kept, and which one is resumed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.storage import files as manifest  # inside: its locks and files are looked at and broken
from zerofn.storage import pieces as writing  # inside: a save is stopped while it writes
from zerofn.storage import saving as saves_of  # inside: a save is stopped while it writes
from zerofn.testing import assert_trees_equal

TX = zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.adamw(0.1))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def train(model, opt, first, last):
    for i in range(first, last):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def kept(model, opt):
    return {
        **{k: x.clone() for k, x in zf.full_params(opt.tx, opt.state).items()},
        "mean": model[1].running_mean.clone(),
    }


class Held:
    """Data files are written only once they may be."""

    def __init__(self, monkeypatch):
        self.may, self.began, write = threading.Event(), threading.Event(), writing._Writer.write_data

        def held(writer, name, pieces):
            self.began.set()
            assert self.may.wait(limit())
            return write(writer, name, pieces)

        monkeypatch.setattr(writing._Writer, "write_data", held)


def test_what_is_saved_is_what_was_there_when_it_was_called(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    model = make()
    opt = zf.attach(model, TX)
    train(model, opt, 0, 2)
    before = kept(model, opt)
    saving = zf.save(tmp_path / "a", opt, wait=False)
    assert held.began.wait(limit()) and not saving.done and "under way" in repr(saving)
    with pytest.raises(TimeoutError, match="it goes on"):
        saving.wait(0.01)
    # In place, in the tensors that are being saved.
    train(model, opt, 2, 4)
    after = kept(model, opt)
    assert not torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["mean"], after["mean"])
    held.may.set()
    saving.wait()
    assert saving.done and "done" in repr(saving)
    again = make()
    other = zf.attach(again, TX)
    zf.load(tmp_path / "a", other)
    assert_trees_equal(kept(again, other), before)
    train(again, other, 2, 4)
    assert_trees_equal(kept(again, other), after)


def test_the_next_save_and_load_wait(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    state = zf.init(zf.sgd(0.1), {"w": torch.ones(3)})
    first = zf.save(tmp_path, state, wait=False)
    threading.Timer(0.2, held.may.set).start()
    # Without waiting it would find no checkpoint.
    assert torch.equal(zf.load(tmp_path, state).params["w"], state.params["w"]) and first.done


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_is_raised_by_wait_and_the_old_one_is_there(tmp_path, monkeypatch):
    state = zf.init(zf.sgd(0.1), {"w": torch.ones(3)})
    zf.save(tmp_path, state)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(writing._Writer, "write_data", full)
        new, _ = zf.update(zf.sgd(0.1), {"w": torch.ones(3)}, state)
        saving = zf.save(tmp_path, new, wait=False)
        with pytest.raises(OSError, match="could not write"):
            saving.wait()
    assert "failed" in repr(saving)
    assert torch.equal(zf.load(tmp_path, state).params["w"], state.params["w"])


@pytest.mark.slow
def test_the_process_does_not_end_before(tmp_path):
    code = f"""
import torch, zerofn as zf
zf.save({str(tmp_path)!r}, zf.init(zf.sgd(0.1), {{"w": torch.arange(3.0)}}), wait=False)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=limit())
    assert done.returncode == 0 and not done.stderr, done.stderr
    state = zf.load(tmp_path, zf.init(zf.sgd(0.1), {"w": torch.zeros(3)}))
    assert state.params["w"].tolist() == [0.0, 1.0, 2.0]


def on_ranks(root):
    """Saves beside steps that send over ranks; the last one ends after the function."""
    model = make()
    opt = zf.attach(model, TX)
    saves, found = zf.Checkpoints(root, last=2, best=1), {}
    for i in range(5):
        train(model, opt, i, i + 1)
        found[i + 1] = kept(model, opt)
        saves.save(opt, score=[5.0, 1.0, 4.0, 3.0, 2.0][i], wait=False)
    return found


def resumed(root):
    model = make()
    opt = zf.attach(model, TX)
    saves = zf.Checkpoints(root, last=2, best=1)
    saves.load(opt)
    return saves.steps, saves.best, int(opt.state.step), kept(model, opt)


def test_on_ranks_and_for_another_number_of_them(tmp_path):
    found = zf.launch(on_ranks, 2, str(tmp_path), timeout=limit())
    for world in (1, 3):
        ranks = zf.launch(resumed, world, str(tmp_path), timeout=limit())
        for steps, best, step, params in ranks:
            assert (steps, best, step) == ([2, 4, 5], 2, 5)
            # Buffers are the first rank's.
            assert_trees_equal(params, found[0][5])


def refused_on_a_rank(directory):
    """A tensor that the first rank has without elements and the second with one; no rank may wait for the other."""
    import torch.distributed as dist

    state = zf.init(zf.chain(zf.all_reduce(), zf.sgd(0.1)), {"w": torch.ones(3)})
    transforms = {**state.transforms, "other": {"table": torch.zeros(dist.get_rank())}}
    try:
        zf.save(directory, zf.State(state.leaves, transforms, state.step, state.micro_step, state.layout))
    except ValueError as error:
        return str(error)


def kept_on_ranks(root):
    """The steps that each rank sees at once after saves, and what a score of each rank's own gives."""
    import torch.distributed as dist

    tx, saves = zf.chain(zf.all_reduce(), zf.sgd(0.1)), zf.Checkpoints(root, last=1)
    state, seen, told = zf.init(tx, {"w": torch.ones(3)}), [], ""
    for _ in range(4):
        state, _ = zf.update(tx, {"w": torch.ones(3)}, state)
        saves.save(state, score=1.0)
        seen.append(saves.steps)
    try:
        saves.save(state, score=float(dist.get_rank()))
    except ValueError as error:
        told = str(error)
    return seen, told


def test_ranks_keep_the_same_saves_and_give_the_same_score(tmp_path):
    for seen, told in zf.launch(kept_on_ranks, 2, str(tmp_path), timeout=limit(60)):
        assert seen == [[1], [2], [3], [4]]
        assert "score=0.0 on rank 0, score=1.0 on rank 1" in told and "a save has one score" in told


def test_what_only_some_ranks_have_is_refused_on_all(tmp_path):
    for told in zf.launch(refused_on_a_rank, 2, str(tmp_path), timeout=limit(60)):
        assert "other/table: differs between ranks" in told


# ------------------------------------------------------------------------------------------------ which are kept


def run(saves, scores, first=1):
    state = zf.init(zf.sgd(1.0), {"w": torch.zeros(2)})
    for step, score in enumerate(scores, first):
        state = zf.State(state.leaves, state.transforms, torch.tensor(step), state.micro_step, state.layout)
        saves.save(state, score=score)
    return state


@pytest.mark.parametrize(
    ("options", "scores", "want"),
    [
        ({"last": 2}, [None] * 5, [4, 5]),
        ({"last": 1, "best": 2}, [3.0, 1.0, 2.0, 4.0], [2, 3, 4]),
        ({"last": 1, "best": 1, "largest": True}, [3.0, 9.0, 2.0, 4.0], [2, 4]),
        ({"last": 1, "best": 1}, [1.0, 1.0, 2.0], [2, 3]),
        ({"last": 1, "best": 1}, [float("nan"), 5.0, float("inf"), None], [2, 4]),
        ({"last": 1, "best": 2}, [None, torch.tensor(1.0), float("nan")], [2, 3]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, options, scores, want):
    saves = zf.Checkpoints(tmp_path / "run", **options)
    assert saves.steps == [] and saves.best is None
    run(saves, scores)
    assert saves.steps == want
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [f"step_{step:09d}" for step in want]


def test_the_newest_that_is_whole_is_resumed(tmp_path):
    saves = zf.Checkpoints(tmp_path, last=4)
    like = zf.init(zf.sgd(1.0), {"w": torch.zeros(2)})
    assert saves.load(like) is None
    run(saves, [None] * 4)
    # The last was cut off before its table was in place; of the one before a file is cut; both are passed over.
    (saves.at(4) / "zerofn.json").unlink()
    data = next(p for p in saves.at(3).iterdir() if p.suffix == ".distcp")
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.warns(RuntimeWarning, match="is damaged; the one before it is tried"):
        state = saves.load(like)
    assert state is not None and int(state.step) == 2
    # A table that cannot be read.
    (saves.at(2) / "zerofn.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="is damaged"):
        state = saves.load(like)
    assert state is not None and int(state.step) == 1
    # Of another model: that is no damage.
    with pytest.raises(ValueError, match="does not fit"):
        saves.load(zf.init(zf.sgd(1.0), {"w": torch.zeros(3)}))


def test_a_run_that_was_begun_again_at_an_earlier_step_goes_on_from_there(tmp_path):
    saves = zf.Checkpoints(tmp_path, last=2)
    run(saves, [None] * 4)
    run(saves, [None], first=3)
    assert saves.steps == [4, 3]
    state = saves.load(zf.init(zf.sgd(1.0), {"w": torch.zeros(2)}))
    assert state is not None and int(state.step) == 3


def test_what_is_not_of_a_save_is_left_alone(tmp_path):
    saves = zf.Checkpoints(tmp_path, last=1)
    run(saves, [None])
    (saves.at(1) / "notes.txt").write_text("mine")
    (tmp_path / "step_000000000_mine").mkdir()
    run(saves, [None], first=2)
    assert saves.steps == [2] and [p.name for p in saves.at(1).iterdir()] == ["notes.txt"]
    assert Path(tmp_path / "step_000000000_mine").is_dir()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("format version 99")])
def test_one_that_cannot_be_read_is_not_removed(tmp_path, monkeypatch, error):
    """A disk that fails for a moment, or a table of a newer zerofn, must not cost the best checkpoint of a run."""
    saves = zf.Checkpoints(tmp_path, last=1, best=1)
    run(saves, [1.0, 3.0])
    read = manifest.read

    def failing(directory):
        if directory == saves.at(1):
            raise error
        return read(directory)

    with monkeypatch.context() as m:
        m.setattr(manifest, "read", failing)
        run(saves, [2.0], first=3)
    assert saves.steps == [1, 3] and saves.best == 1


def test_a_path_is_relative_to_where_it_was_given(tmp_path, monkeypatch):
    """The process is elsewhere by the time that a save beside training is written."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    state = zf.init(zf.adamw(0.1), {"w": torch.ones(2)})
    go, inside = threading.Event(), threading.Event()
    write = saves_of.save_pieces

    def slow(*args):
        inside.set()
        assert go.wait(limit())
        return write(*args)

    monkeypatch.setattr(saves_of, "save_pieces", slow)
    monkeypatch.chdir(here)
    saves = zf.Checkpoints("runs")
    saving = zf.save("net", state, wait=False)
    assert inside.wait(limit())
    monkeypatch.chdir(there)
    go.set()
    saving.wait()
    saves.save(state)
    assert sorted(x.name for x in here.iterdir()) == ["net", "runs"] and not list(there.iterdir())
    assert zf.load(here / "net", like=state).step == 0
