"""Series on the CPU, [G, C, L, B], against PyTorch's own layers, one copy after the other, and their gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import series
from esper.kasmina.lift import from_copies, lifted, to_copies

COPIES, BATCH = 3, 5


def agree(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
    """Outputs, gradients of inputs and of every parameter: as G copies, and each copy by itself."""
    generator = torch.Generator().manual_seed(1)
    layer = layer.to(dtype)
    weights = {name: torch.randn(COPIES, *p.shape, generator=generator, dtype=dtype).requires_grad_()
               for name, p in layer.named_parameters()}
    x = torch.randn(COPIES, BATCH, *shape, generator=generator, dtype=dtype).requires_grad_()
    out = to_copies(lifted(layer, weights, from_copies(x)))
    along = torch.randn(out.shape, generator=generator, dtype=dtype)
    leaves = [x, *weights.values()]
    grads = torch.autograd.grad(out, leaves, along)
    alone = torch.stack([torch.func.functional_call(layer, {name: w[copy] for name, w in weights.items()}, x[copy])
                         for copy in range(COPIES)])
    within = {"rtol": 0, "atol": 1e-10 if dtype == torch.float64 else 1e-4}
    torch.testing.assert_close(out, alone, **within)
    for mine, theirs in zip(grads, torch.autograd.grad(alone, leaves, along), strict=True):
        torch.testing.assert_close(mine, theirs, **within)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layer", [
    nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(4, 6, 3, padding=1, bias=False), nn.Conv1d(4, 6, 1), nn.Conv1d(4, 2, 3),
    nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Conv1d(4, 6, 5, padding=2, groups=2), nn.Conv1d(4, 3, 1, padding=2),
    nn.Conv1d(4, 3, 3, padding=4), nn.Conv1d(4, 3, 2, padding=1), nn.Conv1d(4, 3, 3, padding=1, stride=2),
    nn.Conv1d(4, 3, 3, padding=2, dilation=2), nn.GroupNorm(1, 4), nn.GroupNorm(2, 4), nn.GroupNorm(4, 4, affine=False),
    nn.GroupNorm(1, 4, affine=False), nn.MaxPool1d(2), nn.MaxPool1d(3), nn.MaxPool1d(2, ceil_mode=True),
    nn.AdaptiveAvgPool1d(1), nn.AdaptiveAvgPool1d(3), nn.Linear(9, 4), nn.Linear(9, 4, bias=False), nn.GLU(1),
    nn.LayerNorm(9), nn.Flatten(), nn.Softmax(1), nn.Sequential(nn.ReLU(), nn.MaxPool1d(2)),
], ids=str)
def test_a_layer_of_many_copies_equals_its_copies(layer: nn.Module, dtype: torch.dtype) -> None:
    agree(layer, (4, 9), dtype)


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))], ids=str)
@pytest.mark.parametrize("extent", [(6, 8), (5, 7)])
def test_pools_of_images_equal_those_of_their_copies(layer: nn.Module, extent: tuple[int, int]) -> None:
    agree(layer, (2, *extent))


class Mirror(nn.ReLU):
    """Somebody's own: what a pool makes of it is not what it makes of a pool."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def test_a_pool_changes_places_with_a_plain_relu_alone() -> None:
    agree(nn.Sequential(Mirror(), nn.MaxPool1d(2)), (4, 8))
    watched, seen = nn.Sequential(nn.ReLU(), nn.MaxPool1d(2)), []
    watched[0].register_forward_hook(lambda layer, args, out: seen.append(out.shape[-1]))
    agree(watched, (4, 8))
    assert set(seen) == {8}


def test_of_equal_neighbours_the_first_gets_the_gradient_as_in_pytorch() -> None:
    x = torch.zeros(1, 2, 1, 4, 4, dtype=torch.float64).requires_grad_()
    pooled = lifted(nn.MaxPool2d(2), {}, from_copies(x))
    (mine,) = torch.autograd.grad(pooled.sum(), x)
    (theirs,) = torch.autograd.grad(nn.functional.max_pool2d(x[0], 2).sum(), x)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("broken", [
    lambda x: series.convolve(x, torch.ones(len(x), 2, 4, 3), None, 1, 1), lambda x: series.Normalised.apply(x, 1, 1e-5),
    lambda x: series.MaxOfPairs.apply(x, 2), series.Mean.apply])
def test_what_is_not_finite_stays_in_its_copy(broken: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4, 8, 5, generator=torch.Generator().manual_seed(0))
    x[1, 0, 0, 0] = torch.nan
    x.requires_grad_()
    out = broken(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    for values in (out, grad):
        assert bool(values[[0, 2]].isfinite().all())
    assert not bool(out[1].isfinite().all())
