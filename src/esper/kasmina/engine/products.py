"""Gradients of maps: of their weights and of what they read. `x` is what was read, `g` the gradient behind.

Sizes are those of the op, in the names of `backward.one_op`.
"""

import triton
import triton.language as tl

from esper.kasmina.engine.tiles import map_weights, packed_columns, packed_weights, pass_on, tap_columns


@triton.jit
def to_packed_weights(x, x_sample, g, g_sample, w, b, alpha, end, bias: tl.constexpr, inputs: tl.constexpr,
                      outputs: tl.constexpr, taps: tl.constexpr, wide: tl.constexpr, height: tl.constexpr,
                      across: tl.constexpr, columns: tl.constexpr, input_step: tl.constexpr,
                      column_step: tl.constexpr, output_step: tl.constexpr, out_column_step: tl.constexpr,
                      OUT: tl.constexpr, PACKED: tl.constexpr, COLUMNS: tl.constexpr, ACT: tl.constexpr,
                      MATRIX: tl.constexpr, PRECISION: tl.constexpr):
    """All taps of all inputs at once."""
    k = tl.arange(0, PACKED)
    for block in tl.static_range(0, outputs, OUT):
        j, shift = block + tl.arange(0, OUT), tl.zeros([OUT], tl.float32)
        total = tl.zeros([OUT, PACKED], tl.float32)
        for start in range(0, end, COLUMNS):
            n = start + tl.arange(0, COLUMNS)
            grad = tap_columns(g, g_sample, j, n, end, 0, outputs, 1, 1, 1, 1, columns, output_step,
                               out_column_step, 0)
            shift += tl.sum(grad, 1)
            value = packed_columns(x, x_sample, k, n, end, inputs, taps, wide, height, across, columns,
                                   input_step, column_step, ACT).to(MATRIX)
            total = tl.dot(grad.to(MATRIX), tl.trans(value), total, input_precision=PRECISION)
        mask = (j < outputs)[:, None] & (k < inputs * taps)[None, :]
        at = (j * (inputs * taps))[:, None] + packed_weights(k, inputs, taps)[None, :]
        tl.store(w + at, alpha * total, mask)
        if bias >= 0:
            tl.store(b + j, alpha * shift, j < outputs)


@triton.jit
def to_weights(x, x_sample, g, g_sample, w, b, alpha, end, bias: tl.constexpr, inputs: tl.constexpr,
               outputs: tl.constexpr, taps: tl.constexpr, wide: tl.constexpr, height: tl.constexpr,
               across: tl.constexpr, columns: tl.constexpr, input_step: tl.constexpr,
               column_step: tl.constexpr, output_step: tl.constexpr, out_column_step: tl.constexpr,
               OUT: tl.constexpr, IN: tl.constexpr, COLUMNS: tl.constexpr, ACT: tl.constexpr,
               MATRIX: tl.constexpr, PRECISION: tl.constexpr):
    """Three taps of a line at once, or one: a gradient is read once for all of them."""
    LINE: tl.constexpr = 3 if wide == 3 else 1
    for block in tl.static_range(0, outputs, OUT):
        j, shift = block + tl.arange(0, OUT), tl.zeros([OUT], tl.float32)
        for line in range(0, taps // LINE):
            for first in tl.static_range(0, inputs, IN):
                i, tap = first + tl.arange(0, IN), line * LINE
                left, middle = tl.zeros([OUT, IN], tl.float32), tl.zeros([OUT, IN], tl.float32)
                right = tl.zeros([OUT, IN], tl.float32)
                for start in range(0, end, COLUMNS):
                    n = start + tl.arange(0, COLUMNS)
                    grad = tap_columns(g, g_sample, j, n, end, 0, outputs, 1, 1, 1, 1, columns, output_step,
                                       out_column_step, 0)
                    if first == 0:
                        shift += tl.where(line == 0, tl.sum(grad, 1), 0.0)
                    grad = grad.to(MATRIX)
                    value = tap_columns(x, x_sample, i, n, end, tap, inputs, taps, wide, height, across,
                                        columns, input_step, column_step, ACT).to(MATRIX)
                    left = tl.dot(grad, tl.trans(value), left, input_precision=PRECISION)
                    if LINE == 3:
                        value = tap_columns(x, x_sample, i, n, end, tap + 1, inputs, taps, wide, height,
                                            across, columns, input_step, column_step, ACT).to(MATRIX)
                        middle = tl.dot(grad, tl.trans(value), middle, input_precision=PRECISION)
                        value = tap_columns(x, x_sample, i, n, end, tap + 2, inputs, taps, wide, height,
                                            across, columns, input_step, column_step, ACT).to(MATRIX)
                        right = tl.dot(grad, tl.trans(value), right, input_precision=PRECISION)
                mask = (j < outputs)[:, None] & (i < inputs)[None, :]
                at = (j * (inputs * taps))[:, None] + (i * taps + tap)[None, :]
                tl.store(w + at, alpha * left, mask)
                if LINE == 3:
                    tl.store(w + at + 1, alpha * middle, mask)
                    tl.store(w + at + 2, alpha * right, mask)
        if bias >= 0:
            tl.store(b + j, alpha * shift, j < outputs)


@triton.jit
def to_inputs(x, x_sample, g, g_sample, d, d_sample, weights, alpha, end, inputs: tl.constexpr,
              outputs: tl.constexpr, taps: tl.constexpr, wide: tl.constexpr, height: tl.constexpr,
              across: tl.constexpr, columns: tl.constexpr, input_step: tl.constexpr,
              column_step: tl.constexpr, output_step: tl.constexpr, out_column_step: tl.constexpr,
              OUT: tl.constexpr, IN: tl.constexpr, COLUMNS: tl.constexpr, ACT: tl.constexpr,
              ADD: tl.constexpr, MATRIX: tl.constexpr, PRECISION: tl.constexpr):
    for start in range(0, end, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        for first in tl.static_range(0, inputs, IN):
            i, total = first + tl.arange(0, IN), tl.zeros([IN, COLUMNS], tl.float32)
            for tap in range(0, taps):
                for block in tl.static_range(0, outputs, OUT):
                    j = block + tl.arange(0, OUT)
                    grad = tap_columns(g, g_sample, j, n, end, taps - 1 - tap, outputs, taps, wide, height,
                                       across, columns, output_step, out_column_step, 0).to(MATRIX)
                    matrix = map_weights(weights, j, i, tap, outputs, inputs, taps, MATRIX)
                    total = tl.dot(tl.trans(matrix), grad, total, input_precision=PRECISION)
            spot = (n % columns * column_step)[None, :] + (i * input_step)[:, None]
            sample, mask = (n // columns)[None, :], (i < inputs)[:, None] & (n < end)[None, :]
            pass_on(d, sample * d_sample + spot, alpha * total, x, sample * x_sample + spot, mask, ACT, ADD)
