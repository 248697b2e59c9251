"""The GPU kernels of the trainer equal their plain twins, values and gradients.

They run on a GPU, or anywhere under Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/training/test_fused.py`.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from training import attention, sinkhorn, streams
from training.fused import Gated, Scores, Softmax, Turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.to(DEVICE).requires_grad_()


def _compare(ours, plain, inputs) -> None:
    """Same outputs and same gradients for random upstream gradients."""
    with torch.enable_grad():
        a, b = ours(*inputs), plain(*inputs)
        a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
        up = [torch.randn_like(x) for x in a]
        grads = [torch.autograd.grad(x, inputs, up, allow_unused=True) for x in (a, b)]
    for x, y in zip((*a, *grads[0]), (*b, *grads[1]), strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("far, shared_mask", [(0, False), (12, False), (24, True)])
def test_softmax(far: int, shared_mask: bool) -> None:
    near, sink = _random(2, 24, 2, 16), _random(2)
    allowed = torch.rand(1 if shared_mask else 2, 24, far, device=DEVICE) < 0.5
    if far:
        score = _random(2, 24, 2, far)
        _compare(
            lambda n, s, f: Softmax.apply(n, f, allowed, s),
            lambda n, s, f: attention.softmax(n, f, allowed, s),
            (near, sink, score),
        )
    else:
        _compare(
            lambda n, s: Softmax.apply(n, None, None, s)[0],
            lambda n, s: attention.softmax(n, None, None, s)[0],
            (near, sink),
        )


@pytest.mark.parametrize("shape, sign", [((2, 5, 3, 32), 1.0), ((2, 5, 32), -1.0)])
def test_turn(shape: tuple[int, ...], sign: float, monkeypatch) -> None:
    angle = torch.randn(5, 8, device=DEVICE)
    turn = (angle.cos(), angle.sin())
    monkeypatch.setattr(attention, "fused", lambda x: False)
    _compare(lambda x: Turn.apply(x, *turn, sign), lambda x: attention.rotate(x, turn, sign), (_random(*shape),))


@pytest.mark.parametrize("ratio", [1, 2])
def test_scores(ratio: int) -> None:
    n = 10 // ratio
    shut = torch.arange(n, device=DEVICE) >= ((torch.arange(10, device=DEVICE) + 1) // ratio)[:, None]

    def plain(dots, weight):
        return (dots.relu().unflatten(1, (-1, 3)) * weight[..., None]).sum(2).masked_fill(shut, -torch.inf)

    _compare(lambda d, w: Scores.apply(d, w, ratio), plain, (_random(2, 30, n), _random(2, 10, 3)))


def test_gated() -> None:
    def plain(g, u, w):
        return torch.nn.functional.silu(g.clamp(max=0.7)) * u.clamp(-0.7, 0.7) * w[..., None]

    _compare(
        lambda g, u, w: Gated.apply(g, u, w, 0.7), plain, (_random(3, 2, 16), _random(3, 2, 16, seed=1), _random(3, 2))
    )


def test_streams() -> None:
    s, pre, y, post, comb = _random(5, 4, 24), _random(5, 4), _random(5, 24), _random(5, 4, seed=2), _random(5, 4, 4)
    _compare(streams._Collapse.apply, lambda s, p: (p[..., None, :] @ s).squeeze(-2), (s, pre))
    _compare(
        streams._Expand.apply,
        lambda y, s, p, c: p[..., None] * y[..., None, :] + c.transpose(-1, -2) @ s,
        (y, s, post, comb),
    )


def test_sinkhorn_kernels() -> None:
    x, g = _random(70, 4, 4).detach(), _random(70, 4, 4, seed=1).detach()
    out, back = torch.empty_like(x), torch.empty_like(x)
    sinkhorn._forward_kernel[(2,)](x, out, 70, 20, 1e-6, K=4, BLOCK=64)
    torch.testing.assert_close(out, sinkhorn.forward_reference(x, 20, 1e-6))
    sinkhorn._backward_kernel[(2,)](out, g, back, 70, 20, K=4, BLOCK=64)
    torch.testing.assert_close(back, sinkhorn.backward_reference(out, g, 20))
