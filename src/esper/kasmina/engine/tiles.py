"""What kernels are made of: codes of ops, and how tiles of samples, weights, gradients are read and written.

An op is a tuple of whole numbers known when the kernel is compiled (`program.Op`). Legend: a column is one
sample at one position. Offsets count numbers.
"""

import triton
import triton.language as tl

from esper.kasmina.engine.program import FIELDS, Code

NORM, MAP, DEPTHWISE, MEAN, GLU, POOL, MODULATE, ACTIVATE, GATE = (tl.constexpr(int(c)) for c in Code)
assert FIELDS == 30, "the kernels read the fields of an op by their places"
WIDE = tl.constexpr(FIELDS)
EPS = tl.constexpr(1e-5)
BLOCK = tl.constexpr(1024)
FAR = tl.constexpr(1 << 20)


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == 1:
        x = tl.where(x <= 0, 0.0, x)  # a NaN stays one
    elif ACT == 2:
        x = x * tl.sigmoid(x)
    elif ACT == 3:
        x = 2 * tl.sigmoid(2 * x) - 1
    return x


@triton.jit
def read(x, at, mask, ACT: tl.constexpr):
    return activate(tl.load(x + at, mask, 0.0).to(tl.float32), ACT)


@triton.jit
def larger(a, b):
    return tl.where((b > a) | (b != b), b, a)  # a NaN wins


@triton.jit
def within(i, SIZE: tl.constexpr):
    """0 <= i < SIZE in one comparison."""
    return i.to(tl.uint32) < SIZE


@triton.jit
def packed_columns(x, stride, k, n, end, inputs: tl.constexpr, taps: tl.constexpr, wide: tl.constexpr,
                   height: tl.constexpr, across: tl.constexpr, columns: tl.constexpr,
                   input_step: tl.constexpr, column_step: tl.constexpr, ACT: tl.constexpr):
    """[k, n]: what taps and inputs k, all in one row, read for columns n; 0 outside. For few inputs. What
    there is no k or no n for lies far outside."""
    tap, place = k // inputs, n % columns
    down, right = tap // wide - taps // wide // 2, tap % wide - wide // 2
    shift = k % inputs * input_step + (down * across + right) * column_step
    at = (n // columns * stride + place * column_step)[None, :] + shift[:, None]
    along = tl.where(n < end, place % across, -FAR)
    inside = within(along[None, :] + tl.where(k < inputs * taps, right, 2 * FAR)[:, None], across)
    if taps > wide:
        inside = inside & within((place // across)[None, :] + down[:, None], height)
    return read(x, at, inside, ACT)


@triton.jit
def tap_columns(x, stride, i, n, end, tap, inputs: tl.constexpr, taps: tl.constexpr, wide: tl.constexpr,
                height: tl.constexpr, across: tl.constexpr, columns: tl.constexpr, input_step: tl.constexpr,
                column_step: tl.constexpr, ACT: tl.constexpr):
    """[i, n]: what inputs i read through one tap for columns n; 0 outside."""
    place, inside = n % columns, n < end
    at = n // columns * stride + place * column_step
    if taps > 1:
        down, right = tap // wide - taps // wide // 2, tap % wide - wide // 2
        row, along = place // across + down, place % across + right
        inside = inside & (row >= 0) & (row < height) & (along >= 0) & (along < across)
        at += (down * across + right) * column_step
    return read(x, at[None, :] + (i * input_step)[:, None], inside[None, :] & (i < inputs)[:, None], ACT)


@triton.jit
def packed_weights(k, inputs: tl.constexpr, taps: tl.constexpr):
    """Where the weight of each k lies."""
    return k % inputs * taps + k // inputs


@triton.jit
def map_weights(w, j, i, tap, outputs: tl.constexpr, inputs: tl.constexpr, taps: tl.constexpr,
                MATRIX: tl.constexpr):
    """[j, i]: how outputs j depend on inputs i through one tap."""
    mask = (j < outputs)[:, None] & (i < inputs)[None, :]
    return tl.load(w + (j * (inputs * taps))[:, None] + (i * taps + tap)[None, :], mask, 0.0).to(MATRIX)


@triton.jit
def put(o, o_sample, h, h_sample, y, alpha, sample, place, value, mask, LAST: tl.constexpr):
    """Write an op's output: to the next op, or, behind the last one of a seed, blended into its host."""
    if LAST:
        at = sample * h_sample + place
        tl.store(y + at, tl.load(h + at, mask, 0.0).to(tl.float32) + alpha * value, mask)
    else:
        tl.store(o + sample * o_sample + place, value, mask)


@triton.jit
def flat_tile(x, stride, start, count, SIZE: tl.constexpr, ROUND: tl.constexpr, SAMPLES: tl.constexpr,
              ACT: tl.constexpr):
    """(values, samples, places, mask): whole samples of SIZE numbers, [SAMPLES, ROUND]."""
    sample, place = (start + tl.arange(0, SAMPLES))[:, None], tl.arange(0, ROUND)[None, :]
    mask = (sample < count) & (place < SIZE)
    return tl.where(mask, read(x, sample * stride + place, mask, ACT), 0.0), sample, place, mask


@triton.jit
def normalised(value, mask, SIZE: tl.constexpr):
    """(values of mean 0 and variance 1, what they were divided by, inverted), sample by sample."""
    value = tl.where(mask, value - (tl.sum(value, 1) / SIZE)[:, None], 0.0)
    inverse = 1 / tl.sqrt(tl.sum(value * value, 1) / SIZE + EPS)
    return value * inverse[:, None], inverse


@triton.jit
def bent(grad, before, ACT: tl.constexpr):
    """A gradient in front of an activation."""
    if ACT == 1:
        grad = tl.where(before <= 0, 0.0, grad)
    elif ACT == 2:
        slope = tl.sigmoid(before)
        grad *= slope + before * slope * (1 - slope)
    elif ACT == 3:
        slope = 2 * tl.sigmoid(2 * before) - 1
        grad *= 1 - slope * slope
    return grad


@triton.jit
def pass_on(d, at, grad, x, source, mask, ACT: tl.constexpr, ADD: tl.constexpr):
    """Send a gradient on to what was read, through its activation."""
    if ACT > 0:
        grad = bent(grad, read(x, source, mask, 0), ACT)
    if ADD:
        grad += read(d, at, mask, 0)
    tl.store(d + at, grad, mask)


@triton.jit
def to_winner(d, at, before, best, grad, whole, mask, ACT: tl.constexpr, ADD: tl.constexpr):
    """One number of a pool's window gets the gradient if it was the best. What is left for others."""
    value = activate(before, ACT)
    wins = whole & ((value == best) | (value != value))
    passed = bent(tl.where(wins, grad, 0.0), before, ACT)
    if ADD:
        passed += read(d, at, mask, 0)
    tl.store(d + at, passed, mask)
    return tl.where(wins, 0.0, grad)


@triton.jit
def store_by_channel(to, values, step, CHANNELS: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr):
    """Add up a sample's numbers [ROUND] channel by channel, and write the sums, `step` apart."""
    c = tl.arange(0, ROWS)
    if CHANNELS == ROWS:
        sums = tl.sum(tl.reshape(values, [ROUND // ROWS, ROWS]), 0)
    else:
        mine = (tl.arange(0, ROUND) % CHANNELS)[None, :] == c[:, None]
        sums = tl.sum(tl.where(mine, values[None, :], 0.0), 1)
    tl.store(to + c * step, sums, c < CHANNELS)
