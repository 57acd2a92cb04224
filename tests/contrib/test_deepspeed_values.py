"""Every value that a DeepSpeed configuration may hold: what is none of its kind is refused by its path."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import Refusals

import zerofn as zf

TEXT = ["", "3", "true", "no", [], [1], [None]]
FLAGS = [*TEXT, 0, 1, 2.0, None]
COUNTS = [*TEXT, 0, -1, 1.0, 2.5, True, False, math.nan, math.inf, 1 << 63]
FROM_ZERO = [*TEXT, -1, 0.0, 2.5, True, False, None, math.nan]
NUMBERS = [*TEXT, -1, -0.5, True, False, math.nan, math.inf, -math.inf, 1e39, None]
POSITIVE = [*NUMBERS, 0, 0.0]
DECAYS = [*NUMBERS, 1, 1.0, 1.5]
PAIRS = [*TEXT, 0.9, None, [0.9], [0.9, 0.9, 0.9], [0.9, 1.0], [math.nan, 0.9], [True, 0.9], ["0.9", "0.9"]]

# By path: values that must be refused; a null where it would be as if the key were absent is left out.
BAD = {
    "gradient_accumulation_steps": COUNTS,
    "train_batch_size": COUNTS,
    "train_micro_batch_size_per_gpu": COUNTS,
    "gradient_clipping": NUMBERS,
    "zero_optimization.stage": [*TEXT, -1, 4, True, False, 1.0, None],
    "fp16.enabled": FLAGS,
    "fp16.loss_scale": NUMBERS,
    "fp16.initial_scale_power": [*NUMBERS, 128, 1000],
    "fp16.loss_scale_window": [*COUNTS, None],
    "fp16.hysteresis": [*COUNTS, None],
    "fp16.min_loss_scale": [*POSITIVE, 1e30],
    "fp16.fp16_master_weights_and_grads": FLAGS,
    "bf16.enabled": FLAGS,
    "bf16.bf16_master_weights_and_grads": FLAGS,
    "bf16.bf16_optimizer_states": FLAGS,
    "bf16.check_grad_overflow": FLAGS,
    "torch_autocast.enabled": FLAGS,
    "communication_data_type": ["int8", 16, True, [], ["fp16"]],
    "data_types.grad_accum_dtype": ["int8", 16, True, [], ["fp16"]],
    "zero_optimization.offload_optimizer.device": ["disk", "", 1, True, ["cpu"], None],
    "zero_optimization.offload_param.device": ["disk", "", 1, True, ["cpu"]],
    "optimizer.type": ["", "Lamp", 3, True, ["AdamW"]],
    "optimizer.params.lr": NUMBERS,
    "optimizer.params.betas": PAIRS,
    "optimizer.params.eps": NUMBERS,
    "optimizer.params.weight_decay": NUMBERS,
    "optimizer.params.adam_w_mode": FLAGS,
    "optimizer.params.amsgrad": [True, 1, "no"],
    "optimizer.params.bias_correction": FLAGS,
    "optimizer.params.max_grad_norm": NUMBERS,
    "scheduler.type": ["", "Nope", 3, True, ["WarmupLR"]],
}
SGD = {"momentum": DECAYS, "dampening": [*NUMBERS, 1.5], "weight_decay": NUMBERS, "nesterov": FLAGS}
SCHEDULERS = {
    "WarmupLR": {
        "warmup_min_lr": NUMBERS,
        "warmup_max_lr": NUMBERS,
        "warmup_num_steps": FROM_ZERO,
        "warmup_type": ["", "cosine", None, 3, True, ["log"]],
    },
    "WarmupDecayLR": {"total_num_steps": [*COUNTS, None], "warmup_num_steps": FROM_ZERO, "warmup_max_lr": NUMBERS},
    "WarmupCosineLR": {
        "total_num_steps": [*COUNTS, None],
        "warmup_min_ratio": NUMBERS,
        "warmup_num_steps": FROM_ZERO,
        "cos_min_ratio": NUMBERS,
    },
    "OneCycle": {
        "cycle_min_lr": NUMBERS,
        "cycle_max_lr": NUMBERS,
        "cycle_first_step_size": [*COUNTS, None],
        "cycle_second_step_size": COUNTS,
        "cycle_first_stair_count": FROM_ZERO,
        "cycle_second_stair_count": [x for x in FROM_ZERO if x is not None],
        "decay_lr_rate": NUMBERS,
        "decay_step_size": FROM_ZERO,
        "cycle_momentum": [x for x in FLAGS if x is not False],
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": NUMBERS,
        "lr_range_test_step_size": [*COUNTS, None],
        "lr_range_test_step_rate": NUMBERS,
        "lr_range_test_staircase": FLAGS,
    },
}
NEEDED = {
    "WarmupDecayLR": {"total_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False},
}


def at(path: str, value, config: dict) -> dict:
    """`config` with `value` at a dotted path."""
    config = json.loads(json.dumps(config))
    *blocks, last = path.split(".")
    inner = config
    for name in blocks:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return config


CASES = [(path, bad, {"optimizer": {"type": "AdamW"}}) for path, bad in BAD.items()]
LAMB = {"min_coeff": NUMBERS, "max_coeff": NUMBERS, "eps_inside_sqrt": [True, 1, "no"], "bias_correction": FLAGS}
for kind, keys in (("SGD", SGD), ("Lamb", LAMB)):
    CASES += [(f"optimizer.params.{k}", bad, {"optimizer": {"type": kind, "params": {}}}) for k, bad in keys.items()]
for kind, keys in SCHEDULERS.items():
    block = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": kind, "params": NEEDED.get(kind, {})}}
    CASES += [(f"scheduler.params.{k}", bad, block) for k, bad in keys.items()]


@pytest.mark.parametrize(("path", "bad", "config"), CASES)
@given(data=st.data())
def test_a_value_of_another_kind_is_refused_by_its_path(path, bad, config, data):
    value = data.draw(st.sampled_from(bad))
    with pytest.raises(ValueError, match="from_deepspeed: keys without a transform") as caught:
        zf.from_deepspeed(at(path, value, config))
    lines = str(caught.value).splitlines()
    assert any(line.startswith(f"  {path}: ") for line in lines)
    assert lines[-1] == "  write: each key as its line says, or leave it out"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"optimizer": {"type": "AdamW", ', "Expecting property name"),
        ("", "Expecting value"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "keys twice in a block: 'enabled'"),
        ("\xff\xfe", "codec can't decode"),
    ],
)
def test_a_file_that_is_no_configuration(text, reason, tmp_path):
    """Cut short, empty, with a key twice, or no text: the file is named."""
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode("latin-1"))
    for given_as in (path, str(path)):
        with pytest.raises(ValueError, match="the file cannot be read as JSON") as caught:
            zf.from_deepspeed(given_as)
        assert str(caught.value).startswith(f"from_deepspeed({str(path)!r})") and reason in str(caught.value)


# ---- refused ----

ROWS = Refusals()


for _path in sorted({p.rpartition(".")[0] for p in BAD} - {""}):
    ROWS.rows(
        ValueError,
        (
            lambda path=_path: zf.from_deepspeed(at(path, True, {})),
            re.compile(f"  {_path}: (True is not a dict|'AdamW' is not a dict|unknown)"),
        ),
    )


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
