// The module posenc_ext._C: what was built, which instruction set runs, and the kernels without torch around them.
//
// It has no kernel of its own: it links to the library of the ops (everything else in this folder) and calls what that
// exports, so it acts on what the ops run. All state is there, immutable or behind an atomic or a mutex.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cuda/backend.h"
#include "errors.h"
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
using Array = py::array_t<T, py::array::c_style>;  // a cast that loses something is refused

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

py::tuple sincos_of_angles(const Array<float>& angles) {
  constexpr float kEnd = 0x1p87f;
  for (py::ssize_t i = 0; i < angles.size(); ++i)
    POSENC_CHECK(angles.data()[i] >= 0 && angles.data()[i] < kEnd, "sincos_of_angle",
                 "angles must lie in [0, 2^87), got ", angles.data()[i], " at flat index ", i);
  return sincos(angles, [](float angle) { return sincos_of_angle(angle); });
}

py::dict frequency_table(double base, int64_t divisor, int64_t width, int64_t pairs) {
  const char* op = "frequency_table";
  POSENC_CHECK(std::isfinite(base) && base >= 1, op, "base must be finite and at least 1, got ", base);
  POSENC_CHECK(divisor >= 0 && divisor < kDivisors, op, "divisor must lie in [0, ", kDivisors, "), got ", divisor);
  POSENC_CHECK(width >= 1 && width <= kMostColumns, op, "width must lie in [1, ", kMostColumns, "], got ", width);
  POSENC_CHECK(pairs >= 0 && pairs <= (width + 1) / 2, op, "pairs must lie in [0, ", (width + 1) / 2,
               "], half of width, got ", pairs);
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

bool disjoint(const py::array& a, const py::array& b) {
  const auto first = [](const py::array& array) { return reinterpret_cast<uintptr_t>(array.data()); };
  return first(a) + a.nbytes() <= first(b) || first(b) + b.nbytes() <= first(a);
}

void embed_raw(const py::array& weight, const py::array& ids, py::array out, int64_t offset, double token_scale,
               double base, int64_t flags) {
  const char* op = "embed_raw";
  const Spec spec(base, flags, op);
  POSENC_CHECK(!spec.sequence_first, op, "flags must be those of batch_first=True, got ", flags);
  const auto check = [&](const py::array& array, const char* name, py::ssize_t axes) {
    POSENC_CHECK(array.ndim() == axes, op, name, " must have ", axes, " axes, got ", array.ndim());
    constexpr int kLayout = int{py::array::c_style} | int{py::detail::npy_api::NPY_ARRAY_ALIGNED_};
    POSENC_CHECK((array.flags() & kLayout) == kLayout, op, name, " must be contiguous and aligned");
  };
  check(weight, "weight", 2), check(ids, "ids", 2), check(out, "out", 3);
  const std::string type = py::str(weight.dtype());
  // bfloat16 travels as uint16: NumPy has no such type.
  static const std::map<std::string, Dtype> dtypes{{"float32", Dtype::float32},
                                                   {"float64", Dtype::float64},
                                                   {"uint16", Dtype::bfloat16},
                                                   {"float16", Dtype::float16}};
  const auto dtype = dtypes.find(type);
  POSENC_CHECK(dtype != dtypes.end(), op, "weight must have dtype float32, float64, float16 or uint16 (the bits of ",
               "bfloat16), got ", type);
  POSENC_CHECK(out.dtype().equal(weight.dtype()), op, "out must have the dtype of weight, ", type, ", got ",
               std::string(py::str(out.dtype())));
  POSENC_CHECK(ids.dtype().equal(py::dtype::of<int64_t>()), op, "ids must have dtype int64, got ",
               std::string(py::str(ids.dtype())));
  const int64_t rows = weight.shape(0), width = weight.shape(1), batch = ids.shape(0), length = ids.shape(1);
  POSENC_CHECK(width >= 1 && width <= kMostColumns, op, "the width of weight must lie in [1, ", kMostColumns, "], got ",
               width);
  POSENC_CHECK(out.shape(0) == batch && out.shape(1) == length && out.shape(2) == width, op, "out must have shape [",
               batch, ", ", length, ", ", width, "], got [", out.shape(0), ", ", out.shape(1), ", ", out.shape(2), "]");
  POSENC_CHECK(out.writeable(), op, "out must be writeable");
  POSENC_CHECK(disjoint(out, weight) && disjoint(out, ids), op, "out must not share memory with weight or ids");
  int64_t last = 0;
  POSENC_CHECK(!__builtin_add_overflow(offset, std::max<int64_t>(length - 1, 0), &last), op, "offset ", offset,
               " + length ", length, " exceeds the int64 range");
  if (out.size() == 0) return;

  ForwardParams params;
  params.tokens = {batch, length, {length, 1}};
  params.encoding.columns = spec.columns(width);
  params.encoding.precision = spec.precision;
  params.positions.offset = offset;
  params.dtype = dtype->second;
  params.source = Source::gathered;
  params.base = weight.data();
  params.ids = {ids.data(), true};
  params.rows = rows;
  params.row_stride = width;
  params.out = out.mutable_data();
  params.out_strides = {length * width, width};
  params.token_scale = token_scale;
  const int64_t place = cpu::find_out_of_range(params.ids, batch * length, rows);
  if (place >= 0)
    throw std::out_of_range(message(op, "ids must lie in [0, ", rows, "), got ", params.ids[place], " at ids[",
                                    place / length, ", ", place % length, "]"));
  const auto table = frequencies(base, spec.divisor, frequency_width(spec.odd, width), params.encoding.columns.pairs());
  params.encoding.frequencies = table->view();
  const py::gil_scoped_release unlocked;
  cpu::forward(params, serial);
}

void allocate(const std::vector<int64_t>& sizes, const std::string& dtype, const std::string& device) {
  static const std::map<std::string, const char*> names{
      {"Float", "float32"}, {"Double", "float64"}, {"BFloat16", "bfloat16"}, {"Half", "float16"},
      {"Long", "int64"},    {"Int", "int32"},      {"Byte", "uint8"}};
  const py::gil_scoped_acquire locked;
  const py::module_ torch = py::module_::import("torch");
  torch.attr("empty")(sizes, py::arg("dtype") = torch.attr(names.at(dtype)), py::arg("device") = device);
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
  set_allocate_from_python(&allocate);
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
  m.def("sincos_of_angle", &sincos_of_angles, py::arg("angles"),
        "(sin, cos) float32 of non-negative float32 angles in radians, below 2^87.");
  m.def(
      "embed_raw", &embed_raw, py::arg("weight"), py::arg("ids"), py::arg("out"), py::arg("offset"),
      py::arg("token_scale"), py::arg("base"), py::arg("flags"),
      "The forward kernel on one thread: weight [rows, width], int64 ids [batch, length], out [batch, length, width], "
      "contiguous NumPy arrays. A uint16 array holds the bits of bfloat16. For microbenchmarks.");
}

}  // namespace posenc
