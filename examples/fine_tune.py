"""Fine-tuning on answers of different lengths, weighted by their tokens, and evaluated on averaged weights.

python examples/fine_tune.py
"""

import argparse
import inspect
import statistics
import string
import textwrap

import torch
from lm_base import base, padded
from torch.nn.functional import cross_entropy

import zerofn as zf

WINDOW, SEQ = 4, 64


def pairs():
    """Signatures of functions, and the first lines of their docstrings: answers of 10 to 60 bytes."""
    found = []
    for module in (statistics, string, textwrap, inspect, argparse):
        for name, value in inspect.getmembers(module, inspect.isfunction):
            about = (inspect.getdoc(value) or "").partition("\n")[0].encode()
            if about:
                found.append((f"{name}: ".encode()[:24], about[:38] + b"\n"))
    return found


def batch(rows):
    """Inputs, targets, and which targets are of an answer."""
    tokens = padded([question + answer for question, answer in rows], SEQ + 1)
    place = torch.arange(1, SEQ + 1)
    first = torch.tensor([len(question) for question, _ in rows])[:, None]
    last = torch.tensor([len(question) + len(answer) for question, answer in rows])[:, None]
    return tokens[:, :-1], tokens[:, 1:], (place >= first) & (place < last)


def loss_of(model, rows):
    """The mean loss over the tokens of the answers, and the number of these tokens."""
    x, y, answer = batch(rows)
    return cross_entropy(model(x)[answer].float(), y[answer]), int(answer.sum())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=int, default=200, help="steps on plain text before")
    parser.add_argument("--steps", type=int, default=60, help="updates")
    o = parser.parse_args(argv)
    model, examples = base(o.base), pairs()
    held_out, train = examples[::6], [pair for i, pair in enumerate(examples) if i % 6]
    tx = zf.chain(
        zf.shard(),
        zf.accumulate(WINDOW, weighted=True),
        zf.clip_by_global_norm(1.0),
        zf.adamw(lr=1e-3),
        zf.ema(0.9),
    )
    opt = zf.attach(model, tx)

    def evaluate():
        with torch.no_grad():
            return loss_of(model, held_out)[0].item()

    before, order = evaluate(), torch.Generator().manual_seed(0)
    for _ in range(o.steps * WINDOW):
        rows = torch.randint(len(train), (4,), generator=order).tolist()
        loss, tokens = loss_of(model, [train[i] for i in rows])
        loss.backward()
        opt.step(weight=tokens)
        opt.zero_grad()
    last = evaluate()
    with opt.averaged():
        averaged = evaluate()
    print(f"loss of held-out answers: {before:.3f} before, {last:.3f} after, {averaged:.3f} with averaged weights")
    return before, last, averaged


if __name__ == "__main__":
    main()
