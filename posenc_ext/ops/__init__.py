"""The custom ops from Python: how each is called, differentiated, traced and faked.

Every differentiable op exists twice in C++ (csrc/torch). The raw one (`_embed_fwd`, ...) has no autograd formula. An
eager call that needs no gradient goes straight to it, and one that does goes through a `torch.autograd.Function` around
it, since a formula registered on an op costs several microseconds even when nothing is differentiated. The public one
(`torch.ops.posenc_ext.embed`, ...) carries the formula: traced programs hold it, so exported ones stay differentiable,
and so do direct callers.

A direct call of `torch.ops.posenc_ext.*` under forward mode drops the tangent, as every custom op does, and must go
through `posenc_ext.functional` instead (see compose.py).
"""

from pathlib import Path

import torch

_LIBRARY = Path(__file__).parent.parent / "libposenc_ext_ops.so"

try:
    torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]  # registers the ops
    from posenc_ext import _C  # noqa: F401  (links to that library)
except (ImportError, OSError) as error:
    if not _LIBRARY.exists():
        raise ImportError(
            f"posenc_ext: {_LIBRARY.parent} holds the sources and no compiled half ({_LIBRARY.name}). Python finds "
            "them first where it is started in a checkout: start it elsewhere to use the installed package, or build "
            "in place with `python setup.py build_ext --inplace`"
        ) from error
    raise ImportError(
        f"posenc_ext: the compiled half ({_LIBRARY.name}, _C) cannot be loaded under torch {torch.__version__}: "
        f"{error}. Install it anew with `pip install .`"
    ) from error

from posenc_ext.ops import add, compose, embed, fake, positions  # noqa: E402, F401


def ops_library() -> str:
    """Where the library of the custom ops lies, for processes that run a program and need nothing else of this package.

    It knows no Python: ``torch.ops.load_library(path)`` or, in a C++ program, ``dlopen`` registers the ops, with their
    kernels and without what Python adds (gradients and fake kernels).

    Returns:
        The path.

    Examples:
        >>> import posenc_ext
        >>> posenc_ext.ops_library().endswith("libposenc_ext_ops.so")
        True
    """
    return str(_LIBRARY)
