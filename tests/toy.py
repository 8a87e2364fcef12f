"""A toy op with the interface of `kvstrata.tools.bench.cases.<op>`: doubling a vector. Tests only."""

import torch

from kvstrata.tools.bench import Absent, Bench, Case, attach, peer


@peer("toy", "elsewhere")
def elsewhere(x, out):
    import a_library_that_is_not_installed

    return a_library_that_is_not_installed.double


@peer("toy", "unwilling")
def unwilling(x, out):
    raise Absent("needs a machine of another kind")


@peer("toy", "broken")
def broken(x, out):
    raise RuntimeError("a kernel\n did not compile")


@peer("toy", "stack")
def stack(x, out):
    return lambda i: torch.add(x[i], x[i], out=out[i])


def cases(device, quick, wrong=()):
    """One case per length; contenders named in `wrong` forget the last element."""

    def build(n, device):
        x = [torch.randn(n, device=device) for _ in range(2)]
        out = [torch.empty_like(row) for row in x]

        def double(name):
            end = -1 if name in wrong else None
            return lambda i: torch.mul(x[i][:end], 2, out=out[i][:end])

        bench = Bench(
            contenders={name: double(name) for name in ("ours", "ours-too", "naive")},
            poison=lambda name, i: out[i].fill_(float("nan")),
            check=lambda name, i, _: torch.testing.assert_close(out[i], x[i] + x[i], rtol=0, atol=0),
            ours="ours",
            baseline="naive",
            variants={"ours-too"},
        )
        bench.host["ours"] = bench.contenders["ours"]
        attach(bench, "toy", x, out)
        return bench

    lengths = (64, 256) if quick else (64, 256, 1024)
    return [
        Case("toy", f"fp32-{n}", {"dtype": "fp32", "T": n}, 8 * n, lambda device, n=n: build(n, device), n, sets=2)
        for n in lengths
    ]
