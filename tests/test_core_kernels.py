"""Our GPU kernels against PyTorch's own operations: on a GPU, or where Triton is installed in its interpreter."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedkin.compute import convolutions, kernels, windows
from fedkin.compute.backends import matmul_precision
from fedkin.compute.forward import Context
from fedkin.compute.layout import Layout
from fedkin.compute.optim import SGD, Adam, Pull, update
from fedkin.compute.program import Program

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
here = pytest.mark.skipif(
    not kernels.usable(torch.zeros(1, device=DEVICE)), reason="needs a GPU, or Triton with TRITON_INTERPRET=1"
)


@pytest.mark.skipif(DEVICE == "cuda" or kernels.triton is None or kernels.INTERPRETED, reason="needs Triton, no GPU")
@pytest.mark.parametrize("some", ["True or batch_norm", pytest.param("", marks=pytest.mark.slow)], ids=["half", "all"])
def test_all_of_these_in_tritons_interpreter(some):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, __file__]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@here
def test_where_no_kernel_runs_pytorchs_operations_do(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("Failed to find C compiler\nand more")

    kernels.works.cache_clear()
    monkeypatch.setattr(kernels, "step", broken)
    try:
        with pytest.warns(UserWarning, match=r"do not run here \(Failed to find C compiler\)"):
            assert not kernels.usable(torch.zeros(1, device=DEVICE))
        assert not kernels.usable(torch.zeros(1, device=DEVICE))  # said once
    finally:
        kernels.works.cache_clear()


CONVOLUTIONS = [
    (3, (9, 9), (5, 5), (1, 1), (0, 0)),
    (8, (7, 6), (3, 3), (1, 1), (1, 1)),
    (5, (8, 9), (3, 2), (2, 2), (1, 0)),
    (3, (11, 11), (7, 7), (2, 2), (3, 3)),
    (2, (6, 6), (3, 3), (2, 1), (2, 1)),
]


def images(channels, size, last, batch=3):
    x = torch.randn(batch, channels, *size, device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last) if last else x


@here
@pytest.mark.parametrize(("channels", "size", "kernel", "stride", "padding"), CONVOLUTIONS)
@pytest.mark.parametrize("last", [True, False])
def test_patches_and_back(channels, size, kernel, stride, padding, last):
    torch.manual_seed(0)
    x = images(channels, size, last).requires_grad_()
    found = windows.patches(x, kernel, stride, padding)
    count = kernel[0] * kernel[1] * channels
    assert found.shape[-1] % 4 == 0
    assert not found[..., count:].any()
    assert found.shape[-1] - count < 4
    right = F.unfold(x, kernel, padding=padding, stride=stride)  # [N, C kh kw, L]
    right = right.view(3, channels, *kernel, *found.shape[1:3]).permute(0, 4, 5, 2, 3, 1)
    assert torch.equal(found[..., :count].reshape(right.shape), right)
    g = torch.randn_like(found)
    (mine,) = torch.autograd.grad(found, x, g)
    (theirs,) = torch.autograd.grad(right, x, g[..., :count].reshape(right.shape))
    assert torch.allclose(mine, theirs, atol=1e-5)


POOLS = [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 2), (1, 2), (1, 0)), ((2, 2), (3, 3), (0, 0))]


@here
@pytest.mark.parametrize(("kernel", "stride", "padding"), POOLS)
@pytest.mark.parametrize("last", [True, False])
def test_max_pool_and_back(kernel, stride, padding, last):
    torch.manual_seed(1)
    x = images(5, (9, 8), last).mul(2).round().requires_grad_()  # with many equals
    mine, theirs = windows.max_pool(x, kernel, stride, padding), F.max_pool2d(x, kernel, stride, padding)
    assert torch.equal(mine, theirs)
    g = torch.randn_like(theirs)
    (a,), (b,) = torch.autograd.grad(mine, x, g), torch.autograd.grad(theirs, x, g)
    assert torch.allclose(a, b, atol=1e-6)


@here
def test_max_pool_lets_nan_through():
    x = torch.zeros(1, 1, 4, 4, device=DEVICE)
    x[0, 0, 1, 1] = float("nan")
    found = windows.max_pool(x, (2, 2), (2, 2), (0, 0))
    assert found[0, 0, 0, 0].isnan()
    assert not found[0, 0, 1, 1].isnan()


def rows_of(shape, dtype=torch.float32):
    """[4, ...] laid down as a stack does."""
    t = torch.randn(4, *shape, device=DEVICE)
    t = (t > 0).to(dtype) if dtype == torch.bool else t
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if len(shape) == 4 else t


OPTIMISERS = [SGD(0.1), SGD(0.1, 0.9), SGD(0.1, 0.5, 0.01), Adam(0.01), Adam(0.01, 0.8, 0.95, weight_decay=0.1)]


@here
@pytest.mark.parametrize("opt", OPTIMISERS, ids=str)
@pytest.mark.parametrize(
    ("pull", "mask", "gate", "shorten"),
    [(*p, False) for p in itertools.product([False, True], repeat=3)] + [(False,) * 3 + (True,), (True,) * 4],
)
def test_a_step_is_the_update_row_by_row(opt, pull, mask, gate, shorten):
    """Against `update` on each row alone; a row that rests keeps its weights and its memory."""
    torch.manual_seed(2)
    shapes = [(6, 3, 3, 2), (6,), (7, 5)]
    params, grads = [rows_of(s) for s in shapes], [rows_of(s) for s in shapes]
    memory = [[rows_of(s).abs() for s in shapes] for _ in range(opt.buffers)]
    anchors, masks = [rows_of(s) for s in shapes], [rows_of(s, torch.bool) for s in shapes]
    mu, taken = torch.tensor([0.0, 0.5, 1.0, 2.0], device=DEVICE), torch.tensor([1.0, 2.0, 7.0, 900.0], device=DEVICE)
    on = torch.tensor([1.0, 1.0, 0.0, 1.0], device=DEVICE) if gate else None
    scale = torch.tensor([1.0, 0.1, 0.5, 0.0], device=DEVICE) if shorten else torch.ones(4, device=DEVICE)
    expected, remembered = [p.clone() for p in params], [[t.clone() for t in b] for b in memory]
    for r in range(4):
        if on is not None and not on[r]:
            continue
        update(
            opt,
            [p[r] for p in expected],
            [g[r] * scale[r] for g in grads],
            [[t[r] for t in b] for b in remembered],
            float(taken[r]),
            Pull([float(mu[r])] * 3, [a[r] for a in anchors]) if pull else None,
            [m[r] for m in masks] if mask else None,
        )
    given = (mu if pull else None, anchors if pull else None, masks if mask else None, on)
    kernels.step(opt, params, grads, memory, taken, *given, scale=scale if shorten else None)
    for a, b in zip([*params, *itertools.chain(*memory)], [*expected, *itertools.chain(*remembered)], strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("opt", OPTIMISERS, ids=str)
def test_pytorchs_update_lets_rows_rest(opt):
    """The same without our kernels."""
    torch.manual_seed(3)
    params, grads = [torch.randn(4, 5)], [torch.randn(4, 5)]
    memory = [[torch.rand(4, 5)] for _ in range(opt.buffers)]
    before = [t.clone() for t in [*params, *itertools.chain(*memory)]]
    on = torch.tensor([1.0, 0.0, 1.0, 0.0]).view(-1, 1)
    update(opt, params, grads, memory, [torch.full((4, 1), 2.0)], gate=[on])
    for now, then in zip([*params, *itertools.chain(*memory)], before, strict=True):
        assert torch.equal(now[1::2], then[1::2])
        assert not torch.equal(now[::2], then[::2])


@here
@pytest.mark.parametrize("shape", [(5, 4, 3), (20, 1, 1), (6,)], ids=str)
def test_batch_norm_of_many_rows(shape):
    """Against BatchNorm on the counted samples of each row; a row with none changes nothing."""
    torch.manual_seed(4)
    rows, batch, channels, valid = 3, 4, shape[0], torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    x = torch.randn(rows * batch, *shape, device=DEVICE) * 3 + 5
    leaves = [x, torch.randn(rows, channels, device=DEVICE), torch.randn(rows, channels, device=DEVICE)]
    x, scale, shift = [t.requires_grad_() for t in leaves]
    mean, var = torch.randn(rows, channels, device=DEVICE), torch.rand(rows, channels, device=DEVICE)
    running = mean.clone(), var.clone()
    found = kernels.batch_norm(x, scale, shift, mean, var, valid.float().to(DEVICE), 0.1, 1e-5)
    assert found.shape == x.shape
    g = torch.randn_like(found) * valid.flatten().view(-1, *[1] * len(shape)).to(DEVICE)
    mine = torch.autograd.grad(found, (x, scale, shift), g)
    for r in range(rows):
        at = [r * batch + int(i) for i in valid[r].nonzero()]
        if not at:
            assert torch.equal(mean[r], running[0][r])
            assert torch.equal(var[r], running[1][r])
            assert not mine[0][r * batch : (r + 1) * batch].any()
            continue
        own = [t.detach()[part].clone().requires_grad_() for t, part in ((x, at), (scale, r), (shift, r))]
        right = F.batch_norm(own[0], running[0][r], running[1][r], own[1], own[2], True, 0.1, 1e-5)
        assert torch.allclose(found[at], right, atol=1e-4)
        assert torch.allclose(mean[r], running[0][r], atol=1e-5)
        assert torch.allclose(var[r], running[1][r], atol=1e-4)
        theirs = torch.autograd.grad(right, own, g[at])
        for a, b in zip((mine[0][at], mine[1][r], mine[2][r]), theirs, strict=True):
            assert torch.allclose(a, b, atol=2e-4, rtol=1e-3)


@here
@pytest.mark.parametrize(("channels", "size", "kernel", "stride", "padding"), CONVOLUTIONS)
@pytest.mark.parametrize(("last", "outputs"), [(True, 6), (False, 20)])
def test_convolutions_of_many_rows(channels, size, kernel, stride, padding, last, outputs):
    """Against a convolution for each row."""
    torch.manual_seed(5)
    x = images(channels, size, last, batch=12).requires_grad_()
    w = torch.randn(4, outputs, *kernel, channels, device=DEVICE).permute(0, 1, 4, 2, 3).requires_grad_()
    found = convolutions.convolve(x, w, stride, padding)
    right = torch.cat([F.conv2d(x[3 * r : 3 * r + 3], w[r], None, stride, padding) for r in range(4)])
    g = torch.randn_like(right)
    for a, b in zip(
        [found, *torch.autograd.grad(found, (x, w), g)], [right, *torch.autograd.grad(right, (x, w), g)], strict=True
    ):
        assert a.shape == b.shape
        assert (a - b).norm() <= 2e-3 * b.norm()


@here
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smooth", [True, False])
def test_a_network_of_many_rows_takes_these_convolutions(monkeypatch, bias, smooth):
    """Logits and gradients of three rows, against the network itself; rows too small for it go the other way. With
    kinks a unit that tensor cores' rounding turns on or off moves a gradient by more than the rounding."""
    torch.manual_seed(6)
    bend, pool = (nn.Tanh, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=bias),
        bend(),
        pool(2),
        nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=bias),
        bend(),
        nn.Flatten(),
        nn.Linear(24, 4),
    ).to(DEVICE)
    used = []
    real = convolutions.convolve
    monkeypatch.setattr(convolutions, "convolve", lambda *given: used.append(given[1].shape) or real(*given))
    layout = Layout.of(net, "6", "average")
    program, rows = Program(net, layout), layout.row(net).to(DEVICE).repeat(3, 1)
    rows = (rows * (1 + 0.2 * torch.randn_like(rows))).requires_grad_()
    x, g = torch.randn(3 * 5, 3, 10, 10, device=DEVICE), torch.randn(3, 5, 4, device=DEVICE)
    with matmul_precision("tf32"):
        found = program(layout.tensors(rows), x, 3, Context(train=True)).logits
        (mine,) = torch.autograd.grad(found, rows, g)
    assert len(used) == 1  # five images of 64 positions, then of four
    for r in range(3):
        own = {k: v.detach().clone().requires_grad_() for k, v in layout.tensors(rows[r]).items()}
        right = functional_call(net, own, (x[5 * r : 5 * r + 5],))
        assert (found[r] - right).norm() <= 3e-3 * right.norm()
        theirs = torch.cat([t.flatten() for t in torch.autograd.grad(right, list(own.values()), g[r])])
        bound = 5e-3 if smooth or DEVICE == "cpu" else 0.1
        assert (mine[r] - theirs).norm() <= bound * theirs.norm()
