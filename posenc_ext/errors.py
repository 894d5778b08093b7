"""Errors that a GPU finds after the call that caused them has returned."""

from posenc_ext import _C


def check_errors() -> None:
    """Raise what CUDA calls so far have found wrong with their ids; wait for every CUDA device in use to know.

    On CUDA an id outside the table is found by the kernel, after the call has returned. Its row is NaN (in a gradient
    it has no part), and the first such id of the earliest call is raised as IndexError by the first call of this
    package that comes after the device has found it, or here, whichever comes first. With the environment variable
    ``POSENC_EXT_SYNC_ERRORS=1`` every call waits for its kernels and raises by itself. Without CUDA there is
    nothing to wait for: CPU calls check their ids before they write.

    Raises:
        IndexError: naming the op, the range, the id and its place among the flattened ids of that call.

    Examples:
        >>> import posenc_ext
        >>> posenc_ext.check_errors()  # nothing to report
    """
    _C.check_errors()
