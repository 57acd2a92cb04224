"""Manifests, data files and DeepSpeed checkpoints that somebody has written otherwise than a save does are refused as
damaged before they are read; one of them stops none of the others in its folder."""

import io
import json
import pathlib
import random
import tempfile
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import zerofn as zf
from zerofn.storage.files import Damaged, _checksum  # inside: whoever writes a file writes its checksum too

TX = zf.adamw(0.1)
START = {"w": torch.zeros(3, 2), "b": torch.zeros(4)}


def saved(directory):
    zf.save(directory, zf.init(TX, START))
    return json.loads((pathlib.Path(directory) / "zerofn.json").read_text())


def rewrite(directory, body):
    """Write a manifest, with the checksum that fits it."""
    body = {key: x for key, x in body.items() if key != "checksum"}
    text = json.dumps({**body, "checksum": _checksum(body)})
    (pathlib.Path(directory) / "zerofn.json").write_text(text)


def places_in(x, keys=()):
    yield keys
    for key, y in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from places_in(y, (*keys, key))


def replaced(x, keys, new):
    if not keys:
        return new
    if isinstance(x, dict):
        return {k: replaced(y, keys[1:], new) if k == keys[0] else y for k, y in x.items()}
    return [replaced(y, keys[1:], new) if i == keys[0] else y for i, y in enumerate(x)]


SPECIAL = [-5, 1e30, 10**400, float("nan"), 2**62, 2**63, "", "float32", "uint7", "nn", "../x", {}, []]
ODD = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.floats(),
    some.sampled_from(SPECIAL),
    some.recursive(
        some.integers(), lambda x: some.lists(x) | some.dictionaries(some.text(max_size=3), x), max_leaves=6
    ),
)


@settings(max_examples=100, deadline=None)
@given(seed=some.integers(0, 2**31), new=ODD)
def test_any_place_of_a_manifest(seed, new):
    with tempfile.TemporaryDirectory() as directory:
        body = saved(directory)
        at = random.Random(seed).choice([keys for keys in places_in(body) if keys and keys[0] != "checksum"])
        rewrite(directory, replaced(body, at, new))
        try:
            state = zf.load(directory, like=zf.init(TX, START))
        except ValueError as error:
            # A name, a shape or a dtype that is of another model; else it is damaged, or of another version.
            assert isinstance(error, Damaged) or "fit" in str(error) or "version" in str(error), repr(error)
            assert "weights_only=False" not in str(error)
        else:
            assert all(torch.equal(x, START[path]) for path, x in state.leaves.items())


TEXTS = ["[" * 200_000, '{"a":' * 100_000, "\x00\x01", "", "{}", "null", "1e999", "[1" + "0" * 9000]


@pytest.mark.parametrize("text", TEXTS, ids=lambda x: repr(x[:8]))
def test_one_bad_folder_of_several(text, tmp_path):
    saves, state = zf.Checkpoints(tmp_path, last=5), zf.init(TX, START)
    ones = {p: torch.ones_like(x) for p, x in START.items()}
    for _ in range(3):
        state, _ = zf.update(TX, ones, state)
        saves.save(state)
    (saves.at(2) / "zerofn.json").write_text(text)
    with pytest.raises(Damaged):
        zf.load(saves.at(2), like=state)
    assert sorted(saves.steps) == [1, 2, 3]
    loaded = saves.load(like=state)
    assert loaded is not None and torch.equal(loaded.leaves["w"], state.leaves["w"])
    state, _ = zf.update(TX, ones, state)
    saves.save(state)
    assert 4 in saves.steps


def compressed(content):
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for x in old.infolist():
            new.writestr(x.filename, old.read(x))
    return out.getvalue()


def archive(x):
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


CONTENTS = {
    "compressed": compressed(archive(torch.zeros(1 << 20))),
    "a larger tensor": archive(torch.zeros(7)),
    "another dtype": archive(torch.zeros(6, dtype=torch.int8)),
    "a dict": archive({"a": torch.zeros(6)}),
    "a class": archive(torch.nn.Linear(2, 2)),
    "a pickle": b"cos\nsystem\n(S'true'\ntR.",
    "nothing": b"",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_contents_of_data_files(kind, tmp_path):
    body = saved(tmp_path)
    content = CONTENTS[kind]
    chunk = body["tensors"]["params/w"]["chunks"][0]
    (tmp_path / "0123456789ab_9_0.distcp").write_bytes(content)
    chunk[2:] = ["0123456789ab_9_0.distcp", 0, len(content), zlib.crc32(content)]
    rewrite(tmp_path, body)
    with pytest.raises(Damaged) as caught:
        zf.load(tmp_path, like=zf.init(TX, START))
    assert "weights_only=False" not in str(caught.value)


def attached():
    torch.manual_seed(0)
    return zf.attach(torch.nn.Linear(2, 1, bias=False), zf.adamw(0.1))


def universal(directory, files):
    folder = directory / "zero" / "weight"
    folder.mkdir(parents=True)
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"param": torch.ones(1, 2)}, folder / f"{name}.pt")
    if "zero/optimizer_state.pt" not in files:
        torch.save(torch.tensor(7.0), folder / "step.pt")
    for name, content in files.items():
        (directory / name).write_bytes(content if isinstance(content, bytes) else archive(content))


BAD_COUNTS = [-5, float("nan"), 1e30, float("inf"), 0.5, True, "7", [7], {"a": 1}, torch.ones(2), torch.tensor(-1.0)]


@pytest.mark.parametrize("bad", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("name", ["zero/weight/step.pt", "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"])
def test_counts_of_deepspeed(name, bad, tmp_path):
    contents = {
        "zero/weight/step.pt": bad,
        "mp_rank_00_model_states.pt": {"global_steps": bad, "module": {}, "param_shapes": []},
        "zero/optimizer_state.pt": {"optimizer_state_dict": {"state": {0: {"step": bad}}}},
    }
    universal(tmp_path, {name: contents[name]})
    opt = attached()
    before = opt.state.leaves["weight"].clone()
    with pytest.raises(Damaged):
        zf.load_deepspeed(tmp_path, like=opt)
    assert torch.equal(opt.state.leaves["weight"], before)


FILES = ["zero/weight/exp_avg.pt", "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"]


@pytest.mark.parametrize("kind", ["compressed", "a pickle", "nothing", "noise"])
@pytest.mark.parametrize("name", FILES)
def test_files_of_deepspeed(name, kind, tmp_path):
    universal(tmp_path, {name: CONTENTS[kind]})
    with pytest.raises(Damaged) as caught:
        zf.load_deepspeed(tmp_path, like=attached())
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("content", [[1], "text", 3, {"module": 3}, {"param_shapes": 3}, {"buffer_names": 3}], ids=repr)
@pytest.mark.parametrize("name", FILES[1:])
def test_containers_of_deepspeed(name, content, tmp_path):
    universal(tmp_path, {name: content})
    try:
        zf.load_deepspeed(tmp_path, like=attached())
    except ValueError as error:
        assert isinstance(error, Damaged) or "does not fit" in str(error), error
