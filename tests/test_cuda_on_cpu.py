"""The CUDA kernels on the host: their source and nvcc's PTX of them, against the CPU backend, bit for bit.

tests/cuda_on_cpu/README.md says what each way of running them sees.
"""

import functools
import re
from pathlib import Path

import pytest
from cuda_on_cpu import build, ptx_to_cpp, seeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.nvcc() is None, reason="nvcc is neither in CUDA_HOME nor on PATH"),
    pytest.mark.skipif(build.gxx() is None, reason="g++ is not on PATH"),
    pytest.mark.skipif(not build.kernel_units(), reason="no sources here (csrc/cuda)"),
]

MODES = ("plain", "asan", "tsan")
ARCHITECTURES = (75, 80, 90, 100)
# PTX of the others differs little from that of the one before: two element types, and smaller numbers.
WHOLE_ARCHITECTURES = (75, 90)
TWO_TYPES = build.kernel_units(dtypes=build.TWO_TYPES)


def units_of(arch: int) -> list[build.Unit]:
    return build.kernel_units() if arch in WHOLE_ARCHITECTURES else TWO_TYPES


@pytest.fixture(scope="module")
def builder(cuda_builder) -> build.Builder:
    builder = cuda_builder
    # Compiling is most of the time, so it is asked for ahead, in the order of the tests.
    builder.prefetch(
        builder.host_objects,
        lambda: builder.kernels_from_source("plain"),
        lambda: builder.kernels_from_source("asan", TWO_TYPES),
        lambda: builder.kernels_from_source("tsan", TWO_TYPES),
        lambda: [builder.ptx(unit, arch) for arch in ARCHITECTURES for unit in units_of(arch)],
        *[functools.partial(builder.kernels_from_ptx, arch, "asan", units_of(arch)) for arch in ARCHITECTURES],
        *[functools.partial(builder.sample_objects, mode) for mode in MODES],
    )
    return builder


def check(program: Path, *arguments: str, seed: int = 0) -> str:
    status, output = build.run_program(program, *arguments, seed=seed)
    assert status == 0, output[-6000:]
    return output


# ---- the real kernels


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_source(builder, seed):
    few = ["--few"] if seed else []  # other orders of the threads
    assert " 0 failed" in check(builder.source_program("plain"), *few, seed=seed)


@pytest.mark.parametrize(("mode", "which"), [("asan", "--two-types"), ("tsan", "--few")])
def test_source_under_sanitizer(builder, mode, which):
    assert " 0 failed" in check(builder.source_program(mode, TWO_TYPES), which)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ptx_under_asan(builder, arch):
    few = [] if arch in WHOLE_ARCHITECTURES else ["--few"]
    assert " 0 failed" in check(builder.ptx_program(arch, "asan", units_of(arch)), *few)


# ---- the record of out-of-range ids


@pytest.mark.parametrize("seed", range(5))
def test_contention_for_the_record(builder, seed):
    """Threads that interleave at every access to memory; each order of theirs is another seed."""
    assert " 0 failed" in check(builder.contention_program("contention"), "60", seed=seed)


def test_memory_order_of_the_record(builder):
    """To TSan only a fence before and after atomics orders accesses, which is how PTX has it.

    PTX: a fence that a strong write follows, and a strong read of what it wrote that a fence follows, synchronise. That
    is what the lock's atomicExch and atomicCAS do with their __threadfence(). What is written under the lock is not
    volatile, so that it is a race wherever no such pair lies between two threads, whatever their schedule was.
    """
    assert " 0 failed" in check(builder.contention_program("memory order"), "8")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fences_of_the_record_in_ptx(builder, arch):
    """What TSan has seen of the source, nvcc has left where it was: fences inside the lock, around plain accesses.

    membar.gl is PTX's fence.sc.gpu, and the lock's atomics are relaxed ones of the whole device. By PTX's rules such an
    exchange after a fence releases, and such a swap before one acquires.
    """
    kinds = {
        r"atom\.(?:relaxed\.)?global\.cas\.b32": "L",
        r"atom\.(?:relaxed\.)?global\.exch\.b32": "X",
        r"membar\.gl|fence\.(?:sc|acq_rel)\.gpu": "F",
        r"st\.global\.u64": "W",
    }
    text = builder.ptx(build.Unit(build.CSRC / "cuda/bounds.cu"), arch).result().read_text()
    kernels = list(ptx_to_cpp.read_kernels(text))
    assert len(kernels) == 2
    for kernel in kernels:
        opcodes = [statement.text.split()[0] for statement in kernel.statements]
        steps = "".join(kind for opcode in opcodes for pattern, kind in kinds.items() if re.fullmatch(pattern, opcode))
        # Of ids and of positions; nvcc may put what follows their locks behind both.
        assert re.fullmatch("(L+(FW{3,}FX)+)+", steps), (kernel.name, steps)
        assert steps.count("L") == steps.count("X"), (kernel.name, steps)


# ---- bugs put into the real kernels


@pytest.fixture(scope="module")
def seeded_programs(builder, tmp_path_factory):
    return {
        bug.name: builder.ahead(functools.partial(bug.program, builder, tmp_path_factory.mktemp("seeded")))
        for bug in seeded.KERNELS
    }


@pytest.mark.parametrize("bug", seeded.KERNELS, ids=lambda bug: bug.name)
def test_seeded_bug_is_caught(seeded_programs, bug):
    status, output = bug.run(seeded_programs[bug.name].result())
    assert bug.is_caught(status, output), output[-3000:]


# ---- the shim and the translator, on sample kernels


@pytest.mark.parametrize("arch", [None, *ARCHITECTURES], ids=lambda arch: f"ptx {arch}" if arch else "source")
@pytest.mark.parametrize("mode", MODES)
def test_samples(builder, mode, arch):
    for seed in (0, 1, 2):
        check(builder.sample_program(mode, arch), seed=seed)


# Who must catch which wrong kernel: every build, or the one named.
WRONG = {
    "reads_too_far": ("asan", "AddressSanitizer: heap-buffer-overflow"),
    "writes_too_far": ("asan", "AddressSanitizer: heap-buffer-overflow"),
    "loads_vectors_anywhere": ("asan", "misaligned a"),
    "overruns_shared": ("asan", "index 32 out of bounds|AddressSanitizer: heap-buffer-overflow"),
    "reads_unwritten_shared": (None, "FAILED a value from shared memory"),
    "leaves_out_barrier": ("tsan", "data race"),
    "leaves_out_second_barrier": ("tsan", "data race"),
    "ends_before_barrier": (None, "waits at __syncthreads that another left out"),
    "waits_at_two_barriers": (None, "wait at different __syncthreads"),
    "adds_in_block": ("tsan", "data race"),
    "adds_across_blocks": ("tsan", "data race"),
    "adds_across_blocks_with_barriers": ("tsan", "data race"),
    "publishes_without_fence": ("tsan", "data race"),
    "waits_for_another": (None, "spins on an atomic"),
    "adds_to_half_an_atomic": (None, "misaligned atomic"),
    "no_blocks": (None, "the grid has no blocks"),
    "too_many_threads": (None, "more than a block can have"),
    "grid_beyond_32_bits": (None, "exceeds 32 bits"),
}


@pytest.mark.parametrize("arch", [None, 90], ids=("source", "ptx"))
@pytest.mark.parametrize("kernel", WRONG)
def test_wrong_sample_is_caught(builder, kernel, arch):
    mode, said = WRONG[kernel]
    for tried in (mode,) if mode else MODES:
        status, output = build.run_program(builder.sample_program(tried, arch), kernel)
        assert status != 0
        assert re.search(said, output), output[-3000:]


def test_launch_bounds_hold_in_ptx(builder):
    status, output = build.run_program(builder.sample_program("asan", 90), "more_threads_than_launch_bounds")
    assert status != 0
    assert "larger than __launch_bounds__ allows" in output


def test_plain_shared_memory_does_not_compile(builder, tmp_path):
    source = tmp_path / "plain_shared.cu"
    source.write_text(
        '#include "cuda_shim.h"\n__global__ void kernel() { __shared__ float values[4]; values[0] = 1; }\n'
    )
    with pytest.raises(build.BuildError, match="POSENC_SHARED"):
        builder.shim_object(build.Unit(source), "plain").result()


# ---- the translator alone


def kernel(body: str, parameters: str = ".param .u64 p0") -> str:
    return f""".version 9.0
.target sm_80
.address_size 64
.visible .entry sample({parameters})
{{
  .reg .pred %p<4>;
  .reg .b16 %rs<4>;
  .reg .b32 %r<4>;
  .reg .f32 %f<4>;
  .reg .b64 %rd<4>;
  .reg .f64 %fd<4>;
  {body}
  ret;
}}
"""


KNOWN = [
    "add.s32 %r1, %r2, 5;",
    "add.rn.f32 %f1, %f2, 0f3F800000;",
    "fma.rn.f64 %fd1, %fd2, %fd3, 0d3FF0000000000000;",
    "@!%p1 mov.u32 %r1, %tid.x;",
    "setp.lt.and.s32 %p1|%p2, %r1, -1, !%p3;",
    "ld.global.nc.L1::no_allocate.v4.u32 {%r0, %r1, %r2, %r3}, [%rd1+-16];",
    "cvt.rni.s32.f32 %r1, %f1;",
    "{ .reg .b16 low, high; mov.b32 {low, high}, %r1; mov.b32 %r2, {high, low}; }",
    "prmt.b32 %r1, %r2, %r3, 0x5410;",
]


@pytest.mark.parametrize("instruction", KNOWN)
def test_translator_takes(instruction):
    assert set(ptx_to_cpp.translate(kernel(instruction))) == {"sample"}


UNKNOWN = {
    "opcode": "frobnicate.s32 %r1, %r2;",
    "modifier": "add.sat.s32 %r1, %r2, %r3;",
    "flush to zero": "add.rn.ftz.f32 %f1, %f2, %f3;",
    "addition that ptxas may fuse": "add.f32 %f1, %f2, %f3;",
    "multiplication that ptxas may fuse": "mul.f64 %fd1, %fd2, %fd3;",
    "rounding": "cvt.rz.f32.s32 %f1, %r1;",
    "approximate division": "div.full.f32 %f1, %f2, %f3;",
    "approximate sine": "sin.approx.f32 %f1, %f2;",
    "float to integer without rounding": "cvt.s32.f32 %r1, %f1;",
    "type": "add.f16 %rs1, %rs2, %rs3;",
    "register": "add.s32 %r1, %r2, %r9;",
    "narrow register": "mov.b64 %rd1, %r1;",
    "symbol": "mov.u64 %rd1, somewhere;",
    "missing operand": "add.s32 %r1, %r2;",
    "call": "call.uni function, (%rd1);",
    "named barrier": "bar.sync 1;",
    "part of a block at a barrier": "bar.sync 0, 64;",
    "directive": ".weird 1;",
    "dynamic shared memory": ".extern .shared .align 4 .b8 memory[];",
    "votes": "vote.sync.ballot.b32 %r1, %p1, -1;",
    "state space": "ld.const.u32 %r1, [%rd1];",
}


@pytest.mark.parametrize("instruction", UNKNOWN.values(), ids=UNKNOWN)
def test_translator_refuses(instruction):
    with pytest.raises(ptx_to_cpp.TranslationError):
        ptx_to_cpp.translate(kernel(instruction))


def test_translator_refuses_what_is_outside_kernels():
    with pytest.raises(ptx_to_cpp.TranslationError):
        ptx_to_cpp.translate(kernel("") + ".visible .func other() { ret; }")


def test_translator_refuses_small_structs():
    with pytest.raises(ptx_to_cpp.TranslationError):
        ptx_to_cpp.translate(kernel("", ".param .align 8 .b8 p0[16]"))


def test_real_ptx_leaves_no_rounding_to_ptxas(builder):
    """Every addition and multiplication of numbers says how it rounds, so ptxas cannot fuse them."""

    texts = [builder.ptx(unit, 80).result().read_text() for unit in build.kernel_units()]
    found = {opcode for text in texts for opcode in re.findall(r"\b(?:add|sub|mul|mad|fma)\.[\w.]*f(?:32|64)\b", text)}
    assert found
    assert all(".rn." in opcode for opcode in found)
