"""SOAP, Muon, schedule-free AdamW and 8-bit AdamW beside AdamW: the text and the GPT of `train_lm.py`, made small.

python examples/optimizers/compare.py            # one table and one plot
python examples/optimizers/compare.py --sweep    # each optimizer at each learning rate of GRID: where RATES are from
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from lm_base import SEQ, validate
from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss

import zerofn as zf

GRID = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
RATES = {"AdamW": 4e-3, "8-bit AdamW": 4e-3, "schedule-free AdamW": 4e-3, "Muon": 3.2e-2, "SOAP": 3.2e-2}


def chains(lr, steps):
    """What is compared. Only schedule-free AdamW needs no rate that falls."""
    warmup = max(1, steps // 10)
    falling, warm = zf.schedules.warmup_cosine(lr, warmup, steps), zf.schedules.warmup(lr, warmup)
    adamw = zf.adamw(falling, betas=(0.9, 0.99), weight_decay=0.1)
    muon = zf.muon(falling, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return {
        "AdamW": adamw,
        "8-bit AdamW": zf.quantize(adamw, bits=8),
        "schedule-free AdamW": zf.schedule_free_adamw(warm, betas=(0.9, 0.99), weight_decay=0.1),
        "Muon": zf.partition({"matrix": muon, "rest": adamw}, kind),
        "SOAP": zf.soap(falling, weight_decay=0.1),
    }


def kind(path):
    """Muon is for the matrices of the blocks. Embeddings, the head, biases and gains keep AdamW."""
    return "matrix" if path.startswith("blocks.") and path.endswith("weight") and "norm" not in path else "rest"


def train(name, lr, seed, o, text):
    """One run: the held-out loss by step, bytes of state for each parameter, CPU seconds of each update."""
    torch.manual_seed(seed)
    model = GPT(o.width, layers=2, heads=2, seq=SEQ)
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), chains(lr, o.steps)[name]))
    held_out, seconds = {}, []
    for step in range(1, o.steps + 1):
        x, y = text.batch(seed, step, 16, SEQ)
        next_byte_loss(model(x), y).backward()
        begun = time.process_time()
        opt.step()
        seconds.append(time.process_time() - begun)
        opt.zero_grad()
        if step % 20 == 0 or step == o.steps:
            if name == "schedule-free AdamW":  # its average is what is to be used
                with opt.averaged():
                    held_out[step] = validate(model, text)
            else:
                held_out[step] = validate(model, text)
    parameters = sum(p.numel() for p in model.parameters())
    return held_out, state_bytes(opt.state.transforms) / parameters, seconds


def state_bytes(tree):
    return tree.nbytes if isinstance(tree, torch.Tensor) else sum(map(state_bytes, tree.values()))


def sweep(o, text):
    print(f"{'held-out loss, seed 0':20}", *(f"{lr:8g}" for lr in GRID))
    for name in RATES:
        found = [train(name, lr, 0, o, text)[0][o.steps] for lr in GRID]
        print(f"{name:20} ", *(f"{loss:7.3f}{'*' if loss == min(found) else ' '}" for loss in found), flush=True)


def compare(o, text):
    """Held-out losses by optimizer, seed and step."""
    print(f"{'':20} {'rate':>7} {'held-out loss':>20} {'state, bytes':>13} {'update, CPU ms':>15}")
    found = {}
    for name, lr in RATES.items():
        runs = [train(name, lr, seed, o, text) for seed in o.seeds]
        found[name] = [held_out for held_out, _, _ in runs]
        last = [held_out[o.steps] for held_out in found[name]]
        ms = 1000 * statistics.median(s for _, _, seconds in runs for s in seconds)
        loss = f"{statistics.fmean(last):.3f} ({min(last):.3f}-{max(last):.3f})"
        print(f"{name:20} {lr:7g} {loss:>20} {runs[0][1]:13.2f} {ms:15.1f}", flush=True)
    return found


def draw(found, path):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    mean = {name: {s: statistics.fmean(run[s] for run in runs) for s in runs[0]} for name, runs in found.items()}
    for name, losses in mean.items():
        style = "--" if name == "8-bit AdamW" else "-"  # it lies on AdamW's line
        left.plot(losses.keys(), losses.values(), style, label=name)
        right.plot(losses.keys(), [loss - mean["AdamW"][s] for s, loss in losses.items()], style)
    left.set(xlabel="step", ylabel="nats per byte", title="held-out loss")
    right.set(xlabel="step", title="the same, minus AdamW's")
    left.legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="find the rates instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("optimizers.png"))
    o = parser.parse_args(argv)
    text = Text.split(read_text(None), SEQ)
    if o.sweep:
        return sweep(o, text)
    found = compare(o, text)
    draw(found, o.out)
    return found


if __name__ == "__main__":
    main()
