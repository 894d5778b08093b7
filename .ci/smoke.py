"""Does an installed posenc_ext load, and does its first call work? Usage: python smoke.py --cuda yes|no."""

from __future__ import annotations

import argparse

import posenc_ext  # isort: skip  (before torch: that must work too)
import torch

from posenc_ext import _C


def main() -> None:
    """One call forward and back, one compiled by no compiler, and what was built."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda", choices=("yes", "no"), required=True, help="whether the CUDA half must be there")
    wanted = parser.parse_args().cuda == "yes"
    info = _C.build_info()
    assert info["cuda"] == wanted, info
    for name in ("embed", "embed_backward", "embed_backward_sparse", "add_positional_encoding", "positional_encoding"):
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"posenc_ext::{name}", key), (name, key)
    posenc_ext.check_errors()  # nothing to wait for
    layer = posenc_ext.TransformerEmbedding(11, 8)
    ids = torch.tensor([[1, 2, 3], [3, 2, 10]])
    result = layer(ids)
    result.sum().backward()
    assert torch.allclose(result, layer.weight[ids] * 8**0.5 + posenc_ext.PositionalEncoding(8, max_len=3).pe)
    print(
        f"torch {torch.__version__}, built with {info['torch_built_with']}, CUDA half: {info['cuda_archs'] or 'none'}"
    )


if __name__ == "__main__":
    main()
