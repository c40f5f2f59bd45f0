"""Backward: the gradient of one op of every row, to its weights and to what it read. The twin of `forward`.

Gradients of weights are left as one sum per program of the grid; the update adds them up. Nothing is added
atomically, so results are the same every time.
"""

import triton
import triton.language as tl

from esper.kasmina.engine.products import to_inputs, to_packed_weights, to_weights
from esper.kasmina.engine.tiles import (
    BLOCK,
    DEPTHWISE,
    GATE,
    GLU,
    MAP,
    MEAN,
    MODULATE,
    NORM,
    POOL,
    WIDE,
    activate,
    flat_tile,
    larger,
    normalised,
    pass_on,
    read,
    store_by_channel,
    to_winner,
)


@triton.jit
def one_op(x, x_sample, h, h_sample, y_grad, g, g_sample, d, d_sample, weights, grads, alpha, count, trains,
           passes, OPS: tl.constexpr, AT: tl.constexpr, BLEND: tl.constexpr, FIRST: tl.constexpr,
           MATRIX: tl.constexpr, PRECISION: tl.constexpr):
    code: tl.constexpr = OPS[AT + 0]
    ACT: tl.constexpr = OPS[AT + 1]
    weight: tl.constexpr = OPS[AT + 2]
    bias: tl.constexpr = OPS[AT + 3]
    inputs: tl.constexpr = OPS[AT + 4]
    outputs: tl.constexpr = OPS[AT + 5]
    taps: tl.constexpr = OPS[AT + 6]
    wide: tl.constexpr = OPS[AT + 7]
    height: tl.constexpr = OPS[AT + 8]
    across: tl.constexpr = OPS[AT + 9]
    columns: tl.constexpr = OPS[AT + 10]
    input_step: tl.constexpr = OPS[AT + 11]
    column_step: tl.constexpr = OPS[AT + 12]
    output_step: tl.constexpr = OPS[AT + 13]
    out_column_step: tl.constexpr = OPS[AT + 14]
    channels: tl.constexpr = OPS[AT + 15]
    positions: tl.constexpr = OPS[AT + 16]
    size: tl.constexpr = OPS[AT + 17]
    last: tl.constexpr = OPS[AT + 18]
    NUMBERS: tl.constexpr = OPS[AT + 19]
    SAMPLES: tl.constexpr = OPS[AT + 20]
    OUT: tl.constexpr = OPS[AT + 21]
    SPAN: tl.constexpr = OPS[AT + 22]
    PACKED: tl.constexpr = OPS[AT + 23]
    COLUMNS: tl.constexpr = OPS[AT + 24] // (2 if PRECISION == "tf32x3" else 1)  # or registers run out
    ROWS: tl.constexpr = OPS[AT + 25]
    IN: tl.constexpr = OPS[AT + 26]
    SPANS: tl.constexpr = OPS[AT + 27]
    ADD: tl.constexpr = BLEND and FIRST
    if BLEND and last:
        g, g_sample = y_grad, h_sample
    else:
        alpha = 1.0
    if ADD:
        d, d_sample = y_grad, h_sample
    sends = passes or not FIRST
    w, b = grads + weight, grads + bias
    if code == NORM:
        to_scale, to_shift = tl.zeros([NUMBERS], tl.float32), tl.zeros([NUMBERS], tl.float32)
        for start in range(0, count, SAMPLES):
            value, sample, place, mask = flat_tile(x, x_sample, start, count, size, NUMBERS, SAMPLES, ACT)
            value, inverse = normalised(value, mask, size)
            grad = alpha * read(g, sample * g_sample + place, mask, 0)
            if weight >= 0:
                to_scale += tl.sum(grad * value, 0)
                to_shift += tl.sum(grad, 0)
            if sends:
                if weight >= 0:
                    grad *= tl.load(weights + weight + place % channels, place < size, 0.0)
                tilt = tl.sum(grad * value, 1) / size
                grad = (grad - (tl.sum(grad, 1) / size)[:, None] - value * tilt[:, None]) * inverse[:, None]
                pass_on(d, sample * d_sample + place, grad, x, sample * x_sample + place, mask, ACT, ADD)
        if weight >= 0 and trains:
            store_by_channel(w, to_scale, 1, channels, NUMBERS, ROWS)
            store_by_channel(b, to_shift, 1, channels, NUMBERS, ROWS)
    elif code == MAP:
        end = count * columns
        if trains:
            if PACKED > 0:
                to_packed_weights(x, x_sample, g, g_sample, w, b, alpha, end, bias, inputs, outputs, taps,
                                  wide, height, across, columns, input_step, column_step, output_step,
                                  out_column_step, OUT, PACKED, COLUMNS, ACT, MATRIX, PRECISION)
            else:
                to_weights(x, x_sample, g, g_sample, w, b, alpha, end, bias, inputs, outputs, taps, wide,
                           height, across, columns, input_step, column_step, output_step, out_column_step,
                           OUT, IN, COLUMNS, ACT, MATRIX, PRECISION)
        if sends:
            to_inputs(x, x_sample, g, g_sample, d, d_sample, weights + weight, alpha, end, inputs, outputs,
                      taps, wide, height, across, columns, input_step, column_step, output_step,
                      out_column_step, OUT, IN, COLUMNS, ACT, ADD, MATRIX, PRECISION)
    elif code == DEPTHWISE:
        if trains:
            for tap in tl.static_range(-1 if bias >= 0 else 0, taps):  # -1 is the bias
                total = tl.zeros([NUMBERS], tl.float32)
                for start in range(0, count, SAMPLES):
                    grad, sample, place, mask = flat_tile(g, g_sample, start, count, size, NUMBERS, SAMPLES,
                                                          0)
                    if tap >= 0:
                        position = place // channels
                        row = position // across + tap // wide - taps // wide // 2
                        along = position % across + tap % wide - wide // 2
                        mask = mask & (row >= 0) & (row < height) & (along >= 0) & (along < across)
                        source = sample * x_sample + place + (row * across + along - position) * channels
                        grad = tl.where(mask, grad * read(x, source, mask, ACT), 0.0)
                    total += alpha * tl.sum(grad, 0)
                if tap >= 0:
                    store_by_channel(w + tap, total, taps, channels, NUMBERS, ROWS)
                else:
                    store_by_channel(b, total, 1, channels, NUMBERS, ROWS)
        if sends:
            for start in range(0, count * size, BLOCK):
                at = start + tl.arange(0, BLOCK)
                sample, place, mask = at // size, at % size, at < count * size
                position, total = at // channels % positions, tl.zeros([BLOCK], tl.float32)
                for tap in tl.static_range(0, taps):
                    row = position // across - (tap // wide - taps // wide // 2)
                    along = position % across - (tap % wide - wide // 2)
                    inside = mask & (row >= 0) & (row < height) & (along >= 0) & (along < across)
                    moved = place + (row * across + along - position) * channels
                    grad = read(g, sample * g_sample + moved, inside, 0)
                    factors = tl.load(weights + weight + at % channels * taps + tap, mask, 0.0)
                    total += tl.where(inside, alpha * grad * factors, 0.0)
                pass_on(d, sample * d_sample + place, total, x, sample * x_sample + place, mask, ACT, ADD)
    elif code == GATE:
        to_weight, to_bias = tl.zeros([NUMBERS], tl.float32), 0.0
        for start in range(0, count, SAMPLES):
            host, sample, place, mask = flat_tile(h, h_sample, start, count, size, NUMBERS, SAMPLES, 0)
            factors = tl.load(weights + weight + place % channels, place < size, 0.0)
            gate = tl.sigmoid(tl.sum(host * factors, 1) / positions + tl.load(weights + bias))
            grad = alpha * read(g, sample * g_sample + place, mask, 0)
            value = read(x, sample * x_sample + place, mask, ACT)
            score = tl.sum(grad * value, 1) * gate * (1 - gate)  # of what the sigmoid read
            to_weight += tl.sum(tl.where(mask, score[:, None] * host, 0.0), 0) / positions
            to_bias += tl.sum(score, 0)
            pass_on(d, sample * d_sample + place, grad * gate[:, None], x, sample * x_sample + place, mask,
                    ACT, False)
            if passes:
                spot = sample * h_sample + place
                kept = read(y_grad, spot, mask, 0)
                tl.store(y_grad + spot, kept + score[:, None] * factors / positions, mask)
        if trains:
            store_by_channel(w, to_weight, 1, channels, NUMBERS, ROWS)
            tl.store(b, to_bias)
    elif code == MODULATE:
        p = tl.arange(0, SPAN)
        for start in range(0, count * channels, SPANS):
            at = start + tl.arange(0, SPANS)
            sample, channel, mask = at // channels, at % channels, at < count * channels
            inside = mask[:, None] & (p < positions)[None, :]
            place = channel[:, None] + (p * channels)[None, :]
            spot = (sample * h_sample)[:, None] + place
            grad = alpha * read(g, (sample * g_sample)[:, None] + place, inside, 0)
            host = read(h, spot, inside, 0)
            if passes:
                kept = read(y_grad, spot, inside, 0)
                factor = read(x, sample * x_sample + channel, mask, ACT)
                tl.store(y_grad + spot, kept + grad * factor[:, None], inside)
            total = tl.sum(grad * host, 1)
            pass_on(d, sample * d_sample + channel, total, x, sample * x_sample + channel, mask, ACT, False)
    elif code == POOL:
        two: tl.constexpr = height > 1
        after: tl.constexpr = (across + 1) // 2
        tall: tl.constexpr = (height + 1) // 2 if two else 1
        windows: tl.constexpr = channels * tall * after
        line: tl.constexpr = across * channels
        if sends:
            for start in range(0, count * windows, BLOCK):
                at = start + tl.arange(0, BLOCK)
                sample, window, mask = at // windows, at // channels % (tall * after), at < count * windows
                channel, up, left = at % channels, window // after, window % after
                whole = mask & (left < across // 2)
                if two:
                    whole = whole & (up < height // 2)
                corner = (up * (2 if two else 1) * across + left * 2) * channels + channel
                target = (up * (across // 2) + left) * channels + channel
                source, to = sample * x_sample + corner, sample * d_sample + corner
                grad = alpha * read(g, sample * g_sample + target, whole, 0)
                beside = mask & (left * 2 + 1 < across)
                first, second = read(x, source, mask, 0), read(x, source + channels, beside, 0)
                best = larger(activate(first, ACT), activate(second, ACT))
                if two:
                    below = mask & (up * 2 + 1 < height)
                    corner_below = below & (left * 2 + 1 < across)
                    third = read(x, source + line, below, 0)
                    fourth = read(x, source + line + channels, corner_below, 0)
                    best = larger(best, larger(activate(third, ACT), activate(fourth, ACT)))
                grad = to_winner(d, to, first, best, grad, whole, mask, ACT, ADD)
                grad = to_winner(d, to + channels, second, best, grad, whole, beside, ACT, ADD)
                if two:
                    grad = to_winner(d, to + line, third, best, grad, whole, below, ACT, ADD)
                    to_winner(d, to + line + channels, fourth, best, grad, whole, corner_below, ACT, ADD)
    elif sends:
        numbers: tl.constexpr = channels * positions if code == MEAN else size
        for start in range(0, count * numbers, BLOCK):
            at = start + tl.arange(0, BLOCK)
            sample, place, mask = at // numbers, at % numbers, at < count * numbers
            source = sample * x_sample + place
            if code == MEAN:
                grad = alpha * read(g, sample * g_sample + at % channels, mask, 0) / positions
            else:
                grad = alpha * read(g, sample * g_sample + place, mask, 0)
            if code == GLU:
                place += at // channels % positions * channels
                source = sample * x_sample + place
                value, gate = read(x, source, mask, 0), tl.sigmoid(read(x, source + channels, mask, 0))
                pass_on(d, sample * d_sample + channels + place, grad * value * gate * (1 - gate), x, source,
                        mask, 0, ADD)
                grad *= gate
            pass_on(d, sample * d_sample + place, grad, x, source, mask, ACT if code != GLU else 0, ADD)


@triton.jit(do_not_specialize=["level", "levels", "batch", "per", "rows", "width", "slots"])
def backward(x, x_rows, x_row, x_sample, h, h_rows, h_row, h_sample, y_grad, g, g_row, g_sample, d, d_row,
             d_sample, weights, width, grads, rows, table, level, levels, kinds, flags, env, alphas, slots,
             batch, per, OPS: tl.constexpr, COUNT: tl.constexpr, BLEND: tl.constexpr, FIRST: tl.constexpr,
             MATRIX: tl.constexpr, PRECISION: tl.constexpr):
    """g is the gradient of what the op wrote, d of what it read. Behind a seed's last op the gradient is
    `y_grad` times alpha; in front of its first, d is added to `y_grad`, which so becomes that of its host.
    Flags: 1, its weights learn; 2, what it reads asks for its gradient."""
    row, begin = tl.program_id(0), tl.program_id(1) * per
    kind, flag, count = tl.load(kinds + row), tl.load(flags + row), tl.minimum(batch - begin, per)
    if kind < 0 or flag == 0 or count <= 0:
        return
    which = tl.load(table + kind * levels + level)
    x += tl.load(x_rows + row).to(tl.int64) * x_row + begin * x_sample
    g += row.to(tl.int64) * g_row + begin * g_sample
    d += row.to(tl.int64) * d_row + begin * d_sample
    alpha = 1.0
    if BLEND:
        h += tl.load(h_rows + row).to(tl.int64) * h_row + begin * h_sample
        y_grad += row.to(tl.int64) * h_row + begin * h_sample
        alpha = tl.load(alphas + row * slots)
    place = tl.load(env + row).to(tl.int64)
    grads += (tl.program_id(1) * rows + place) * width
    weights += place * width
    for number in tl.static_range(0, COUNT):
        if which == number:
            one_op(x, x_sample, h, h_sample, y_grad, g, g_sample, d, d_sample, weights, grads, alpha, count,
                   (flag & 1) > 0, (flag & 2) > 0, OPS, number * WIDE, BLEND, FIRST, MATRIX, PRECISION)
