"""The rivals as their papers or released programs write them: plain loops over lists of numbers.

Slow, and written from the formulas alone, to compare the rivals of the workbench with.
"""

# ruff: noqa: B905
import functools
import math
import struct

import torch

from gradwire.workbench.simulate.language_run import OPTIMIZERS, set_lr

from .made import STEPS, WORKERS, Made, batches, gradients, loss, rate


def start():
    return {name: p.detach().tolist() for name, p in Made().named_parameters()}


def is_matrix(x):
    return isinstance(x[0], list)


def rows_of(x):
    return x if is_matrix(x) else [x]


def like(rows, x):
    return rows if is_matrix(x) else rows[0]


def zeros(x):
    return [[0.0] * len(row) for row in rows_of(x)]


def clipped(gradient):
    total = sum(v * v for g in gradient.values() for row in rows_of(g) for v in row)
    factor = min(1.0, 1.0 / (math.sqrt(total) + 1e-6))
    return {n: [[factor * v for v in row] for row in rows_of(g)] for n, g in gradient.items()}


def bf16(value):
    """Round to the nearest bf16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + ((bits >> 16) & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


# --- DeMo: 2411.19870, algorithm 1, and demo.py of its authors -------------------------------


@functools.cache
def cosine(n):
    def scale(k):
        return math.sqrt((1 if k == 0 else 2) / n)

    return [
        [scale(k) * math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)]
        for k in range(n)
    ]


def dct(block, back=False):
    h, w = len(block), len(block[0])
    ch, cw = cosine(h), cosine(w)
    if back:
        ch, cw = (
            [list(c) for c in zip(*ch)],
            [list(c) for c in zip(*cw)],
        )
    half = [[sum(ch[k][i] * block[i][j] for i in range(h)) for j in range(w)] for k in range(h)]
    return [[sum(half[k][j] * cw[m][j] for j in range(w)) for m in range(w)] for k in range(h)]


def divisor(n):
    return max(d for d in range(1, 65) if n % d == 0)


def blocks_of(rows):
    """(row, column, height, width) of every chunk."""
    h, w = divisor(len(rows)), divisor(len(rows[0]))
    return [(a, b, h, w) for a in range(0, len(rows), h) for b in range(0, len(rows[0]), w)]


def largest(block, k):
    """Places of the k largest of a block."""
    places = [(i, j) for i in range(len(block)) for j in range(len(block[0]))]
    return sorted(places, key=lambda p: -abs(block[p[0]][p[1]]))[:k]


def sign(v):
    return (v > 0) - (v < 0)


def demo(
    keep=32,
    decay=0.999,
    subtract=1.0,
    over_all=False,
    inside=True,
    phi="sign",
    value=bf16,
    wd=0.1,
    lr=0.05,
):
    weights = start()
    delta = [{n: zeros(x) for n, x in weights.items()} for _ in range(WORKERS)]
    for step in range(STEPS):
        eta = rate(step, lr)
        share = eta if inside else 1 - decay
        found = [clipped(gradients(weights, batch)) for batch in batches(step)]
        for name, x in weights.items():
            rows = rows_of(x)
            new = zeros(x)
            for worker in range(WORKERS):
                d = delta[worker][name]
                for i in range(len(rows)):
                    for j in range(len(rows[0])):
                        d[i][j] = decay * d[i][j] + share * found[worker][name][i][j]
            for a, b, h, w in blocks_of(rows):
                gathered = {}
                for worker in range(WORKERS):
                    d = delta[worker][name]
                    block = dct([[d[a + i][b + j] for j in range(w)] for i in range(h)])
                    sent = [[0.0] * w for _ in range(h)]
                    for i, j in largest(block, min(keep, h * w)):
                        sent[i][j] = value(block[i][j])
                        gathered.setdefault((i, j), []).append(sent[i][j])
                    for i, line in enumerate(dct(sent, back=True)):
                        for j, v in enumerate(line):
                            d[a + i][b + j] -= subtract * v
                mean = [[0.0] * w for _ in range(h)]
                for (i, j), values in gathered.items():
                    mean[i][j] = sum(values) / (WORKERS if over_all else len(values))
                for i, line in enumerate(dct(mean, back=True)):
                    for j, v in enumerate(line):
                        new[a + i][b + j] = v
            kept = 1 - eta * wd
            moved = [[eta * sign(v) for v in row] for row in new] if phi == "sign" else new
            rows = [[kept * v - m for v, m in zip(*pair)] for pair in zip(rows, moved)]
            weights[name] = like(rows, x)
    return weights


# --- Local steps: DiLoCo 2311.08105, SparseLoCo 2508.15706, MuLoCo 2505.23725 -----------------


def inner(weights, optimizer, model, batch, eta):
    """One step of a worker's own optimiser; the optimiser is not what is compared."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    set_lr(optimizer, eta)
    optimizer.step()


def statistical(values, bits):
    """The 6-sigma bins of MuLoCo and SparseLoCo: what every value becomes, and the means."""
    bins = 2**bits
    shift = sum(values) / len(values)
    centred = [v - shift for v in values]
    sigma = math.sqrt(sum(c * c for c in centred) / max(len(values) - 1, 1))
    width = 6 * sigma / bins or 1.0
    numbers = [min(max(round(c / width + bins // 2), 0), bins - 1) for c in centred]
    means = []
    for b in range(bins):
        inside = [c for c, number in zip(centred, numbers) if number == b]
        means.append(sum(inside) / len(inside) + shift if inside else shift)
    return numbers, means


def sparse_code(rows, keep=64):
    """SparseLoCo: the largest of every chunk, in four bins of the parameter."""
    places = []
    for a, b, h, w in blocks_of(rows):
        block = [[rows[a + i][b + j] for j in range(w)] for i in range(h)]
        places += [(a + i, b + j) for i, j in largest(block, min(keep, h * w))]
    numbers, means = statistical([rows[i][j] for i, j in places], 2)
    return {place: means[number] for place, number in zip(places, numbers)}


def row_code(rows, bits):
    """MuLoCo: bins for every row of a matrix, whose means are bf16; a vector goes whole."""
    sent = {}
    for i, row in enumerate(rows):
        if len(rows) == 1:
            sent |= {(0, j): v for j, v in enumerate(row)}
            continue
        numbers, means = statistical(row, bits)
        sent |= {(i, j): bf16(means[number]) for j, number in enumerate(numbers)}
    return sent


def rounds(code, optimizer, every, decay, outer, senders=False, again=False, lr=0.05):
    """x, m: shared. e: what each worker has not sent. code(rows) returns {place: value}."""
    outer_lr, mu = outer
    models = [Made() for _ in range(WORKERS)]
    optimizers = [OPTIMIZERS[optimizer](model, lr) for model in models]
    x = start()
    m = {n: zeros(v) for n, v in x.items()}
    e = [{n: zeros(v) for n, v in x.items()} for _ in range(WORKERS)]
    for step in range(STEPS):
        for model, own, batch in zip(models, optimizers, batches(step)):
            inner(x, own, model, batch, rate(step, lr))
        if (step + 1) % every:
            continue
        for name in x:
            rows = rows_of(x[name])
            received = {}
            for worker, model in enumerate(models):
                w = rows_of(model.get_parameter(name).tolist())
                error = e[worker][name]
                for i in range(len(rows)):
                    for j in range(len(rows[0])):
                        error[i][j] = decay * error[i][j] + (rows[i][j] - w[i][j])
                for (i, j), value in code(error).items():
                    error[i][j] -= value
                    received.setdefault((i, j), []).append(value)
            mean = zeros(x[name])
            for (i, j), values in received.items():
                mean[i][j] = sum(values) / (len(values) if senders else WORKERS)
            if again:
                coded = code(mean)
                mean = [[coded[i, j] for j in range(len(rows[0]))] for i in range(len(rows))]
            for i in range(len(rows)):
                for j in range(len(rows[0])):
                    m[name][i][j] = mu * m[name][i][j] + mean[i][j]
                    rows[i][j] -= outer_lr * (mean[i][j] + mu * m[name][i][j])
            x[name] = like(rows, x[name])
        for model in models:
            model.load_state_dict({n: torch.tensor(v, dtype=torch.float64) for n, v in x.items()})
    return x


# --- Streaming DiLoCo: 2501.18512, algorithm 2 -------------------------------------------------

FLOATS = sorted({s * 2.0**k for s in (-1, 1) for k in range(-2, 5)} | {0.0})
"""All values of E3M0 with a bias of 3."""


def four_bits(values):
    """The nearest 4-bit floats, with the largest value on the largest float."""
    scale = max(abs(v) for v in values) / 16
    if not scale:
        return [0.0 for _ in values]
    return [scale * min(FLOATS, key=lambda f: abs(v / scale - f)) for v in values]


def streaming(every, fragments, delay, alpha, outer, lr=0.05):
    """fragments: names of parameters. Fragment p is sent first at (p + 1) H / fragments."""
    outer_lr, mu = outer
    models = [Made() for _ in range(WORKERS)]
    optimizers = [OPTIMIZERS["adamw"](model, lr) for model in models]
    theta = start()
    m = {n: zeros(v) for n, v in theta.items()}
    waiting = {}
    for t in range(1, STEPS + 1):
        for model, own, batch in zip(models, optimizers, batches(t - 1)):
            inner(theta, own, model, batch, rate(t - 1, lr))
        for p, names in enumerate(fragments):
            first = (p + 1) * every // len(fragments)
            if t >= first and (t - first) % every == 0:
                for name in names:
                    rows = rows_of(theta[name])
                    total = zeros(theta[name])
                    for model in models:
                        w = rows_of(model.get_parameter(name).tolist())
                        flat = [a - b for r, s in zip(rows, w) for a, b in zip(r, s)]
                        coded = four_bits(flat)
                        for i in range(len(rows)):
                            for j in range(len(rows[0])):
                                total[i][j] += coded[i * len(rows[0]) + j] / WORKERS
                    waiting[name] = t + delay, total
        for name, (due, update) in list(waiting.items()):
            if due != t:
                continue
            del waiting[name]
            rows = rows_of(theta[name])
            for i in range(len(rows)):
                for j in range(len(rows[0])):
                    m[name][i][j] = mu * m[name][i][j] + update[i][j]
                    rows[i][j] -= outer_lr * (update[i][j] + mu * m[name][i][j])
            theta[name] = like(rows, theta[name])
            for model in models:
                own = model.get_parameter(name)
                mixed = alpha * own.detach() + (1 - alpha) * torch.tensor(
                    theta[name], dtype=torch.float64
                )
                own.data.copy_(mixed)
    return theta


# --- PowerSGD: 1905.13727, algorithms 1 and 2, with one iteration and warm start ---------------


def gram_schmidt(p):
    """Columns of p made orthonormal, one after the other."""
    n, r = len(p), len(p[0])
    for c in range(r):
        for before in range(c):
            dot = sum(p[i][before] * p[i][c] for i in range(n))
            for i in range(n):
                p[i][c] -= dot * p[i][before]
        length = math.sqrt(sum(p[i][c] ** 2 for i in range(n))) + 1e-8
        for i in range(n):
            p[i][c] /= length
    return p


def times(a, b):
    return [[sum(x * b[k][j] for k, x in enumerate(row)) for j in range(len(b[0]))] for row in a]


def turned(a):
    return [list(column) for column in zip(*a)]


def powersgd(rank, first_q, optimizer, start_at=2, lr=0.05):
    """first_q: {name: Q}, the numbers that all workers begin with."""
    model = Made()
    own = OPTIMIZERS[optimizer](model, lr)
    q, error = dict(first_q), {}
    for step in range(STEPS):
        weights = {n: p.tolist() for n, p in model.named_parameters()}
        found = [gradients(weights, batch) for batch in batches(step)]
        for name, parameter in model.named_parameters():
            grads = [rows_of(g[name]) for g in found]
            shape = len(grads[0]), len(grads[0][0])
            if name not in q or step < start_at:
                mean = [[sum(v) / WORKERS for v in zip(*rows)] for rows in zip(*grads)]
            else:
                before = error.get(name, [[[0.0] * shape[1]] * shape[0]] * WORKERS)
                m = [
                    [[a + b for a, b in zip(*rows)] for rows in zip(g, e)]
                    for g, e in zip(grads, before)
                ]
                unit = gram_schmidt([list(row) for row in q[name]])
                each = [times(one, unit) for one in m]
                p = gram_schmidt([[sum(v) for v in zip(*rows)] for rows in zip(*each)])
                each = [times(turned(one), p) for one in m]
                q[name] = [[sum(v) / WORKERS for v in zip(*rows)] for rows in zip(*each)]
                mean = times(p, turned(q[name]))
                error[name] = [
                    [[a - b for a, b in zip(*rows)] for rows in zip(one, mean)] for one in m
                ]
            parameter.grad = torch.tensor(mean, dtype=torch.float64).view_as(parameter)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_lr(own, rate(step, lr))
        own.step()
    return {n: p.tolist() for n, p in model.named_parameters()}


# --- SCAPE 2607.01678, as reconstructed from its abstract, and AdamS 2505.16363 -----------------


def shared_masks(density, start_at, lr=0.05, b1=0.9, b2=0.95, eps=1e-8, wd=0.1):
    weights = start()
    names = [(n, i, j) for n, x in weights.items() for i, row in enumerate(rows_of(x))
             for j in range(len(row))]  # fmt: skip
    d = len(names)
    m, x = [0.0] * d, [rows_of(weights[n])[i][j] for n, i, j in names]
    decays = [wd if is_matrix(weights[n]) else 0.0 for n, _, _ in names]
    e = [[0.0] * d for _ in range(WORKERS)]
    mask = []
    for step in range(STEPS):
        eta = rate(step, lr)
        nested = {n: zeros(v) for n, v in weights.items()}
        for value, (n, i, j) in zip(x, names):
            nested[n][i][j] = value
        nested = {n: like(rows, weights[n]) for n, rows in nested.items()}
        found = [clipped(gradients(nested, batch)) for batch in batches(step)]
        u = [
            [g[n][i][j] + w for (n, i, j), w in zip(names, e[worker])]
            for worker, g in enumerate(found)
        ]
        g = [0.0] * d
        if step < start_at:
            g = [sum(values) / WORKERS for values in zip(*u)]
            e = [[0.0] * d for _ in range(WORKERS)]
        else:
            e = [list(row) for row in u]
            for place in mask:
                sent = [bf16(row[place]) for row in u]
                g[place] = bf16(sum(sent) / WORKERS)
                for worker in range(WORKERS):
                    e[worker][place] = u[worker][place] - sent[worker]
        mask = []
        for worker in range(WORKERS):
            part = range(worker * d // WORKERS, (worker + 1) * d // WORKERS)
            moment = {i: abs(b1 * m[i] + (1 - b1) * u[worker][i]) for i in part}
            count = max(1, round(density * len(part)))
            mask += sorted(part, key=lambda i: -moment[i])[:count]
        for i in range(d):
            v = b2 * m[i] ** 2 + (1 - b2) * g[i] ** 2
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            x[i] -= eta * decays[i] * x[i] + eta * m[i] / (math.sqrt(v) + eps)
    out = {n: zeros(v) for n, v in weights.items()}
    for value, (n, i, j) in zip(x, names):
        out[n][i][j] = value
    return {n: like(rows, weights[n]) for n, rows in out.items()}
