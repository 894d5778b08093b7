"""Small calls of every kernel of the CUDA half, to be run under compute-sanitizer.

    compute-sanitizer --tool racecheck python tests/cuda_sanitize.py [--every N]

A sanitizer is slow, so there is one call of each kind: sizes on either side of a vector, a warp and a block; 1, 2 and
40 rows; many tokens of one id. Results are compared with the CPU's, so a run without a sanitizer is a test too.
POSENC_TEST_DEVICE=cpu tries the program without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator

import posenc_ext  # before torch: it must load on its own

import torch  # isort: skip
from torch import Tensor

from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

DEVICE = os.environ.get("POSENC_TEST_DEVICE", "cuda")
ROWS = 50
DTYPES = (torch.float32, torch.bfloat16)

# What it is, and how to get what the device gives and what the CPU gives.
Call = tuple[str, Callable[[], tuple[Tensor, Tensor]]]


def both(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that returns the result of the device, brought back, and that of the CPU."""
    return lambda: (function(*(t.to(DEVICE, copy=True) for t in tensors)).cpu(), function(*tensors))


def forward_calls() -> Iterator[Call]:
    for dtype in DTYPES:
        for width in (1, 7, 8, 130, 513):
            weight = torch.randn(ROWS, width).to(dtype)
            ids, x = torch.randint(ROWS, (2, 5)), torch.randn(2, 5, width).to(dtype)
            name = f"{dtype}, width {width}"
            yield f"embed, {name}", both(embed, ids, weight)
            yield f"embed, exact, {name}", both(lambda i, w: embed(i, w, precision="exact", offset=2**40), ids, weight)
            yield f"embed, positions, {name}", both(lambda i, w: embed(i, w, positions=i * 1000 - 7), ids, weight)
            yield (
                f"embed, from the second column, {name}",
                both(lambda i, w: embed(i, w[:, min(1, w.shape[1] - 1) :]), ids, weight),
            )
            yield f"scaled_embedding, {name}", both(scaled_embedding, ids, weight)
            yield f"add, {name}", both(add_positional_encoding, x)
            yield f"add, transposed, {name}", both(lambda a: add_positional_encoding(a.transpose(0, 1)), x)
            yield (
                f"positional_encoding, {name}",
                both(lambda i, d=width, t=dtype: positional_encoding(i, d, dtype=t, convention="tensor2tensor"), ids),
            )
    weight = torch.randn(ROWS, 64)
    for rows in (1, 2, 40):
        yield f"{rows} rows", both(embed, torch.randint(ROWS, (rows, 33)), weight)


def backward_calls() -> Iterator[Call]:
    op = torch.ops.posenc_ext.embed_backward
    hot = torch.randint(ROWS, (700,))
    hot[::2] = 17
    batches = {f"{n} rows": torch.randint(ROWS, (n, 33)) for n in (1, 2, 40)}
    for name, ids in {**batches, "half hot": hot, "all equal": torch.full((300,), 3)}.items():
        for dtype in DTYPES:
            for width in (7, 130):
                grad = torch.randn(*ids.shape, width).to(dtype)
                what = f"backward, {name}, {dtype}, width {width}"
                for padding, by_frequency in ((-1, False), (17, True)):
                    yield what, both(lambda g, i, p=padding, f=by_frequency: op(g, i, ROWS, 2.0, p, f), grad, ids)
        grad = torch.randn(*ids.shape, 7)
        yield (
            f"sparse backward, {name}",
            both(lambda g, i: torch.ops.posenc_ext.embed_backward_sparse(g, i, ROWS, 2.0, -1, False)[1], grad, ids),
        )
        yield (
            f"backward of sum(), {name}",
            both(
                lambda g, i: op(g[:1, :1].reshape(1).expand(*i.shape, 7), i, ROWS, 2.0, -1, False),
                grad.reshape(-1, 7),
                ids,
            ),
        )


def out_of_range_calls() -> int:
    """Kernels must not touch the row of an out-of-range id. Returns how many errors were reported."""
    reported = 0
    weight, grad = torch.randn(ROWS, 8, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    for index in (ROWS, -1, 2**62):
        ids = torch.tensor([1, index, 2], device=DEVICE)
        for call in (
            lambda i=ids: embed(i, weight),
            lambda i=ids: torch.ops.posenc_ext.embed_backward(grad, i, ROWS, 1.0, -1, False),
        ):
            try:
                call()
                posenc_ext.check_errors()
            except IndexError:
                reported += 1
    return reported


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, metavar="N", help="make every N-th call only")
    every = parser.parse_args().every
    torch.manual_seed(0)
    count = wrong = 0
    for calls in (forward_calls(), backward_calls()):
        for what, call in itertools.islice(calls, 0, None, every):
            count += 1
            got, want = call()
            integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
            if got.shape != want.shape or not torch.equal(got.contiguous().view(integer), want.view(integer)):
                wrong += 1
                print(f"differs from the CPU: {what}")
    reported = out_of_range_calls()
    if reported != 6:
        wrong += 1
        print(f"of 6 out-of-range ids {reported} were reported")
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
