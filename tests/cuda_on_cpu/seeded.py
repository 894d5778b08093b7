"""Bugs that the checks must notice: each a few words of a real source, changed in a copy of it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

from . import build


@dataclasses.dataclass
class Bug:
    """What is changed, which units are compiled with it, and how it shows."""

    name: str
    file: str  # in csrc
    units: str  # or kernels of a unit, such as tokens_float32; separated by spaces
    old: str
    new: str
    mode: str  # "host", "contention", "memory order", or how the kernels are run
    only: str  # the checks that are run
    caught: str = "FAILED"

    def run(self, program: Path) -> tuple[int, str]:
        """Exit status and output of the checks that must notice it."""
        if self.mode in ("contention", "memory order"):
            return build.run_program(program, self.only, seed=1)  # without one, threads take no turns
        few = {"asan": ["--two-types"], "tsan": ["--few"]}.get(self.mode, [])  # TSan is slow at many threads
        return build.run_program(program, *few, "--only", self.only)

    def is_caught(self, status: int, output: str) -> bool:
        """Whether they did, for the right reason."""
        return status != 0 and re.search(self.caught, output) is not None

    def change(self, folder: Path) -> Path:
        """A csrc with the bug."""
        csrc = folder / "csrc"
        shutil.copytree(build.CSRC, csrc)
        changed = csrc / self.file
        words = r"\s+".join(map(re.escape, self.old.split()))  # however its lines are broken
        text, count = re.subn(words, lambda _: self.new, changed.read_text())
        assert count > 0, f"{self.file} has no {self.old!r} any more"
        changed.write_text(text)
        return csrc

    def program(self, builder: build.Builder, folder: Path) -> Path:
        """The check program, of which the named units have the bug."""
        csrc, units = self.change(folder), self.units.split()
        name = "".join(c if c.isalnum() else "-" for c in f"{self.mode}-{self.name}")
        if self.mode == "host":
            originals = builder.host_units()
            objects = [builder.host_unit(u, csrc if u.name in units else build.CSRC) for u in originals]
            assert set(units) <= {u.name for u in originals}
            return builder.host_program(name, objects)
        if self.mode in ("contention", "memory order"):
            return builder.contention_program(self.mode, csrc, name)
        originals = build.kernel_units(dtypes=None if self.mode == "plain" else build.TWO_TYPES)
        whole = [u for u in originals if u.name in units]
        changed = [u._replace(path=csrc / "cuda" / u.path.name) for u in whole]
        changed += [self.kernels(folder, name) for name in set(units) - {u.name for u in whole}]
        # Of a template's instance or an inline function that several units have, the first one counts.
        objects = [builder.shim_object(u, self.mode, csrc=csrc) for u in changed]
        objects += [builder.shim_object(u, self.mode) for u in originals if u not in whole]
        return builder.link(name, [*objects, *builder.host_objects()], self.mode, partial=self.mode != "plain")

    def kernels(self, folder: Path, name: str) -> build.Unit:
        """Some kernels alone: all of a unit take several times as long to compile."""
        kind, _, dtype = name.partition("_")
        source = folder / f"{name}.cu"
        element = f"<ElementOf<Dtype::{dtype}>"
        instances = [f"template void {kernel.replace('<T', element)}(ForwardParams, ForwardLaunch);"
                     for kernel in INSTANCES[kind]]  # fmt: skip
        source.write_text("\n".join(['#include "cuda/forward.cuh"', "namespace posenc::cuda {", *instances, "}\n"]))
        return build.Unit(source)


INSTANCES = {
    "tokens": [f"forward_tokens<T, Source::gathered, Arrangement::{arrangement}, Inner::{inner}>"
               for arrangement in ("interleaved", "halves") for inner in ("batch", "seq")],
    "vectors": [f"forward_vectors<T, Source::{source}, Arrangement::interleaved, Mode::{mode}>"
                for source in ("gathered", "none") for mode in ("shared", "per_token_exact")],
    "general": [f"forward_general<T, Source::gathered, Arrangement::{a}>" for a in ("interleaved", "halves")],
    "columns": [f"forward_columns<T, Source::{source}, false>" for source in ("gathered", "none")],
}  # fmt: skip


def host(name: str, file: str, old: str, new: str, only: str, units: str = "", caught: str = "FAILED") -> Bug:
    """A bug of the host half. The unit is the file itself, unless others are named."""
    return Bug(name, file, units or Path(file).stem, old, new, "host", only, caught)


RUNTIME, CALL, BOTH = "cuda/runtime.cu", "torch/cuda_call.h", "embed embed_backward"

# Those with numbers are the ones that a stranger once seeded, when nothing of the host half was tested.
HOST = [
    # Where work runs.
    host("1: always the default stream", CALL, ", current_cuda_stream(tensor.get_device_index()),", ", nullptr,",
         "results", BOTH),
    host("2: guard of device 0", CALL, "guard_(tensor.get_device_index())", "guard_(0)", "results", BOTH,
         "a device that torch does not have current"),
    host("3: the device is not selected", RUNTIME, "select(device);", "", "results"),
    host("the state of device 0 for every device", RUNTIME, "Device& state = device_of(device, framework);",
         "Device& state = device_of(0, framework);", "two devices"),
    host("kernels of the gradient on the default stream", "cuda/backward.cu",
         "launch.stream, tokens, scratch, launch.errors", "nullptr, tokens, scratch, launch.errors", "results"),
    host("a clearing on the default stream", "cuda/backward.cu", "static_cast<cudaStream_t>(launch.stream)),",
         "nullptr),", "results"),
    host("a sort on the default stream", "cuda/sort.cu", "shape.bits, static_cast<cudaStream_t>(stream)",
         "shape.bits, nullptr", "results"),
    host("a running sum on the default stream", "cuda/sort.cu",
         "static_cast<int>(shape.count), static_cast<cudaStream_t>(stream)", "static_cast<int>(shape.count), nullptr",
         "results"),
    host("occupancy is asked for at every launch", RUNTIME,
         "if (found != resident_blocks_.end()) return found->second;", "(void)found;", "launch shapes"),
    host("8: no threads at a time", RUNTIME, "int64_t{blocks} * processors_", "int64_t{blocks} * 0", "launch shapes"),
    host("the size of the wrong device", RUNTIME, "cudaDevAttrMultiProcessorCount, index)",
         "cudaDevAttrMultiProcessorCount, 0)", "launch shapes"),
    # Memory.
    host("16: scratch 256 bytes short", CALL, "empty({bytes}", "empty({bytes > 256 ? bytes - 256 : 0}", "results", BOTH,
         "past the end of memory|takes it for the device's"),
    host("scratch is given back at once", CALL, "scratch_ = empty({bytes}, ScalarType::Byte, like_); return scratch_->",
         "return empty({bytes}, ScalarType::Byte, like_).", "results", BOTH, "memory that was given back"),
    host("20: frequencies of the host", "torch/embed.cpp", "call.frequencies(*table)", "table->view()", "results",
         "embed", "memory of the host"),
    host("10: one array of frequencies over another", RUNTIME, "words_.begin() + i * stride_);", "words_.begin());",
         "many frequencies"),
    host("frequencies are not waited for", RUNTIME, "settled_.store(false, std::memory_order_relaxed);", "",
         "many frequencies"),
    host("the table of another spec", RUNTIME, "frequencies_.find(table.key)", "frequencies_.begin()",
         "many frequencies"),
    # Sorting.
    host("14: one bit short", "cuda/sort.cu", "0, shape.bits,", "0, shape.bits - 1,", "small inputs"),
    host("15: the smaller of two sizes", "cuda/sort.cu", "std::max(", "std::min(", "small inputs"),
    host("bits of the last row", "cuda/backward.cu", "bits_of(call.rows)", "bits_of(call.rows - 1)", "small inputs"),
    host("17: the count one too far", "torch/embed_backward.cpp", "segment_counts + prepared.tokens.count - 1",
         "segment_counts + prepared.tokens.count", "sparse backward"),
    host("6: the count is read early", RUNTIME, '"reading a count"); wait();', '"reading a count");',
         "sparse backward"),
    # Errors.
    host("4: a launch that failed is not told", RUNTIME, "if (error != cudaSuccess) throw", "if (false) throw",
         "launch failure"),
    host("18: no finish after a forward", "torch/embed.cpp", "call->finish(); return result;", "return result;",
         "launch failure"),
    host("no finish after a backward", "torch/embed_backward.cpp", "call->finish(); return out;", "return out;",
         "launch failure"),
    host("the error stays behind", RUNTIME, "const cudaError_t error = cudaGetLastError();",
         "const cudaError_t error = cudaPeekAtLastError();", "launch failure"),
    host("a failed launch, and its result read", RUNTIME, "raise_launch_error(); // else", "// else", "launch failure"),
    host("5: raised in a capture", RUNTIME, "state.errors->found() && !capturing()", "state.errors->found()",
         "captures raise nothing"),
    host("13: captures are not let alone", RUNTIME, "mode_ = cudaStreamCaptureModeRelaxed",
         "mode_ = cudaStreamCaptureModeGlobal", "first use in a capture"),
    host("a first use in a capture waits", RUNTIME, "if (capturing()) { check(cudaStreamWaitEvent(",
         "if (false) { check(cudaStreamWaitEvent(", "first use in a capture"),
    host("a graph does not wait for what was set up", RUNTIME,
         'check(cudaStreamWaitEvent(stream, set_up_, cudaEventWaitExternal), "ordering a graph");', "",
         "first use in a capture"),
    host("what a capture has set up is not waited for later", RUNTIME, "ordering a graph\"); return;",
         "ordering a graph\"); settled_.store(true); return;", "first use in a capture"),
    host("a record is not waited for", RUNTIME,
         "state.settle(static_cast<cudaStream_t>(stream), [this] { return capturing(); });", "",
         "first use of the record", caught="FAILED|spins on an atomic"),
    host("the mode of captures is not set back", RUNTIME,
         "~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }", "~OutsideCapture() {}", "failures"),
    host("a wait in a capture", RUNTIME, "raises_at_once() && !capturing()", "raises_at_once()", "synchronous mode"),
    host("21: the synchronous mode is ignored", RUNTIME, "if (raises_at_once() && ",
         "if (raises_at_once() && false && ", "synchronous mode"),
    host("7: two records mixed up", RUNTIME, "record_ = op == Op::check ?", "record_ = op != Op::check ?",
         "checks are apart"),
    host("checks share the record", RUNTIME, "op == Op::check ? state.checks.get()", "false ? state.checks.get()",
         "checks are apart"),
    host("9: no record", "cuda/runtime.h", "return {record_,", "return {nullptr,", "the next call raises", "runtime",
         "memory of the host"),
    host("the record is not cleared", RUNTIME,
         "check(cudaMemcpyAsync(record_, &empty, sizeof(empty), cudaMemcpyHostToDevice, stream)", "check(cudaSuccess",
         "what errors say"),
    host("11: the flag is not set at first", RUNTIME, "new (mapped) Mapped;", "static_cast<Mapped*>(mapped);",
         "nothing waits"),
    host("the flag at the host's address", "cuda/runtime.h", "&mapped_on_device_->found, call}",
         "&mapped_->found, call}", "the next call raises", "runtime", "memory of the host"),
    host("12: the record is read early", RUNTIME, 'check(cudaStreamSynchronize(stream_), "reading an error");', "",
         "what errors say"),
    host("19: a check does not wait", "torch/embed.cpp", "call->finish_and_wait();", "call->finish();",
         "what errors say"),
    host("the wrong op", RUNTIME, "<< kOpBits) | static_cast<uint64_t>(op)", "<< kOpBits)", "what errors say"),
    host("every call has the same number", RUNTIME, "calls.fetch_add(1,", "calls.fetch_add(0,", "what errors say"),
    host("22: asking looks at one device", RUNTIME, "for (Device* device : in_use) {",
         "for (Device* device : {in_use[0]}) {", "two devices"),
    host("asking does not wait", RUNTIME, "device->wait();", "", "two devices"),
    # Beside captures.
    host("asking waits for the device", RUNTIME, "device->wait();", 'check(cudaDeviceSynchronize(), "waiting");',
         "beside a capture"),
    host("asking waits for a stream under capture", RUNTIME, "status == cudaStreamCaptureStatusNone)", "true)",
         "beside a capture"),
    host("asking waits for the default stream beside a capture", RUNTIME,
         "if (error == cudaSuccess && status == cudaStreamCaptureStatusNone)",
         "if (status == cudaStreamCaptureStatusNone)", "beside a blocking stream"),
    host("asking in the capture mode", RUNTIME,
         "lock(streams_mutex_); const OutsideCapture outside;", "lock(streams_mutex_);", "beside a capture"),
    host("the record is taken in the capture mode", RUNTIME, "lock(mutex_); const OutsideCapture outside;",
         "lock(mutex_);", "beside a capture"),
    host("waiting in the capture mode", RUNTIME, "void Call::wait() const { const OutsideCapture outside;",
         "void Call::wait() const {", "beside a capture"),
    host("a call that waits is captured", RUNTIME, "if (waits(op) && capturing())",
         "if (waits(op) && false)", "beside a capture"),
    # Memory that is kept, streams and processes of others.
    host("kept memory of the graph", CALL, "enter(stream, device, &guard)",
         "enter(current_cuda_stream(device), device, &guard)", "first use in a capture", BOTH),
    host("kept memory is given back", CALL, "kept->push_back(memory);", "", "results", BOTH,
         "memory that was given back"),
    host("kept memory of the CUDA runtime", RUNTIME,
         "void* const memory = framework.keep(index, copies_, packed.bytes());",
         'void* memory = nullptr; check(cudaMalloc(&memory, packed.bytes()), "");', "kept memory"),
    host("streams of others are taken for torch's", CALL, "return number == 0 || number % 2 != 0;", "return true;",
         "streams of others", BOTH),
    host("the end of a call is not recorded", RUNTIME, "if (ended_ != nullptr && !capturing())", "if (false)",
         "streams of others"),
    host("asking waits for the first stream alone", RUNTIME,
         "if (last_lasting_.load(std::memory_order_relaxed) == stream)",
         "if (last_lasting_.load(std::memory_order_relaxed) != cudaStreamPerThread)", "beside a capture"),
    host("a child asks", RUNTIME, "if (forked) return;", "", "forked children"),
    host("a child calls", RUNTIME, "if (forked) throw", "if (false) throw", "forked children"),
    host("an old driver is not named", RUNTIME, "error == cudaErrorInsufficientDriver &&", "false &&", "old driver"),
    host("ids on another device", "torch/embed.cpp", 'check_same_device(*args.input, "input", like, like_name, op);',
         "", "other devices"),
    host("forward kernels on the default stream", "cuda/forward_kernels.cu", "launch.stream, params, call",
         "nullptr, params, call", "results", "forward_kernels_float32"),
]  # fmt: skip


def kernel(name: str, file: str, units: str, old: str, new: str, mode: str, only: str, caught: str = "FAILED") -> Bug:
    """A bug of a kernel or of its launcher."""
    return Bug(name, f"cuda/{file}", units, old, new, mode, only, caught)


FORWARD, BACKWARD, RECORD, BOUNDS = "forward.cuh", "backward.cuh", "out_of_range.cuh", "bounds.cuh"

OVERFLOW = "AddressSanitizer: heap-buffer-overflow|use-after-poison"

SHAPES = [
    kernel("ids of a round past the last token", FORWARD, "forward_kernels_float32", "next.has(i) ? number : 0",
           "number", "asan", "forward: tokens", OVERFLOW),
    kernel("rows of tokens past the last one", FORWARD, "forward_kernels_bfloat16", "walk.has(i) ? place : 0", "place",
           "asan", "forward: tokens", OVERFLOW + "|misaligned address"),
    kernel("tokens past the last one are written", FORWARD, "forward_kernels_bfloat16", "if (!walk.has(i)) break;", "",
           "asan", "forward: tokens", OVERFLOW + "|misaligned address"),
    kernel("threads beyond the outer axis have tokens", FORWARD, "forward_kernels_float32",
           "if (outer >= length(!kAlongSeq)) inner = length(kAlongSeq);", "", "asan", "forward: kernels", OVERFLOW),
    kernel("one encoding for all tokens in flight", FORWARD, "tokens_bfloat16", "walk.t(i) != made_for",
           "made_for < 0", "plain", "forward: tokens"),
    kernel("only the first token in flight may be out of range", FORWARD, "tokens_float16",
           "slow |= !token.in_range;", "slow |= i == 0 && !token.in_range;", "plain", "forward: tokens of"),
    kernel("a far position makes the next ones far", FORWARD, "tokens_float32",
           "far = columns.is_far(position);", "far |= columns.is_far(position);", "plain", "forward: tokens of"),
    kernel("the ids of the first round for every round", FORWARD, "tokens_bfloat16",
           "ask_for_ids(); Token<float> token;", "Token<float> token;", "plain", "forward: tokens"),
    kernel("tokens of other shards are +0", FORWARD, "tokens_float32", "token.scale = -0.0f;",
           "token.scale = 0.0f;", "plain", "forward: tokens"),
    kernel("the step of a place in the output for that of a base term", FORWARD, "tokens_float32",
           "token.out += walk.step_of(params.out_strides)", "token.out += walk.step_of(params.base_strides)", "plain",
           "forward: tokens"),
    kernel("the last token of a segment counts as a segment", BACKWARD, "backward",
           "keys[i] != keys[i + 1] && keys[i + 1] != keys[i + 2]", "keys[i + 1] != keys[i + 2]", "plain",
           "backward: heads"),
    kernel("one partial too many", BACKWARD, "backward", "n + (end - begin - 1) / kSumChunk",
           "n + (end - begin) / kSumChunk", "plain", "backward: heads"),
    kernel("partials in flight past the last one", BACKWARD, "backward", "n + kPartialsInFlight <= last",
           "n + kPartialsInFlight <= last + 1", "plain", "backward: heads"),
    kernel("a key past the last one", BACKWARD, "backward", "at >= 0 && at < tokens.count ?", "at >= 0 ?", "asan",
           "backward: heads", OVERFLOW),
    kernel("a token past the last one", BACKWARD, "backward", "order[first + i < tokens.count ? first + i : first]",
           "order[first + i]", "asan", "backward: heads", OVERFLOW),
    kernel("half of the output is cleared", "backward.cu", "backward", "(params.out, 0, bytes,",
           "(params.out, 0, bytes / 2,", "plain", "backward: heads"),
]  # fmt: skip

GENERAL = [
    kernel("a shard draws from the first column", "elements.cuh", "general_float32",
           "column += dropout.first_column;", "", "plain", "forward: general"),
    kernel("the upper half of a draw first", "elements.cuh", "general_bfloat16",
           "i % 2 == 1 : half", "i % 2 == 0 : half", "plain", "forward: general"),
    kernel("one draw too many in a word", "elements.cuh", "general_float32",
           "half < 4 ? (half < 2", "half < 4 ? (half < 3", "plain", "forward: general"),
    kernel("the threshold is dropped too", "elements.cuh", "general_float16",
           "< dropout.threshold", "<= dropout.threshold + 400", "plain", "forward: general"),
    kernel("an encoding at padding", "elements.cuh", "general_float32",
           "token.encoded ? epilogue<source, encoded>", "true ? epilogue<source, encoded>", "plain",
           "forward: general"),
    kernel("the row of padding shows", "elements.cuh", "forward_kernels_float64",
           "if (!token.embedded) return encoding;", "", "plain", "forward: general"),
    kernel("the scale on the device is not read", "elements.cuh", "general_bfloat16",
           "params.encoding.scale_on_device != nullptr", "false", "plain", "forward: general"),
    kernel("one encoding for all rows", FORWARD, "general_float32",
           "(!made || !params.positions.shared()))", "!made)", "plain", "forward: general"),
    kernel("far positions are left out", FORWARD, "general_float32",
           "slow |= !token.in_range || far;", "slow |= !token.in_range;", "plain", "forward: general"),
    kernel("gradients are dropped by their place in the order", BACKWARD, "backward",
           "add(sum_of(gradients[i], scratch.order[at + i]), sum);", "add(sum_of(gradients[i], at + i), sum);", "plain",
           "backward: dropout"),
    kernel("single tokens are dropped like the first", BACKWARD, "backward", "sum_of(gradients[i], order[i])",
           "sum_of(gradients[i], order[0])", "plain", "backward: dropout"),
    kernel("gradients where vectors straddle draws", "backward.cu", "backward",
           "params.dropout.first_column % kColumnsPerDraw == 0", "true", "plain", "backward: dropout"),
    kernel("dropout where vectors straddle draws", "forward.cu", "forward",
           "params.dropout.first_column % kColumnsPerDraw == 0", "true", "plain", "forward: general"),
    kernel("fractions are left out", FORWARD, "general_float32",
           "if (general && p.fraction != 0) phase += fraction_phase32(frequencies, p.fraction, k);", "", "plain",
           "forward: numbers"),
    kernel("a negative frequency has no sign", FORWARD, "general_bfloat16",
           "if (general) sign ^= __float_as_uint(angle), angle = fabsf(angle);", "if (general) angle = fabsf(angle);",
           "plain", "forward: numbers"),
    kernel("given frequencies are at most 1", FORWARD, "general_float32",
           "return !(static_cast<float>(p) * largest < kShortAngle);",
           "return !(static_cast<float>(p) < kShortAngle);", "plain", "forward: numbers"),
    kernel("what is no position has an encoding", "elements.cuh", "general_float16",
           "position.exists() ? scale : static_cast<acc_t>(NAN)", "scale", "plain", "forward: numbers"),
    kernel("only a block of frequencies is converted", "frequencies.cuh", "frequencies",
           "k < to.stride;", "k < 3;", "plain", "forward: numbers"),
    kernel("vectors of a table at any address", "forward.cu", "forward",
           "return aligned(table.data) && table.row_stride", "return table.rows >= 0 || table.row_stride", "asan",
           "forward: tables", "misaligned address"),
    kernel("a row of positions for all rows of the batch", FORWARD, "forward_kernels_float32",
           "(!made || !params.positions.shared()))", "!made)", "plain", "forward: tables"),
    kernel("the row after the last is in range", "../token.h", "forward_kernels_float32",
           "static_cast<uint64_t>(position) < static_cast<uint64_t>(table.rows)",
           "static_cast<uint64_t>(position) <= static_cast<uint64_t>(table.rows)", "asan",
           "forward: positions out of range", "AddressSanitizer: heap-buffer-overflow|use-after-poison|FAILED"),
    kernel("positions recorded as ids", RECORD, "forward_kernels_float16 bounds", "record->of = of;", "", "plain",
           "forward: positions out of range"),
]  # fmt: skip

KERNELS = [
    kernel("one token too far", BACKWARD, "backward", "for (; at < last; ++at)", "for (; at <= last; ++at)",
           "asan", "backward: patterns", "AddressSanitizer: heap-buffer-overflow|use-after-poison"),
    kernel("vectors at any address", "forward.cu", "forward", "aligned(params.out) &&", "", "asan", "forward: views",
           "misaligned address"),
    kernel("vectors of frequencies at any address", "forward.cu", "forward",
           "frequencies_aligned(params.encoding.frequencies)",
           "(frequencies_aligned(params.encoding.frequencies) || true)", "asan", "forward: column shards",
           "misaligned address"),
    kernel("sines alone as halves", "forward.cu", "forward", "columns.sines == columns.cosines", "true", "plain",
           "forward: column shards"),
    kernel("rows of other shards are read", "../token.h", "forward_kernels_bfloat16", "id - first >= end - first",
           "false", "asan", "forward: row shards", "AddressSanitizer: heap-buffer-overflow|use-after-poison"),
    kernel("sine and cosine swapped", FORWARD, "vectors_bfloat16", "cosine_first ? pair.cos : pair.sin",
           "cosine_first ? pair.sin : pair.cos", "plain", "forward: kernels"),
    kernel("far positions made by the near formulas", FORWARD, "vectors_float32",
           "return p.whole >= uint64_t{1} << 32;", "return false;", "plain", "forward: positions"),
    kernel("every thread of a block writes all its positions", FORWARD, "forward_kernels_bfloat16",
           "int64_t t = blockIdx.x * int64_t{blockDim.y} + threadIdx.y", "int64_t t = blockIdx.x", "tsan",
           "forward: kernels", "data race"),
    kernel("threads write each other's rows", FORWARD, "forward_kernels_bfloat16",
           "return blockIdx.z * int64_t{blockDim.z} + threadIdx.z", "return 0", "tsan", "forward: kernels",
           "data race"),
    kernel("blocks sum each other's chunks", BACKWARD, "backward",
           "int64_t n = blockIdx.x * int64_t{blockDim.y} + threadIdx.y", "int64_t n = threadIdx.y", "tsan",
           "backward: several blocks", "data race"),
    kernel("plain accesses to the record", "out_of_range.cuh", "bounds",
           "const volatile unsigned long long* const first", "const unsigned long long* const first", "tsan", "bounds",
           "data race"),
    kernel("the last token of a segment is left out", BACKWARD, "backward", "static_cast<int32_t>(at + 1)",
           "static_cast<int32_t>(at)", "plain", "backward: patterns"),
    # Those that nothing noticed once; the ones of streams are among the bugs of the host half.
    kernel("places of gradients in 32 bits", BACKWARD, "backward", "token * params.token_stride",
           "static_cast<int>(token * params.token_stride)", "plain", "backward: far apart", "FAILED|^$"),
    kernel("places of rows in 32 bits", BACKWARD, "backward", "+ row * params.width + column",
           "+ static_cast<int>(row * params.width) + column", "plain", "backward: far apart", "FAILED|^$"),
    kernel("more blocks than an axis has", "launch_config.h", "forward_kernels_float32",
           "std::clamp<int64_t>(z_count / together, 1, kMostBlocksYZ)", "z_count / together", "plain",
           "forward: long batches", "more blocks than an axis can have"),
    kernel("no fence after the lock", RECORD, "", "and its thread writes __threadfence();", "and its thread writes",
           "memory order", "8", "data race"),
    kernel("no fence before the lock is freed", RECORD, "", "= 1u; } __threadfence();", "= 1u; }", "memory order", "8",
           "data race"),
    kernel("no fence after the lock of taking", BOUNDS, "", "!= 0u) { } __threadfence();", "!= 0u) { }",
           "memory order", "8", "data race"),
    kernel("no fence before the lock of taking is freed", BOUNDS, "", "= 0u; } __threadfence();", "= 0u; }",
           "memory order", "8", "data race"),
    kernel("an old key is written", RECORD, "", "if (*first == key) { record->key", "{ record->key", "contention",
           "40"),
    kernel("taking forgets a smaller key", BOUNDS, "", "atomicCAS(&record->first, key, kNoKey) == key",
           "atomicExch(&record->first, kNoKey) != kNoKey", "contention", "40"),
    kernel("taking without the lock", BOUNDS, "", "while (atomicCAS(&record->locked, 0u, 1u) != 0u) { }", "",
           "contention", "40"),
    kernel("a record without the lock", RECORD, "",
           "while (atomicCAS(&record->locked, 0u, 1u) != 0u) if (*first != key) return;", "",
           "contention", "40"),
    kernel("what is taken stays", BOUNDS, "", "record->key = kNoKey;", "", "contention", "8"),
    kernel("the lock is freed by a plain store", RECORD, "", "atomicExch(&record->locked, 0u);", "record->locked = 0u;",
           "memory order", "8", "data race"),
    # Others.
    kernel("the last of a warp instead of the first", RECORD, "", "first &= key <=", "first &= key >=", "contention",
           "8"),
    kernel("the host is told nothing", RECORD, "bounds", "*static_cast<volatile uint32_t*>(errors.found) = 1u;",
           "", "plain", "bounds check"),
    kernel("a key without its call", RECORD, "bounds backward", "errors.call << kPlaceBits |", "", "plain",
           "bounds check"),
    kernel("negative ids are in range", RECORD, "bounds",
           "static_cast<uint64_t>(index) < static_cast<uint64_t>(rows)", "index < rows", "plain", "bounds check"),
    kernel("padding has a part in the gradient", BACKWARD, "backward", "valid && id != tokens.padding_idx ?", "valid ?",
           "plain", "backward: patterns"),
    kernel("the last token looks at the next", BACKWARD, "backward", "(at + 1 == tokens.count ||", "(", "asan",
           "backward: patterns", "AddressSanitizer: heap-buffer-overflow|use-after-poison"),
    kernel("segments numbered from 1", BACKWARD, "backward", "scratch.segment_counts[at] - 1",
           "scratch.segment_counts[at]", "asan", "backward: patterns", OVERFLOW),
    kernel("partial sums of another chunk", BACKWARD, "backward", "int64_t n = begin / kSumChunk + 1",
           "int64_t n = begin / kSumChunk", "plain", "backward: patterns"),
    kernel("chunks begin at every edge", BACKWARD, "backward", "|| scratch.sorted_keys[edge - 1] != key) return;",
           ") return;", "plain", "backward: patterns"),
    kernel("a count one too large", BACKWARD, "backward", "static_cast<acc_t>(end - begin)",
           "static_cast<acc_t>(end - begin + 1)", "plain", "backward: patterns"),
    kernel("far positions are left", FORWARD, "vectors_bfloat16",
           "if (!is_far<Elements::kGeneral>(token.position)) continue;", "continue;", "plain", "forward: positions"),
    kernel("the place of an id by rows of the batch", RECORD, "tokens_bfloat16",
           "params.tokens.order.at(b, t)", "b * params.tokens.seq + t", "plain", "forward: out of range"),
    kernel("the zero column first", FORWARD, "columns_bfloat16", "encoding.columns.width - 1, 0)", "0, 0)",
           "plain", "forward: widths"),
    kernel("a tile is written while the last one is read", "positions.cuh", "positions",
           "__syncthreads();  // the next tile", ";  // the next tile", "tsan", "positions: padding", "data race"),
    kernel("tiles do not go on", "positions.cuh", "positions", "before = Row::join(before, ", "before = (", "plain",
           "positions: padding"),
    # Several tokens, heads and partials in flight.
    *SHAPES,
    # Dropout, padding, a scale of the encoding.
    *GENERAL,
]  # fmt: skip
