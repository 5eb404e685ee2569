"""One operator on several ranks: convolutions by channels and by space, im2col, linear layers."""

from __future__ import annotations

import doctest
import importlib
import itertools

import pytest
import torch
from mesh_cases import in_one_world
from torch import nn
from torch.nn import functional

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.core import collectives
from pycoll.parallel.core.placement import share
from pycoll.parallel.features.tensor.im2col import conv2d_by_gemm, im2col

TOLERANCE = 1e-12


def make():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 7, 3, padding=1)
    return layer, torch.randn(4, 5, 10, 6), torch.randn(4, 7, 10, 6)


def close(a, b) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE)


def product(out, grad):
    """A loss with the gradient `grad`."""
    return (out * grad).sum(), 1


def by_channels(comm, by: str) -> None:
    layer, x, grad = make()
    whole, x_whole = layer(x.requires_grad_()), x
    whole.backward(grad)
    gradients = [p.grad.clone() for p in layer.parameters()]
    mesh = pc.mesh(tp=comm.size, comm=comm)
    model = pc.parallelize(nn.Sequential(make()[0]), mesh, tp={"0": by})
    x = x_whole.detach().clone().requires_grad_()
    assert close(model(x), whole)
    model.step(x, grad, loss=product)
    assert close(x.grad, x_whole.grad)
    for got, expected in zip(pc.whole_gradients(model).values(), gradients, strict=True):
        assert close(got, expected)


def by_space(comm) -> None:
    """Exchanges its borders, and no more."""
    layer, x, grad = make()
    n = comm.size
    whole = layer(x.requires_grad_())
    whole.backward(grad)
    gradients = [p.grad.clone() for p in layer.parameters()]
    mesh = pc.mesh(tp=n, comm=comm)
    model = pc.parallelize(nn.Sequential(make()[0]), mesh, tp={"0": "conv_space"})
    start, stop = share(10, n, comm.rank)
    mine = x.detach()[:, :, start:stop].clone().requires_grad_()
    mesh.ledger.clear()
    assert close(model(mine), whole[:, :, start:stop])
    neighbours = (comm.rank > 0) + (comm.rank < n - 1)
    rows, w, c, batch, nbytes = 3 // 2, 6, 5, 4, 8
    assert mesh.ledger.of("tp", "send").nbytes == neighbours * rows * w * c * batch * nbytes
    model.step(mine, grad[:, :, start:stop], loss=product)
    assert close(mine.grad, x.grad[:, :, start:stop])
    for got, expected in zip(pc.whole_gradients(model).values(), gradients, strict=True):
        assert close(got, expected)


def by_samples(comm) -> None:
    layer, x, grad = make()
    layer(x).backward(grad)
    mesh = pc.mesh(comm=comm)
    model = pc.parallelize(nn.Sequential(make()[0]), mesh)
    ((x, grad),) = pc.shard([(x, grad)], mesh)
    model.step(x, grad, loss=product)
    for got, p in zip(pc.whole_gradients(model).values(), layer.parameters(), strict=True):
        assert close(got * comm.size, p.grad)  # the loss of each replica counts one


def test_convolution_by_channels_space_or_samples_equals_the_whole_one():
    kinds = ((by_channels, "conv_out"), (by_channels, "conv_in"), (by_space,), (by_samples,))
    call = lambda comm, work, *args: work(comm, *args)  # noqa: E731
    in_one_world(call, [(n, *kind) for n in (2, 3) for kind in kinds])


def test_im2col_of_three_channels_and_two_filters():
    """By hand: a patch is a column, channel after channel; a filter is a row."""
    x = torch.arange(27.0).view(1, 3, 3, 3)
    columns = im2col(x, (2, 2))
    assert columns.shape == (1, 12, 4)
    assert columns[0, :, 0].tolist() == [0, 1, 3, 4, 9, 10, 12, 13, 18, 19, 21, 22]
    filters = torch.stack([torch.ones(3, 2, 2), torch.eye(2).repeat(3, 1, 1)])
    out = conv2d_by_gemm(x, filters)
    assert out[0, 0, 0, 0] == 132 and out[0, 1, 0, 0] == 0 + 4 + 9 + 13 + 18 + 22


def test_product_of_im2col_is_the_convolution():
    torch.manual_seed(1)
    x, weight = torch.randn(2, 3, 9, 8).double(), torch.randn(4, 3, 3, 2).double()

    def work(comm):
        line = pc.mesh(tp=3, comm=comm).line("tp")
        for stride, padding in ((1, 0), (2, 1), (3, 2)):
            expected = functional.conv2d(x, weight, stride=stride, padding=padding)
            assert close(conv2d_by_gemm(x, weight, line, stride, padding), expected)
            assert close(conv2d_by_gemm(x, weight, None, stride, padding), expected)

    run_ranks(work, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_im2col_has_the_bits_and_gradients_of_unfold(dtype):
    torch.manual_seed(2)
    sizes, kernels = ((12, 5), (1, 9)), ((1, 1), (3, 2), (2, 5))
    compared = 0
    for size, kernel in itertools.product(sizes, kernels):
        x = torch.randn(2, 3, *size, dtype=dtype).requires_grad_()
        for stride, padding, dilation in itertools.product((1, 2, 3), (0, 1, 4), (1, 2)):
            spans = [dilation * (k - 1) + 1 for k in kernel]
            if any(n + 2 * padding < span for n, span in zip(size, spans, strict=True)):
                with pytest.raises(UsageError, match="does not fit into an image of"):
                    im2col(x, kernel, stride, padding, dilation)
                continue
            expected = functional.unfold(x, kernel, dilation, padding, stride)
            got = im2col(x, kernel, stride, padding, dilation)
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
            (wanted,) = torch.autograd.grad(expected.square().sum(), x)
            assert torch.equal(torch.autograd.grad(got.square().sum(), x)[0], wanted)
            compared += 1
    assert compared > 60


def test_im2col_doctest_is_right():
    assert doctest.testmod(importlib.import_module(im2col.__module__)).failed == 0


def test_column_that_gathers_is_whole_again():
    def work(comm):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 7), torch.randn(3, 4)
        expected = layer(x)
        model = pc.parallelize(nn.Sequential(layer), pc.mesh(tp=2, comm=comm), tp={"0": "gather"})
        assert close(model(x), expected)

    run_ranks(work, 2)


def test_conjugates_have_each_others_gradient():
    def work(comm):
        torch.set_default_dtype(torch.float64)
        line = pc.mesh(tp=2, comm=comm).line("tp")
        x = torch.arange(6.0).view(3, 2).requires_grad_()
        part = collectives.scatter_to(x, line, 0)
        assert part.shape == (2 - comm.rank, 2)
        whole = collectives.gather_from(part, line, 0, 3)
        assert torch.equal(whole, x)
        whole.backward(torch.ones(3, 2))
        assert torch.equal(x.grad, torch.ones(3, 2))
        y = collectives.reduce_from(collectives.copy_to(x, line) * (comm.rank + 1), line)
        assert torch.equal(y, 3 * x)
        z = collectives.gather_to(part.detach().requires_grad_(), line, 0, 3)
        assert torch.equal(collectives.reduce_scatter_from(z, line, 0), 2 * part)

    run_ranks(work, 2)


def test_convolutions_that_cannot_be_shared_out_are_an_error():
    def work(comm):
        mesh = pc.mesh(tp=2, comm=comm)
        for layer, style, message in (
            (nn.Conv2d(4, 4, 3, groups=2), "conv_out", "in one group"),
            (nn.Conv2d(4, 4, 3, padding="same"), "conv_in", "expected numbers"),
            (nn.Conv2d(4, 4, 3, stride=2, padding=1), "conv_space", "needs stride 1"),
            (nn.Conv2d(4, 4, 3), "conv_space", "as many rows out as in"),
        ):
            with pytest.raises(UsageError, match=message):
                pc.parallelize(nn.Sequential(layer), mesh, tp={"0": style})

    run_ranks(work, 2)
