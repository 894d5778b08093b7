"""Exports a model to ONNX, for any batch and length, and runs it in onnxruntime.

    pip install 'posenc_ext[onnx]'
    python export_onnx.py model.onnx

The fused op is taken apart into ONNX's own operators on the way, so whatever runs ONNX runs the model. For C++ without
ONNX see cpp/: a model compiled ahead of time, with the fused op in it.
"""

from __future__ import annotations

import argparse

import onnxruntime
import torch
from torch import nn
from torch.export import Dim

from posenc_ext import TransformerEmbedding


def main() -> None:
    """Export, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="where to write the model")
    parser.add_argument("--vocab-size", type=int, default=100)
    parser.add_argument("--d-model", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    encoder = nn.TransformerEncoderLayer(args.d_model, 4, 4 * args.d_model, batch_first=True)
    model = nn.Sequential(TransformerEmbedding(args.vocab_size, args.d_model, padding_idx=0), encoder).eval()
    example = (torch.randint(args.vocab_size, (2, 5)),)
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    program = torch.onnx.export(model, example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(args.path)
    foreign = sorted({node.domain for node in program.model.graph} - {""})
    print(f"operators that are not ONNX's own: {', '.join(foreign) or 'none'}")

    session = onnxruntime.InferenceSession(args.path)
    for batch, length in ((2, 5), (1, 1), (3, 700)):
        ids = torch.randint(args.vocab_size, (batch, length))
        (got,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        with torch.no_grad():
            difference = (torch.from_numpy(got) - model(ids)).abs().max().item()
        print(f"ids [{batch}, {length}]: onnxruntime and torch differ by at most {difference:.1e}")


if __name__ == "__main__":
    main()
