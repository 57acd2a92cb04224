"""A first model: digits from a CSV file, a loader, early stop, and a run that goes on where it was cut off.

python examples/first_model.py
"""

import argparse
import csv
from pathlib import Path

import torch
from digits import read_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerofn as zf


def accuracy(model, opt, images, labels):
    with opt.averaged(), torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/first"))
    parser.add_argument("--data", type=Path, help="a CSV file of your own; the label stands last in a row")
    parser.add_argument("--epochs", type=int, default=60, help="at most")
    parser.add_argument("--patience", type=int, default=6, help="epochs without a better score until the run stops")
    o = parser.parse_args(argv)

    o.out.mkdir(parents=True, exist_ok=True)
    images, labels = read_digits(o.data)
    train, held_out = TensorDataset(images[:1400], labels[:1400]), (images[1400:], labels[1400:])
    order = torch.Generator()
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=order)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    rate = zf.schedules.warmup_cosine(3e-3, 20, 60 * len(loader))
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=rate), zf.ema(0.95)))

    # Each epoch writes a save and a row of the log. A resumed run reads both.
    saves = zf.Checkpoints(o.out / "saves", last=1, best=1, largest=True)
    saves.load(like=opt)  # nothing happens at the first start
    done, log = int(opt.state.step) // len(loader), o.out / "log.csv"
    history = []
    if done:
        with log.open(newline="") as file:
            history = [(int(e), float(loss), float(score)) for e, loss, score in csv.reader(file)][:done]

    for epoch in range(done, o.epochs):
        best = max(range(len(history)), key=lambda e: history[e][2], default=0)
        if epoch - best > o.patience:
            break
        order.manual_seed(epoch)  # the order of the data follows from the epoch, also after a restart
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += loss.item()
        history.append((epoch, total / len(loader), accuracy(model, opt, *held_out)))
        with log.open("w", newline="") as file:
            csv.writer(file).writerows(history)
        saves.save(opt, score=history[-1][2])

    zf.load(saves.at(saves.best), like=opt)
    score = accuracy(model, opt, *held_out)
    print(f"{len(history)} epochs; the best save reads {score:.1%} of the held-out digits right")
    return history, score


if __name__ == "__main__":
    main()
