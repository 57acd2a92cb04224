"""Formulas of optimizers and members on one leaf in float64, written from the papers, or torch's own.

Each goes from a leaf to a function (parameter, gradient, update) -> new parameter, which keeps its state.
"""

import math

import torch

F64 = torch.float64
LR = 0.05


def zeros(p, names):
    return {name: torch.zeros_like(p) for name in names}


def ratio(a, b):
    return a / b if a > 0 and b > 0 else 1.0


def lamb(p, corrected=True, low=0.0, high=math.inf):
    s = zeros(p, "mv")

    def step(p, g, t):
        s["m"], s["v"] = 0.9 * s["m"] + 0.1 * g, 0.99 * s["v"] + 0.01 * g**2
        c1, c2 = (1 - 0.9**t, 1 - 0.99**t) if corrected else (1.0, 1.0)
        u = (s["m"] / c1) / ((s["v"] / c2).sqrt() + 1e-6) + 0.1 * p
        lengths = p.norm(), u.norm()
        return p - LR * (min(max(ratio(*lengths), low), high) if min(lengths) > 0 else 1.0) * u

    return step


def lars(p, nesterov=False):
    s = zeros(p, "m")

    def step(p, g, t):
        u = LR * ratio(0.3 * p.norm(), g.norm() + 0.1 * p.norm()) * (g + 0.1 * p)
        s["m"] = 0.9 * s["m"] + u
        return p - (u + 0.9 * s["m"] if nesterov else s["m"])

    return step


def adaptive_clip(p):
    def norm(x):
        return x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1)) if x.ndim > 1 else x.norm()

    def step(p, g, t):
        most = 0.3 * norm(p).clamp(min=1e-3)
        return p - LR * torch.where(norm(g) > most, g * most / norm(g), g)

    return step


def adabelief(p):
    s = zeros(p, "mv")

    def step(p, g, t):
        s["m"] = 0.9 * s["m"] + 0.1 * g
        s["v"] = 0.99 * s["v"] + 0.01 * (g - s["m"]) ** 2 + 1e-8
        m, v = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.99**t)
        return p * (1 - LR * 0.1) - LR * m / (v.sqrt() + 1e-8)

    return step


def adan(p):
    s = zeros(p, "mwng")

    def step(p, g, t):
        d = g - s["g"] if t > 1 else torch.zeros_like(g)
        s["g"], s["m"], s["w"] = g, 0.9 * s["m"] + 0.1 * g, 0.8 * s["w"] + 0.2 * d
        s["n"] = 0.7 * s["n"] + 0.3 * (g + 0.8 * d) ** 2
        u = s["m"] / (1 - 0.9**t) + 0.8 * s["w"] / (1 - 0.8**t)
        return (p - LR * u / ((s["n"] / (1 - 0.7**t)).sqrt() + 1e-8)) / (1 + LR * 0.1)

    return step


def adopt(p, clipped=True):
    s = zeros(p, "mv")

    def step(p, g, t):
        if t == 1:
            s["v"] = g**2
            return p
        u, most = g / s["v"].sqrt().clamp(min=1e-6), (t - 1) ** 0.25
        s["m"] = 0.9 * s["m"] + 0.1 * (u.clamp(-most, most) if clipped else u)
        s["v"] = 0.99 * s["v"] + 0.01 * g**2
        return p * (1 - LR * 0.1) - LR * s["m"]

    return step


def mars(p):
    s, adam = {}, adamw(p)

    def step(p, g, t):
        c = g + 0.5 * 0.9 / (1 - 0.9) * (g - s.get("g", g))
        s["g"] = g
        return adam(p, c / max(1.0, float(c.norm())), t)

    return step


def adamw(p, decay=0.0, corrected=True):
    s = zeros(p, "mv")

    def step(p, g, t):
        s["m"], s["v"] = 0.9 * s["m"] + 0.1 * g, 0.99 * s["v"] + 0.01 * g**2
        c1, c2 = (1 - 0.9**t, 1 - 0.99**t) if corrected else (1.0, 1.0)
        return p - LR * ((s["m"] / c1) / ((s["v"] / c2).sqrt() + 1e-8) + decay * p)

    return step


def adam_uncorrected(p):
    inner = adamw(p, corrected=False)
    return lambda p, g, t: inner(p, g + 0.1 * p, t)


def cautious_adamw(p, by_parts=True):
    adam = adamw(p, 0.0 if by_parts else 0.1)

    def step(p, g, t):
        u = p - adam(p, g, t)
        mask = (u * g > 0).double()
        u = u * mask / mask.mean().clamp(min=1e-3)
        return p - u - (LR * 0.1 * p if by_parts else 0.0)

    return step


def schedule_free(p):
    """As the authors write it: without the average, which is read from `y` and `z`."""
    s = {"z": p, "v": torch.zeros_like(p), "sum": 0.0, "top": 0.0}

    def step(y, g, t):
        rate = LR * min(1.0, t / 3)
        s["v"], s["top"] = 0.99 * s["v"] + 0.01 * g**2, max(s["top"], rate)
        weight = t**0.5 * s["top"] ** 2
        s["sum"] += weight
        c = weight / s["sum"]
        u = g / ((s["v"] / (1 - 0.99**t)).sqrt() + 1e-8) + 0.1 * y
        y = y + c * (s["z"] - y) + rate * (0.9 * (1 - c) - 1) * u
        s["z"] = s["z"] - rate * u
        return y

    return step


def schedule_free_sgd(p, at_y=False):
    """As the paper writes it, with a decay of `z`, or of `y`."""
    s = {"z": p, "x": p, "m": torch.zeros_like(p), "sum": 0.0}

    def step(y, g, t):
        rate = LR * min(1.0, t / 3)
        s["m"] = 0.5 * s["m"] + (g if at_y else g + 0.1 * s["z"])
        s["z"] = s["z"] - rate * (s["m"] + (0.2 * y if at_y else 0.0))
        weight = t * rate
        s["sum"] += weight
        s["x"] = s["x"] + weight / s["sum"] * (s["z"] - s["x"])
        return 0.2 * s["z"] + 0.8 * s["x"]

    return step


def matrix(x):
    return x.flatten(1) if x.ndim > 2 else x


def shampoo(p):
    sides = [i for i in range(2) if p.ndim > 1 and matrix(p).shape[i] <= 4]
    s = {"m": 0.0, "v": 0.1} | {i: 0.1 * torch.eye(matrix(p).shape[i], dtype=F64) for i in sides}
    roots = {}

    def step(p, g, t):
        g = g + 0.1 * p
        u = matrix(g)
        for i in sides:
            s[i] = s[i] + (matrix(g) @ matrix(g).T if i == 0 else matrix(g).T @ matrix(g))
            if t % 2 == 1:
                roots[i] = torch.linalg.matrix_power(s[i], -1)
                for _ in range(1 + (len(sides) == 2)):
                    roots[i] = square_root(roots[i])
            u = roots[i] @ u if i == 0 else u @ roots[i]
        s["v"] = s["v"] + g**2
        s["m"] = 0.5 * s["m"] + (u.reshape(g.shape) if sides else g / s["v"].sqrt())
        return p - LR * s["m"]

    return step


def square_root(x):
    """By the iteration of Denman and Beavers (1976), and no spectrum."""
    y, z = x, torch.eye(len(x), dtype=F64)
    for _ in range(30):
        y, z = (y + z.inverse()) / 2, (z + y.inverse()) / 2
    return y


def soap(p):
    sides = [i for i in range(2) if p.ndim > 1 and matrix(p).shape[i] <= 4]
    s, total, basis = zeros(p, "mv"), dict.fromkeys(sides, 0.0), {}

    def turned(x, back=False):
        y = matrix(x)
        for i in sides:
            q = basis[i].T if back else basis[i]
            y = q.T @ y if i == 0 else y @ q
        return y.reshape(x.shape)

    def step(p, g, t):
        grams = {i: matrix(g) @ matrix(g).T if i == 0 else matrix(g).T @ matrix(g) for i in sides}
        if sides and t == 1:
            total.update({i: 0.05 * x for i, x in grams.items()})
            basis.update({i: torch.linalg.eigh(x)[1].flip(1) for i, x in total.items()})
            return p
        n = t - 1 if sides else max(t - 1, 1)
        s["m"] = 0.9 * s["m"] + 0.1 * g
        s["v"] = 0.95 * s["v"] + 0.05 * turned(g) ** 2
        u = turned(s["m"], False) / (1 - 0.9**n) / ((s["v"] / (1 - 0.95**n)).sqrt() + 1e-8)
        p = (p - LR * turned(u, True)) * (1 - LR * 0.1)
        for i in sides:
            total[i] = 0.95 * total[i] + 0.05 * grams[i]
            if n % 2 == 0:
                basis[i] = torch.linalg.qr(total[i] @ basis[i])[0]
        return p

    return step


def muon(p):
    if p.ndim not in (2, 3):
        return lambda p, g, t: p - LR * g
    s = zeros(p, "m")

    def of_a_matrix(u):
        x = u / u.norm()
        for _ in range(3):
            x = 3.0 * x - 3.2 * x @ x.T @ x + 1.2 * x @ x.T @ x @ x.T @ x
        return 0.2 * max(u.shape) ** 0.5 * x

    def step(p, g, t):
        s["m"] = 0.9 * s["m"] + 0.1 * g
        u = 0.1 * g + 0.9 * s["m"]
        u = of_a_matrix(u) if u.ndim == 2 else torch.stack([of_a_matrix(x) for x in u])
        return p - LR * (u + 0.1 * p)

    return step


def lookahead(p):
    s = {"m": torch.zeros_like(p), "slow": p}

    def step(p, g, t):
        s["m"] = 0.5 * s["m"] + g if t > 1 else g
        p = p - LR * s["m"]
        if t % 3 == 0:
            s["slow"] = p = s["slow"] + 0.7 * (p - s["slow"])
        return p

    return step


def later(step):
    return step != 2


def now_and_then(p):
    s, adam = {"updates": 0}, adamw(p)

    def step(p, g, t):
        if not later(t - 1):
            return p
        s["updates"] += 1
        return adam(p, g, s["updates"])

    return step


def clipped_later(p):
    return lambda p, g, t: p - LR * (g.clamp(-0.5, 0.5) if later(t - 1) else g)


def by_torch(cls, **options):
    def make(p):
        leaf = p.clone().requires_grad_()
        opt = cls([leaf], lr=LR, **options)

        def step(p, g, t):
            leaf.grad = g.clone()
            opt.step()
            return leaf.detach().clone()

        return step

    return make


BETAS = (0.9, 0.99)
