"""`optimizer.backward(loss)` leaves the gradients of plain training, bit for bit."""

import itertools
import warnings
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lossscale
from lossscale import DynamicScale
from lossscale.torch import LossScaleOptimizer


def bits(ts):
    return [t.detach().clone() for t in ts]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(
            x.view(torch.int32) if x.dtype == torch.float32 else x,
            y.view(torch.int32) if y.dtype == torch.float32 else y,
        )
        for x, y in zip(a, b, strict=False)
    )


OPT = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw single": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p),
    "list": lambda p: [
        torch.optim.SGD(p[:2], lr=0.1, momentum=0.9),
        torch.optim.AdamW(p[2:], lr=0.01),
    ],
}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


CLIPS = ["none", "norm", "value"]
ACC = ["one", "micro4", "two losses", "kept", "zero in place"]


def train(opt, acc, clip, way, rule=None, skip=None, **settings):
    m = model()
    ps = list(m.parameters())
    inner = OPT[opt](ps)
    several = inner if isinstance(inner, list) else [inner]
    if way != "plain":
        o = LossScaleOptimizer(
            inner, rule=rule or DynamicScale(2.0**15, growth_interval=2), **settings
        )

    def backward(loss, bad=False):
        if way == "plain":
            loss.backward()
        elif way == "verb":
            o.backward(loss * torch.inf if bad else loss)
        else:
            o.scale_loss(loss * torch.inf if bad else loss).backward()

    def zero(**k):
        for e in several if way == "plain" else [o]:
            e.zero_grad(**k)

    for i in range(6):
        if way == "plain" and i == skip:
            continue
        g = torch.Generator().manual_seed(i)
        x = torch.randn(8, 8, generator=g)
        bad = i == skip
        if acc == "micro4":
            for j in range(4):
                backward(m(x[2 * j : 2 * j + 2]).square().mean() / 4, bad and j == 1)
        elif acc == "two losses":
            h = m(x)
            backward2 = h.abs().mean()
            if way == "plain":
                h.square().mean().backward(retain_graph=True)
            elif way == "verb":
                o.backward(h.square().mean(), retain_graph=True)
            else:
                o.scale_loss(h.square().mean()).backward(retain_graph=True)
            backward(backward2, bad)
        else:
            backward(m(x).square().mean(), bad)
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(ps, 0.05)
        if clip == "value":
            torch.nn.utils.clip_grad_value_(ps, 0.01)
        for e in several if way == "plain" else [o]:
            e.step()
        if acc == "kept":
            if bad:
                zero()
        elif acc == "zero in place":
            zero(set_to_none=False)
        else:
            zero()
    return bits(ps)


@pytest.mark.parametrize(
    ("opt", "acc", "clip", "decide"),
    [
        c
        for c in itertools.product(OPT, ACC, CLIPS, ("host", "device"))
        if not (c[3] == "device" and c[0] not in ("sgd fused", "adamw fused"))
    ],
)
def test_bits(opt, acc, clip, decide):
    assert same(train(opt, acc, clip, "plain"), train(opt, acc, clip, "verb", decide=decide))


@pytest.mark.parametrize(("opt", "acc"), [*itertools.product(OPT, ["one", "micro4", "two losses"])])
def test_skip_is_as_if_the_step_were_not(opt, acc):
    for clip in CLIPS:
        assert same(train(opt, acc, clip, "plain", skip=3), train(opt, acc, clip, "verb", skip=3))


@pytest.mark.parametrize(
    ("opt", "acc"), list(itertools.product(["momentum", "adamw fused"], ["one", "micro4", "kept"]))
)
def test_clip_norm(opt, acc):
    m = model()
    ps = list(m.parameters())
    LossScaleOptimizer(OPT[opt](ps), clip_norm=0.05)
    a = train(opt, acc, "norm", "plain")
    b = train(opt, acc, "none", "verb", clip_norm=0.05)
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(a, b, strict=False))


@pytest.mark.parametrize(("opt", "acc"), list(itertools.product(["sgd", "adamw foreach"], ACC)))
def test_scale_loss_way(opt, acc):
    assert same(train(opt, acc, "none", "plain"), train(opt, acc, "none", "scale_loss"))


@pytest.mark.parametrize(
    "kind",
    [
        "float16 autocast",
        "checkpoint reentrant",
        "checkpoint",
        "compiled",
        "compiled with the loss",
    ],
)
def test_forwards(kind):
    def go(way):
        m = model()
        inner = torch.optim.SGD(m.parameters(), lr=0.1)
        o = LossScaleOptimizer(inner) if way else inner
        f = torch.compile(m, backend="aot_eager") if "compiled" in kind else m
        for i in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).requires_grad_(
                "reentrant" in kind
            )
            if kind.startswith("checkpoint"):
                y = checkpoint(m, x, use_reentrant="reentrant" in kind)
            elif kind.startswith("float16"):
                with torch.autocast("cpu", torch.float16):
                    y = f(x)
            else:
                y = f(x)
            loss = y.float().square().mean()
            (o.backward(loss) if way else loss.backward())
            o.step()
            o.zero_grad()
        return bits(m.parameters())

    if kind.startswith("float16"):
        assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(go(0), go(1), strict=False))
    else:
        assert same(go(0), go(1))


def test_leaves_that_are_not_of_the_optimizer():
    def go(way):
        m, n = model(), model()
        o = torch.optim.SGD(m.parameters(), lr=0.1)
        o = LossScaleOptimizer(o) if way else o
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
        for _ in range(2):
            loss = (m(x) * n(x)).mean()
            o.backward(loss) if way else loss.backward()
        return [p.grad for p in (*m.parameters(), *n.parameters(), x)]

    assert same(go(0), go(1))


def test_two_wrappers_one_loss_and_bad_in_one():
    def go(way, bad=None):
        m = model()
        a, b = (torch.optim.SGD(m[i].parameters(), lr=0.1) for i in (0, 2))
        if way:
            a, b = LossScaleOptimizer(a), LossScaleOptimizer(b, initial_scale=4.0)
        for i in range(3):
            if i == bad and not way:
                continue
            loss = m(torch.randn(4, 8, generator=torch.Generator().manual_seed(i))).square().mean()
            if i == bad:
                loss = loss * torch.inf
            a.backward(loss) if way else loss.backward()
            a.step()
            b.step()
            a.zero_grad()
            b.zero_grad()
        return bits(m.parameters()), (a, b)

    assert same(go(0)[0], go(1)[0])
    w, (a, b) = go(1, 1)
    assert same(go(0, 1)[0], w)
    assert a.steps_skipped == b.steps_skipped == 1
    m = model()
    a, b = (
        LossScaleOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)),
        LossScaleOptimizer(torch.optim.Adam(m.parameters(), lr=0.1), initial_scale=8.0),
    )
    loss = m(torch.ones(1, 8)).sum()
    a.backward(loss)
    g = bits(p.grad for p in m.parameters())
    b.backward(m(torch.ones(1, 8)).sum())
    assert all(torch.equal(2 * x, p.grad) for x, p in zip(g, m.parameters(), strict=False))


def test_an_error_in_backward_leaves_true_gradients():
    m = model()
    o = LossScaleOptimizer(torch.optim.SGD(m.parameters(), lr=0.1))
    x = torch.ones(2, 8)
    o.backward(m(x).sum())
    before = bits(p.grad for p in m.parameters())

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        o.backward(Bad.apply(m(x)).sum())
    assert same(before, [p.grad for p in m.parameters()])
    o.step()
    assert o.iterations == 1


def test_inputs_gradient_and_create_graph():
    m = model()
    ps = list(m.parameters())
    o = LossScaleOptimizer(torch.optim.SGD(ps, lr=0.1))
    x = torch.ones(2, 8)
    v = torch.ones(2, 4)
    o.backward(m(x), gradient=v)
    a = bits(p.grad for p in ps)
    o.zero_grad()
    m(x).backward(v)
    assert same(a, [p.grad for p in ps])
    o.zero_grad()
    o.backward(m(x).sum(), inputs=ps[:2])
    assert ps[2].grad is None
    assert o.step() is None
    assert o.iterations == 1
    o.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hs = []
        for way in (0, 1):
            for _ in range(2):  # added up, too
                loss = m(x).square().mean()
                o.backward(loss, create_graph=True) if way else loss.backward(create_graph=True)
            g = [p.grad for p in ps]
            hs.append([*bits(g), *torch.autograd.grad(g, ps, [torch.ones_like(p) for p in ps])])
            for p in ps:
                p.grad = None
        assert same(hs[0][:4], hs[1][:4])
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*hs, strict=False))


def test_sparse_complex_wide_shared():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        gs = []
        for way in (0, 1):
            torch.manual_seed(0)
            e = torch.nn.Embedding(10, 3, sparse=True, dtype=dtype)
            c = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
            o = LossScaleOptimizer(torch.optim.SGD([*e.parameters(), c], lr=0.1))
            for _ in range(2):
                loss = e(torch.tensor([1, 1, 2])).float().square().mean() + (c * c).abs().sum()
                o.backward(loss) if way else loss.backward()
            gs.append([e.weight.grad.to_dense().float(), torch.view_as_real(c.grad)])
        assert same(*gs), dtype


def test_return_and_skips():
    w = torch.nn.Parameter(torch.ones(2))
    o = LossScaleOptimizer(torch.optim.SGD([w], lr=0.25))
    assert o.backward((w * torch.inf).sum()).item() is False
    assert o.unscale_() is False
    o.step()
    assert (o.steps_skipped, float(o.loss_scale)) == (1, 2.0**14)
    o.zero_grad()
    o.backward(w.sum())
    o.backward((w * torch.inf).sum())
    torch.nn.utils.clip_grad_value_([w], 1.0)
    assert w.grad.isfinite().all()
    o.step()
    assert o.steps_skipped == 2
    assert torch.equal(w, torch.ones(2))
    o.zero_grad()
    o.backward(w.sum())
    o.step()
    o.zero_grad()
    o.backward((w * torch.inf).sum())
    w.grad = None
    o.backward(w.sum())
    assert o.steps_skipped == 3
    o.step()
    assert o.steps_skipped == 3
    assert o.iterations == 5


def test_float16_parameters_are_refused():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    o = LossScaleOptimizer(torch.optim.SGD([w], lr=0.25, fused=True))
    with pytest.raises(lossscale.errors.GradientsError):
        o.backward(w.sum())


def test_mixed_with_scale_loss():
    def go(ways):
        m = model()
        o = LossScaleOptimizer(
            torch.optim.SGD(m.parameters(), lr=0.1), rule=DynamicScale(2.0**15, growth_interval=1)
        )
        for i in range(3):
            for j, w in enumerate(ways):
                loss = (
                    m(torch.randn(4, 8, generator=torch.Generator().manual_seed(i * 9 + j)))
                    .square()
                    .mean()
                )
                if w == "p":
                    loss.backward()
                elif w == "v":
                    o.backward(loss)
                elif w == "u":
                    o.scale_loss(loss).backward()
                    o.unscale_()
                else:
                    o.scale_loss(loss).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                o.step()
            o.zero_grad()
        return bits(m.parameters())

    want = go("ppp")
    for ways in itertools.product("vsu", repeat=3):
        assert same(want, go(ways)), ways
    for ways in ("vvp", "uvp", "pvv", "pss", "psu", "usp"[:2] + "u"):
        assert same(want, go(ways)), ways


def test_fixed_scale_fused_hands_over_and_kept():
    for rule, make in itertools.product(
        (lossscale.FixedScale(1024.0), DynamicScale(1024.0, growth_interval=1)),
        [
            lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
            lambda p: torch.optim.Adagrad(p, fused=True),
            lambda p: torch.optim.AdamW(p),
        ],
    ):

        def go(way, rule=rule, make=make):
            m = model()
            i = make(m.parameters())
            o = i if way == "plain" else LossScaleOptimizer(i, rule=rule)
            for s in range(4):
                loss = (
                    m(torch.randn(4, 8, generator=torch.Generator().manual_seed(s))).square().mean()
                )
                loss.backward() if way == "plain" else o.backward(loss) if way == "verb" or (
                    way == "both" and s % 2
                ) else o.scale_loss(loss).backward()
                o.step()
            return bits(m.parameters())

        want = go("plain")
        for way in ("verb", "scale_loss", "both"):
            assert same(want, go(way)), (way, rule)


def test_no_memory_is_kept():
    w = torch.nn.Parameter(torch.ones(3))
    o = LossScaleOptimizer(torch.optim.SGD([w], lr=0.1))
    o.backward(w.sum())
    r = weakref.ref(w.grad)
    w.grad = None
    assert r() is None
    loss = (w * 2).sum()
    s = o.scale_loss(loss)
    s.backward()
    r = weakref.ref(s)
    del s, loss
    assert r() is None


def test_lbfgs_with_the_verb():
    def go(way):
        p = torch.nn.Parameter(torch.tensor([-1.2, 1.0]))
        i = torch.optim.LBFGS([p], line_search_fn="strong_wolfe")
        o = LossScaleOptimizer(i, initial_scale=2.0**120) if way else i

        def closure():
            o.zero_grad()
            loss = (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
            o.backward(loss) if way else loss.backward()
            return loss

        for _ in range(3):
            o.step(closure)
        return [p.detach()], o

    (a, _), (b, o) = go(0), go(1)
    assert same(a, b)
    assert o.steps_skipped == 0


def test_closure_that_moves_first_overflows_and_is_evaluated_lower():
    class Sam(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            ps = self.param_groups[0]["params"]
            old = [p.clone() for p in ps]
            with torch.enable_grad():
                closure()
            n = torch.stack([p.grad.norm() for p in ps]).norm()
            for p in ps:
                p.data.add_(p.grad / n, alpha=0.5)
            with torch.enable_grad():
                loss = closure()
            for p, o in zip(ps, old, strict=False):
                p.copy_(o)
            super().step()
            return loss

    def go(way, s=2.0**15, bad=None):
        m = model()
        i = Sam(m.parameters(), lr=0.1)
        o = LossScaleOptimizer(i, initial_scale=s) if way else i
        for k in range(3):
            if k == bad and not way:
                continue

            def closure(k=k):
                o.zero_grad()
                loss = (
                    m(torch.randn(4, 8, generator=torch.Generator().manual_seed(k))).square().mean()
                )
                if k == bad:
                    loss = loss * torch.inf
                o.backward(loss) if way else loss.backward()
                return loss

            o.step(closure)
        return bits(m.parameters()), o

    assert same(go(0)[0], go(1)[0])
    w, o = go(1, 2.0**126)
    assert same(go(0)[0], w)
    w, o = go(1, bad=1)
    assert same(go(0, bad=1)[0], w)
    assert o.steps_skipped == 1
