"""The host half of the CUDA backend, csrc/torch included, on a runtime without a device.

tests/cuda_on_cpu/README.md says what that sees.
"""

import functools

import pytest
from cuda_on_cpu import build, seeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.nvcc() is None, reason="nvcc is neither in CUDA_HOME nor on PATH"),
    pytest.mark.skipif(build.gxx() is None, reason="g++ is not on PATH"),
    pytest.mark.skipif(not build.kernel_units(), reason="no sources here (csrc/cuda)"),
]


def test_host(cuda_builder):
    status, output = build.run_program(cuda_builder.host_program())
    assert status == 0, output[-6000:]
    assert " 0 failed" in output


@pytest.fixture(scope="module")
def seeded_programs(cuda_builder, tmp_path_factory):
    """Compiled ahead, since that is most of the time."""
    cuda_builder.host_program()
    return {
        bug.name: cuda_builder.ahead(functools.partial(bug.program, cuda_builder, tmp_path_factory.mktemp("seeded")))
        for bug in seeded.HOST
    }


@pytest.mark.parametrize("bug", seeded.HOST, ids=lambda bug: bug.name)
def test_seeded_bug_is_caught(seeded_programs, bug):
    status, output = bug.run(seeded_programs[bug.name].result())
    assert bug.is_caught(status, output), output[-3000:]
