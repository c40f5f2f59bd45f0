"""Forward: one op of every row. A program of the grid serves one row and some of its samples, and looks up
which op is its row's; so rows of all blueprints share a launch, and a launch serves every topology."""

import triton
import triton.language as tl

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
    flat_tile,
    larger,
    map_weights,
    normalised,
    packed_columns,
    packed_weights,
    put,
    read,
    tap_columns,
)


@triton.jit
def one_op(x, x_sample, o, o_sample, h, h_sample, y, weights, alpha, count, OPS: tl.constexpr,
           AT: tl.constexpr, BLEND: tl.constexpr, MATRIX: tl.constexpr, PRECISION: tl.constexpr):
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
    PACKED: tl.constexpr = OPS[AT + 28]
    COLUMNS: tl.constexpr = OPS[AT + 29]
    IN: tl.constexpr = OPS[AT + 26]
    SPANS: tl.constexpr = OPS[AT + 27]
    LAST: tl.constexpr = BLEND and last
    w, b = weights + weight, weights + bias
    if code == NORM:
        for start in range(0, count, SAMPLES):
            value, sample, place, mask = flat_tile(x, x_sample, start, count, size, NUMBERS, SAMPLES, ACT)
            value, _ = normalised(value, mask, size)
            if weight >= 0:
                at, inside = place % channels, place < size
                value = value * tl.load(w + at, inside, 0.0) + tl.load(b + at, inside, 0.0)
            put(o, o_sample, h, h_sample, y, alpha, sample, place, value, mask, LAST)
    elif code == MAP:
        end = count * columns
        for start in range(0, end, COLUMNS):
            n = start + tl.arange(0, COLUMNS)
            for block in tl.static_range(0, outputs, OUT):
                j, total = block + tl.arange(0, OUT), tl.zeros([OUT, COLUMNS], tl.float32)
                if PACKED > 0:
                    k = tl.arange(0, PACKED)
                    value = packed_columns(x, x_sample, k, n, end, inputs, taps, wide, height, across,
                                           columns, input_step, column_step, ACT)
                    at = (j * (inputs * taps))[:, None] + packed_weights(k, inputs, taps)[None, :]
                    mask = (j < outputs)[:, None] & (k < inputs * taps)[None, :]
                    matrix = tl.load(w + at, mask, 0.0).to(MATRIX)
                    total = tl.dot(matrix, value.to(MATRIX), total, input_precision=PRECISION)
                else:
                    for tap in range(0, taps):
                        for first in tl.static_range(0, inputs, IN):
                            i = first + tl.arange(0, IN)
                            value = tap_columns(x, x_sample, i, n, end, tap, inputs, taps, wide, height,
                                                across, columns, input_step, column_step, ACT)
                            matrix = map_weights(w, j, i, tap, outputs, inputs, taps, MATRIX)
                            total = tl.dot(matrix, value.to(MATRIX), total, input_precision=PRECISION)
                if bias >= 0:
                    total += tl.load(b + j, j < outputs, 0.0)[:, None]
                place = (n % columns * out_column_step)[None, :] + (j * output_step)[:, None]
                mask = (j < outputs)[:, None] & (n < end)[None, :]
                put(o, o_sample, h, h_sample, y, alpha, (n // columns)[None, :], place, total, mask, LAST)
    elif code == GATE:
        for start in range(0, count, SAMPLES):
            host, sample, place, mask = flat_tile(h, h_sample, start, count, size, NUMBERS, SAMPLES, 0)
            factors = tl.load(w + place % channels, place < size, 0.0)
            gate = tl.sigmoid(tl.sum(host * factors, 1) / positions + tl.load(b))
            value = read(x, sample * x_sample + place, mask, ACT) * gate[:, None]
            put(o, o_sample, h, h_sample, y, alpha, sample, place, value, mask, LAST)
    elif code == MEAN:
        p = tl.arange(0, SPAN)
        for start in range(0, count * channels, SPANS):
            at = start + tl.arange(0, SPANS)
            sample, channel, mask = at // channels, at % channels, at < count * channels
            inside = mask[:, None] & (p < positions)[None, :]
            source = (sample * x_sample + channel)[:, None] + (p * channels)[None, :]
            mean = tl.sum(tl.where(inside, read(x, source, inside, ACT), 0.0), 1) / positions
            put(o, o_sample, h, h_sample, y, alpha, sample, channel, mean, mask, LAST)
    else:
        for start in range(0, count * size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            sample, place, mask = at // size, at % size, at < count * size
            source = sample * x_sample + place
            if code == DEPTHWISE:
                channel, position = at % channels, at // channels % positions
                value = tl.zeros([BLOCK], tl.float32)
                for tap in tl.static_range(0, taps):
                    row = position // across + tap // wide - taps // wide // 2
                    along = position % across + tap % wide - wide // 2
                    inside = mask & (row >= 0) & (row < height) & (along >= 0) & (along < across)
                    moved = read(x, source + (row * across + along - position) * channels, inside, ACT)
                    value += tl.where(inside, moved * tl.load(w + channel * taps + tap, mask, 0.0), 0.0)
                if bias >= 0:
                    value += tl.load(b + channel, mask, 0.0)
            elif code == GLU:
                source += at // channels % positions * channels  # a position has values, then gates
                value = read(x, source, mask, 0) * tl.sigmoid(read(x, source + channels, mask, 0))
            elif code == POOL:
                after: tl.constexpr = across // 2
                two: tl.constexpr = height > 1
                line: tl.constexpr = across * channels
                position = at // channels % (size // channels)
                corner = position // after * line * (2 if two else 1) + position % after * (2 * channels)
                corner += sample * x_sample + at % channels
                value = larger(read(x, corner, mask, ACT), read(x, corner + channels, mask, ACT))
                if two:
                    corner += line
                    low = larger(read(x, corner, mask, ACT), read(x, corner + channels, mask, ACT))
                    value = larger(value, low)
            elif code == MODULATE:
                value = read(x, sample * x_sample + at % channels, mask, ACT)
                value *= read(h, sample * h_sample + place, mask, 0)
            else:
                value = read(x, source, mask, ACT)
            put(o, o_sample, h, h_sample, y, alpha, sample, place, value, mask, LAST)


@triton.jit(do_not_specialize=["level", "levels", "batch", "per", "width", "size", "slots"])
def forward(x, x_rows, x_row, x_sample, o, o_row, o_sample, h, h_rows, h_row, h_sample, y, weights, width,
            table, level, levels, kinds, env, alphas, slots, size, batch, per, OPS: tl.constexpr,
            COUNT: tl.constexpr, BLEND: tl.constexpr, FIRST: tl.constexpr, MATRIX: tl.constexpr,
            PRECISION: tl.constexpr):
    """Op `level` of every row's program on its samples: x is read from row x_rows[row], o written at row; h
    is what a seed is blended into, to y. A row of kind -2 does not run here, one of kind -1 has no seed."""
    row, begin = tl.program_id(0), tl.program_id(1) * per
    kind, count = tl.load(kinds + row), tl.minimum(batch - begin, per)
    if kind == -2 or count <= 0:
        return
    if BLEND:
        h += tl.load(h_rows + row).to(tl.int64) * h_row + begin * h_sample
        y += row.to(tl.int64) * h_row + begin * h_sample
    if kind == -1:
        if BLEND and FIRST:
            for start in range(0, count * size, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(y + at, tl.load(h + at, at < count * size), at < count * size)
        return
    which = tl.load(table + kind * levels + level)
    alpha = tl.load(alphas + row * slots) if BLEND else 1.0
    x += tl.load(x_rows + row).to(tl.int64) * x_row + begin * x_sample
    o += row.to(tl.int64) * o_row + begin * o_sample
    weights += tl.load(env + row).to(tl.int64) * width
    for number in tl.static_range(0, COUNT):
        if which == number:
            one_op(x, x_sample, o, o_sample, h, h_sample, y, weights, alpha, count, OPS, number * WIDE, BLEND,
                   MATRIX, PRECISION)
