"""Every op on tensors that end, or begin, where memory does: a read or write beyond them ends the process.

Usage: python guarded.py ISA end|start
"""

import ctypes
import itertools
import mmap
import sys

import make
import torch

from posenc_ext import _C
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding

PAGE = mmap.PAGESIZE
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(tensor: torch.Tensor, side: str) -> torch.Tensor:
    """A copy with an inaccessible page right behind it, or right before it."""
    pages = -(-tensor.nbytes // PAGE) or 1
    mapping = mmap.mmap(-1, (pages + 2) * PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for guard in (begin, begin + (pages + 1) * PAGE):
        if _libc.mprotect(guard, PAGE, PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    at = PAGE if side == "start" else (pages + 1) * PAGE - tensor.nbytes
    copy = torch.frombuffer(mapping, dtype=torch.uint8, count=tensor.nbytes, offset=at)
    return copy.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def calls(side: str) -> None:
    """Sources, layouts, widths with and without whole vectors, kinds of positions, one row for a thread and many."""

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return guarded(tensor, side)

    sizes = ((1, "exact"), (35, "reference"), (64, "exact"), (1024, "reference"), (1024, "exact"))
    for dtype, (width, precision), (batch, length) in itertools.product(
        make.DTYPES, sizes, ((1, 70), (9, 16), (40, 1))
    ):
        for convention, batch_first in (("vaswani", True), ("vaswani", False), ("tensor2tensor", True)):
            if convention == "tensor2tensor" and width == 1:
                continue
            shape = (batch, length) if batch_first else (length, batch)
            table, ids = of(make.table(width=width, dtype=dtype)), of(make.ids(shape))
            x, out = of(make.x((*shape, width), dtype=dtype)), of(torch.zeros(*shape, width, dtype=dtype))
            how = {"convention": convention, "batch_first": batch_first, "precision": precision}
            places = (of(torch.randint(100, shape)), of(torch.randint(100, (length,), dtype=torch.int32)))
            for positions in (None, *places):
                embed(ids, table, positions=positions, out=out, **how)
                add_positional_encoding(x, positions=positions, out=out, **how)
            positional_encoding(places[0], width, dtype=dtype, convention=convention, precision=precision)
            weight = table.requires_grad_()
            (embed(ids, weight, **how) * x).sum().backward()


if __name__ == "__main__":
    _C.force_isa(sys.argv[1])
    torch.set_num_threads(2)
    calls(sys.argv[2])
    print("done")
