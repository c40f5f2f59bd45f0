"""The optimiser's step of every host, or of every seed of a slot: clip, AdamW or SGD, as in `optim`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "width", "chunks", "stride"])
def update(theta, first, second, steps, grads, trainable, sizes, kinds, flags, finite, lr, decay, stride,
           rows, width, chunks, CLIP: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr,
           LOG1: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr, SGD: tl.constexpr, FROZEN: tl.constexpr,
           BLOCK: tl.constexpr):
    """One program for a row. `grads` [chunks, rows, width] are added up; rows without a flag stay.

    LOG1 and LOG2 are logarithms of the betas: 1 - 0.999 has few digits left in float32.
    """
    row = tl.program_id(0)
    if tl.load(flags + row) == 0:
        return
    size = tl.load(sizes + tl.load(kinds + row))
    at = row.to(tl.int64) * width
    square = 0.0
    for start in range(0, size, BLOCK):
        p = start + tl.arange(0, BLOCK)
        grad = tl.zeros([BLOCK], tl.float32)
        for chunk in range(0, chunks):
            grad += tl.load(grads + (chunk * rows + row).to(tl.int64) * width + p, p < size, 0.0)
        if FROZEN:
            grad *= tl.load(trainable + at + p, p < size, 0.0)
        square += tl.sum(grad * grad, 0)
    norm = tl.sqrt(square)
    sound = (norm == norm) & (norm < float("inf"))
    tl.store(finite + row * stride, tl.load(finite + row * stride) & sound.to(tl.int8))
    scale = CLIP / (norm + 1e-6)
    scale = tl.where(scale > 1.0, 1.0, scale)
    step = tl.load(steps + row) + 1
    tl.debug_barrier()  # every warp reads the count before it is written
    tl.store(steps + row, step)
    rate, shrink = tl.load(lr + row * stride), tl.load(decay + row * stride)
    unbias1 = 1 - tl.exp(step.to(tl.float64) * LOG1)
    unbias2 = 1 - tl.exp(step.to(tl.float64) * LOG2)
    for start in range(0, size, BLOCK):
        p = start + tl.arange(0, BLOCK)
        mask = p < size
        grad = tl.zeros([BLOCK], tl.float32)
        for chunk in range(0, chunks):
            grad += tl.load(grads + (chunk * rows + row).to(tl.int64) * width + p, mask, 0.0)
        weight, moment = tl.load(theta + at + p, mask, 0.0), tl.load(first + at + p, mask, 0.0)
        free = mask
        if FROZEN:
            mask_of = tl.load(trainable + at + p, mask, 0.0)
            grad *= mask_of
            free = mask & (mask_of > 0)
        grad *= scale
        if SGD:
            moment = moment * BETA1 + grad + weight * shrink
            weight -= rate * moment
        else:
            moment += (1 - BETA1) * (grad - moment)
            spread = tl.load(second + at + p, mask, 0.0) * BETA2 + (1 - BETA2) * grad * grad
            tl.store(second + at + p, spread, mask)
            change = moment / (tl.sqrt(spread) * (1 / tl.sqrt(unbias2)).to(tl.float32) + EPS)
            weight = weight * (1 - rate * shrink) - change * (rate / unbias1).to(tl.float32)
        tl.store(first + at + p, moment, mask)
        tl.store(theta + at + p, weight, free)
