// The module posenc_ext._C: what was built, which instruction set runs, and the kernels without torch around them.
//
// It has no kernel of its own: it links to the library of the ops (everything else in this folder) and calls what that
// exports, so it acts on what the ops run. All state is there, immutable or behind an atomic or a mutex.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>

#include "cpu/dispatch.h"
#include "cuda/backend.h"
#include "frequency.h"
#include "sinusoid.h"
#include "spec.h"

namespace py = pybind11;

namespace posenc {
namespace {

int32_t serial(int64_t begin, int64_t end, int64_t, ParallelBody body, void* context) {
  body(begin, end, context);
  return 0;
}

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class Input, class SinCosOf>
py::tuple sincos(const Array<Input>& inputs, const SinCosOf& sincos_of) {
  using value_t = decltype(sincos_of(Input{}).sin);
  Array<value_t> sines(inputs.size()), cosines(inputs.size());
  const Input* from = inputs.data();
  value_t *s = sines.mutable_data(), *c = cosines.mutable_data();
  for (py::ssize_t i = 0; i < inputs.size(); ++i) {
    const SinCos<value_t> pair = sincos_of(from[i]);
    s[i] = pair.sin, c[i] = pair.cos;
  }
  return py::make_tuple(sines, cosines);
}

py::dict frequency_table(double base, int64_t divisor, int64_t width, int64_t pairs) {
  const auto table = frequencies(base, static_cast<Divisor>(divisor), width, pairs);
  Array<uint32_t> turns({py::ssize_t{4}, static_cast<py::ssize_t>(pairs)});
  for (int word = 0; word < 4; ++word)
    std::copy_n(table->turns[word].begin(), pairs, turns.mutable_data() + word * pairs);
  Array<float> angular(pairs);
  std::copy_n(table->angular.begin(), pairs, angular.mutable_data());
  py::dict result;
  result["turns"] = turns;
  result["angular"] = angular;
  return result;
}

void embed_raw(uintptr_t weight, uintptr_t ids, uintptr_t out, int64_t batch, int64_t length, int64_t width,
               int64_t dtype, int64_t offset, double token_scale, double base, int64_t flags) {
  const Spec spec(base, flags, "embed_raw");
  ForwardParams params;
  params.tokens = {batch, length, {length, 1}};
  params.encoding = {spec.columns(width), spec.precision, {}};
  params.positions.offset = offset;
  params.dtype = static_cast<Dtype>(dtype);
  params.source = Source::gathered;
  params.base = reinterpret_cast<const void*>(weight);
  params.ids = {reinterpret_cast<const void*>(ids), true};
  params.rows = std::numeric_limits<int64_t>::max();
  params.row_stride = width;
  params.out = reinterpret_cast<void*>(out);
  params.out_strides = {length * width, width};
  params.token_scale = token_scale;
  const auto table = frequencies(base, spec.divisor, frequency_width(spec.odd, width), params.encoding.columns.pairs());
  params.encoding.frequencies = table->view();
  const py::gil_scoped_release unlocked;
  cpu::forward(params, serial);
}

py::dict build_info() {
  py::dict info;
  info["compiler"] = __VERSION__;
  info["torch_built_with"] = POSENC_TORCH_VERSION;
  info["cuda_archs"] = POSENC_CUDA_ARCHS;
  info["cuda"] = !std::string(POSENC_CUDA_ARCHS).empty();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  m.doc() = "Compiled half of posenc_ext: build information, choice of instruction set, raw kernels.";
  m.def("build_info", &build_info, "What this library was built with.");
  m.def("available_isas", &cpu::available_isas,
        "CPU instruction sets of this build that this machine can run, best first.");
  m.def("active_isa", &cpu::active_isa, "The instruction set in use.");
  m.def(
      "force_isa",
      [](const std::string& name) {
        if (!cpu::force_isa(name))
          throw std::invalid_argument("posenc_ext._C.force_isa: name must be one of available_isas(), got '" + name +
                                      "'");
      },
      py::arg("name"), "Use one of available_isas() from now on, process-wide. Results do not depend on it.");
  m.def("check_errors", &cuda::check_errors, py::call_guard<py::gil_scoped_release>(),
        "Wait for every CUDA device in use and raise IndexError for an out-of-range index that one has found.");
  m.def("frequency_table", &frequency_table, py::arg("base"), py::arg("divisor"), py::arg("width"), py::arg("pairs"),
        "The frequencies of a spec: 'turns' uint32 [4, pairs], the bits of w / 2pi; 'angular' float32 [pairs], w of "
        "precision reference.");
  m.def(
      "sincos_of_phase32",
      [](const Array<uint32_t>& phases) { return sincos(phases, [](auto phase) { return sincos_of_phase32(phase); }); },
      py::arg("phases"), "(sin, cos) float32 of 2pi * phases / 2^32.");
  m.def(
      "sincos_of_phase64",
      [](const Array<uint64_t>& phases) { return sincos(phases, [](auto phase) { return sincos_of_phase64(phase); }); },
      py::arg("phases"), "(sin, cos) float64 of 2pi * phases / 2^64.");
  m.def(
      "sincos_of_angle",
      [](const Array<float>& angles) { return sincos(angles, [](float angle) { return sincos_of_angle(angle); }); },
      py::arg("angles"), "(sin, cos) float32 of non-negative float32 angles in radians, below 2^87.");
  m.def("embed_raw", &embed_raw, py::arg("weight"), py::arg("ids"), py::arg("out"), py::arg("batch"), py::arg("length"),
        py::arg("width"), py::arg("dtype"), py::arg("offset"), py::arg("token_scale"), py::arg("base"),
        py::arg("flags"),
        "The forward kernel on one thread, on raw addresses of contiguous buffers, int64 ids; no address and no id is "
        "checked. dtype: 0 float32, 1 float64, 2 bfloat16, 3 float16. For microbenchmarks.");
}

}  // namespace posenc
