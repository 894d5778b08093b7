"""When and where the kernels run: streams, CUDA graphs, devices, and that the host waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import make
import pytest
import torch
from cuda_helpers import ON_GPU, gpu_only, sleep, two_gpus
from helpers import assert_same_bits
from torch import Tensor, nn

import posenc_ext
from posenc_ext import Convention
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding

pytestmark = pytest.mark.cuda

V, D = 1000, 64


def ids(device: str, *shape: int, seed: int = 0, rows: int = V) -> Tensor:
    return make.ids(shape, rows, device=device, seed=seed)


def numbers(device: str, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return make.x(shape, dtype=dtype, device=device, seed=seed)


# What must neither wait nor copy, as functions of ids, table and activations.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "embed": lambda i, w, x: embed(i, w, offset=3),
    "embed, exact": lambda i, w, x: embed(i, w, precision="exact", convention="tensor2tensor"),
    "embed, positions": lambda i, w, x: embed(i, w, positions=i),
    "embed, one position": lambda i, w, x: embed(i, w, positions=i[:1, :1]),
    "embed, out": lambda i, w, x: embed(i, w, out=x.detach()),
    "embed, transposed ids": lambda i, w, x: embed(i.t(), w),
    "scaled_embedding": lambda i, w, x: scaled_embedding(i, w),
    "add": lambda i, w, x: add_positional_encoding(x),
    "add, strided": lambda i, w, x: add_positional_encoding(x.transpose(0, 1)),
    "positional_encoding": lambda i, w, x: positional_encoding(i, D),
    "length": lambda i, w, x: positional_encoding(40, D, device=i.device),
}


def inputs(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return ids(device, 4, 40), numbers(device, V, D, dtype=dtype), numbers(device, 4, 40, D, dtype=dtype)


def trained(given: Tensor, weight: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """Forward and backward; the weight gradient."""
    weight = weight.detach().requires_grad_()
    return torch.autograd.grad(embed(given, weight, **options), weight, grad)[0]


CALLS_AND_BACKWARD = {
    **CALLS,
    "backward": lambda i, w, x: trained(i, w, x),
    "backward, padding": lambda i, w, x: trained(i, w, x, padding_idx=3),
    "backward, frequency": lambda i, w, x: trained(i, w, x, scale_grad_by_freq=True),
    "backward of sum()": lambda i, w, x: trained(i, w, x[:1, :1, :1].expand(x.shape)),
    "backward of add": lambda i, w, x: torch.autograd.grad(
        add_positional_encoding(a := x.detach().requires_grad_()), a, x
    )[0],
}
every_call = make.each("function", CALLS_AND_BACKWARD)


# ---- nothing waits ---------------------------------------------------------------------------------------------------


@gpu_only
@every_call
def test_the_host_runs_ahead(device, function):
    """Behind a kernel that keeps the device busy, a warm call returns before that kernel ends."""
    arguments = inputs(device)
    function(*arguments)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    sleep()
    done.record()
    torch.cuda.set_sync_debug_mode("error")  # sees what goes through torch; the event sees the rest
    try:
        result = function(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query()
    torch.cuda.synchronize()
    assert_same_bits(result, function(*arguments))


WAITS = ("Memcpy HtoD", "Memcpy DtoH", "Synchronize", "cudaMalloc", "cudaHostAlloc", "cudaFree")


def waits_of(call: Callable[[], object]) -> list[str]:
    """What the profiler saw of copies, waits and allocations between the call's first and last moment."""
    host, gpu = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[host, gpu] if ON_GPU else [host]) as profile:
        with torch.profiler.record_function("the call"):
            call()
        if ON_GPU:
            torch.cuda.synchronize()
    on_host = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU]
    on_device = [e for e in profile.events() if e.device_type != torch.autograd.DeviceType.CPU]
    if ON_GPU and not on_device:
        pytest.skip("the profiler sees nothing of the device here")
    (marker,) = (e.time_range for e in on_host if e.name == "the call")
    inside = [e for e in on_host if marker.start <= e.time_range.start <= marker.end]
    # On the device a copy may come later: there is to be none in the whole profile.
    found = [e.name for e in [*inside, *on_device]]
    return [name for name in found if name == "cudaMemcpy" or any(word in name for word in WAITS)]


@every_call
def test_no_copy_and_no_wait_in_the_profile(device, function):
    arguments = inputs(device)
    for _ in range(3):
        function(*arguments)
    assert waits_of(lambda: function(*arguments)) == []


@gpu_only
def test_the_profile_would_show_them(device):
    """So that an empty list means something."""
    here, there = torch.ones(4), torch.ones(4, device=device)
    assert any("HtoD" in name for name in waits_of(lambda: there.copy_(here)))
    assert any("Synchronize" in name or "DtoH" in name for name in waits_of(lambda: there.sum().item()))


# ---- streams ---------------------------------------------------------------------------------------------------------


def rows_and_values(given: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """A sparse gradient, which must know how many rows there are, and waits for it."""
    got = trained(given, weight, grad, sparse=True)
    return torch.column_stack([got._indices()[0], got._values()])


@gpu_only
@make.each("function", {**CALLS_AND_BACKWARD, "backward, sparse": rows_and_values})
def test_work_goes_to_the_current_stream(device, function):
    """Inputs get their numbers late, on a side stream: a kernel on any other stream would read the old ones."""
    given, weight, x = inputs(device)
    want = function(given, weight, x.clone()).clone()
    late = [torch.zeros_like(t) for t in (given, weight, x)]
    function(*late)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sleep()
        for empty, full in zip(late, (given, weight, x), strict=True):
            empty.copy_(full)
        got = function(*late).clone()
    side.synchronize()
    assert_same_bits(got, want)


@gpu_only
def test_two_streams_at_a_time(device):
    """No scratch memory is shared between calls that overlap."""
    weight = numbers(device, V, D)
    batches = [(ids(device, 8, 512, seed=seed), numbers(device, 8, 512, D, seed=seed)) for seed in range(8)]
    want = [(embed(i, weight), trained(i, weight, g)) for i, g in batches]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for turn, (i, g) in enumerate(batches):
            with torch.cuda.stream(streams[turn % 2]):
                got.append((embed(i, weight), trained(i, weight, g)))
        torch.cuda.synchronize()
        for pair, expected in zip(got, want, strict=True):
            assert_same_bits(pair[0], expected[0], "output")
            assert_same_bits(pair[1], expected[1], "gradient")


# ---- graphs ----------------------------------------------------------------------------------------------------------


def captured(call: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """The call as a CUDA graph, warmed up on a side stream as torch asks for, and the tensor that replays write to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@gpu_only
@every_call
@make.each("dtype", [torch.float32, torch.bfloat16])
def test_replays_follow_the_inputs(device, function, dtype):
    arguments = inputs(device, dtype)
    graph, result = captured(lambda: function(*arguments))
    for seed in (5, 6, 5):
        result.fill_(7)
        arguments[0].copy_(ids(device, 4, 40, seed=seed))
        arguments[1].copy_(numbers(device, V, D, seed=seed))
        arguments[2].copy_(numbers(device, 4, 40, D, seed=seed))
        fresh = tuple(a.clone() for a in arguments)
        graph.replay()
        assert_same_bits(result, function(*fresh), f"seed {seed}")


@gpu_only
@pytest.mark.parametrize("count", [1, 2048, 3072, 3073, 6145, 50_000])
def test_backward_of_any_size_can_be_captured(device, count):
    """On either side of the sizes where torch's own backward changes its algorithm, the larger of which waits."""
    given, grad = ids(device, count), numbers(device, count, D)
    op = torch.ops.posenc_ext.embed_backward
    graph, result = captured(lambda: op(grad, given, V, 2.0, -1, False))
    for seed in (8, 9):
        given.copy_(ids(device, count, seed=seed, rows=V if seed == 8 else 3))
        graph.replay()
        assert_same_bits(result, op(grad, given, V, 2.0, -1, False), f"{count} tokens")


@gpu_only
def test_whole_training_steps_can_be_captured(device):
    """Forward, loss, backward, with gradients that accumulate into fixed memory."""

    def model() -> nn.Module:
        first = make.layer(rows=V, width=D, padding_idx=0)
        return nn.Sequential(first, posenc_ext.PositionalEncoding(D), nn.Linear(D, 8)).to(device)

    def step(layers: nn.Module, given: Tensor) -> Tensor:
        for parameter in layers.parameters():
            parameter.grad = None
        loss = layers(given).square().mean()
        loss.backward()
        return loss.detach()

    layers, eager, given = model(), model(), ids(device, 4, 40)
    graph, loss = captured(lambda: step(layers, given))
    for seed in (5, 6):
        given.copy_(ids(device, 4, 40, seed=seed))
        graph.replay()
        torch.testing.assert_close(loss, step(eager, given.clone()))
        for got, want in zip(layers.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
        assert make.weight_of(layers[0]).grad[0].count_nonzero() == 0


@gpu_only
def test_first_use_in_a_capture(device):
    """What outlives the call is none of the graph's memory: another graph, and its pool's end, leave it alone."""

    def encoding() -> Tensor:
        return positional_encoding(positions, 64, convention=Convention(base=4321.0))

    positions = ids(device, 3, rows=10**6)
    embed(positions % V, numbers(device, V, D))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = encoding()
    graph.replay()
    want = positional_encoding(positions.cpu(), 64, convention=Convention(base=4321.0))
    assert_same_bits(result.cpu(), want)
    del graph, result
    torch.cuda.empty_cache()
    numbers(device, 1024, 1024).fill_(float("nan"))
    assert_same_bits(encoding().cpu(), want)


@gpu_only
def test_asking_in_a_capture(device):
    """While one stream is captured, others may be asked for their errors."""
    given, weight, other = ids(device, 40), numbers(device, V, D), torch.cuda.Stream()
    bad = torch.full((3,), V, device=device)
    embed(given, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = embed(given, weight)
        with torch.cuda.stream(other):
            embed(bad, weight)
        with pytest.raises(IndexError, match=f"got {V}"):
            posenc_ext.check_errors()
    graph.replay()
    assert_same_bits(result, embed(given, weight))


@gpu_only
def test_a_stream_of_others(device):
    """Of a stream that torch did not make nothing is known later; the call leaves an event behind."""
    handle = torch.cuda.Stream()
    bad, weight = torch.full((3,), V, device=device), numbers(device, V, D)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.cuda_stream)):
        sleep()
        embed(bad, weight)
    with pytest.raises(IndexError, match=f"got {V}"):
        posenc_ext.check_errors()


def test_more_bases_than_are_kept(device):
    """Frequencies of some 800 bases stay on the device, others come with each call; a graph never loses its own."""

    def encoding(base: float, positions: Tensor) -> Tensor:
        return positional_encoding(positions, 1024, convention=Convention(base=base))

    positions, bases = ids(device, 3, rows=10**6), [1000.0 + i for i in range(1000)]
    found = [encoding(base, positions) for base in bases]
    graph, result = captured(lambda: encoding(7.0, positions)) if ON_GPU else (None, encoding(7.0, positions))
    for base, got in zip(bases, found, strict=True):
        assert_same_bits(got.cpu(), encoding(base, positions.cpu()), f"base {base}")
    if ON_GPU:
        result.fill_(7)
        graph.replay()
    assert_same_bits(result.cpu(), encoding(7.0, positions.cpu()))


# ---- devices ---------------------------------------------------------------------------------------------------------


@two_gpus
@every_call
def test_a_device_that_is_not_the_current_one(device, function):
    first = inputs("cuda:0")
    second = tuple(a.to("cuda:1") for a in first)
    with torch.cuda.device(0):
        got = function(*second)
        assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda:1")
    assert_same_bits(got.cpu(), function(*first).cpu())


@two_gpus
def test_a_stream_of_the_other_device(device):
    given, weight, _ = inputs("cuda:1")
    want, late = embed(given, weight), torch.zeros_like(given)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        sleep()
        late.copy_(given)
        with torch.cuda.device(0):  # whose current stream is another one
            got = embed(late, weight)
    torch.cuda.synchronize(1)
    assert_same_bits(got, want)


@two_gpus
def test_inputs_of_two_gpus(device):
    given, weight, x = inputs("cuda:0")
    with pytest.raises(ValueError, match=r"input must be on the device of weight \(cuda:0\), got cuda:1"):
        embed(given.to("cuda:1"), weight)
    with pytest.raises(ValueError, match="positions must be on the device of x"):
        add_positional_encoding(x, positions=given.to("cuda:1"))


@two_gpus
def test_out_of_range_ids_of_each_device(device):
    """An error belongs to where it was made; asking finds those of all devices."""
    for where in ("cuda:0", "cuda:1"):
        embed(torch.tensor([V], device=where), numbers(where, V, D))
        torch.cuda.synchronize(where)
        with pytest.raises(IndexError, match=f"got {V}"):
            posenc_ext.check_errors()
    posenc_ext.check_errors()


# ---- memory ----------------------------------------------------------------------------------------------------------


@gpu_only
def test_a_forward_takes_its_output_and_nothing_else(device):
    """[1, 65536] x 1024 in bf16: a temporary of that length, in fp32 at that, would be twice the output."""
    given, weight = ids(device, 1, 65_536), numbers(device, V, 1024, dtype=torch.bfloat16)
    embed(given, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = embed(given, weight)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= out.nbytes + 2**20


@gpu_only
def test_memory_does_not_grow(device):
    """Scratch memory goes back; nothing is kept per call, stream or shape."""
    given, weight, x = inputs(device)

    for call in CALLS_AND_BACKWARD.values():
        call(given, weight, x.clone())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for turn in range(50):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in CALLS_AND_BACKWARD.values():
                call(given[:, : 40 - turn % 7], weight, x[:, : 40 - turn % 7].contiguous())
        stream.synchronize()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
