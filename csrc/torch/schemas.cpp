// The schemas of the custom ops. Only this folder knows torch, and only through its stable ABI, so that one build loads
// in every torch from 2.10 on.
//
// Every op takes its spec as scalars (base and flags, see Spec), so a compiled or exported graph holds no table and no
// frequencies. New fields are new bits of flags; new arguments go to embed_general and add_general, whose graphs carry
// names.
//   positions   None for the running index, or a tensor of the shape of the tokens: integers, float32 or float64
//   frequencies those of the pairs of columns, float32 or float64, in place of base and divisor
//   offset      added to either
//   position_table
//               in place of the sinusoids, which flags must say are not there: position p has row p
//   first_row, total_rows, first_column, d_model
//               weight (or x) is a shard: these rows and columns of a whole of that many; -1: it is the whole
// Ops named *_fwd and *_bwd are raw. The public names carry autograd formulas (posenc_ext/ops).

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <string>

namespace posenc {
namespace {

// As STABLE_TORCH_LIBRARY, which cannot name the Python module. Where a fake kernel is missing, because the library was
// loaded without that module, torch says that it is to be imported.
const bool defined = [] {
  TorchLibraryHandle library = nullptr;  // kept as long as the process lives
  TORCH_ERROR_CODE_CHECK(aoti_torch_library_init_def("posenc_ext", __FILE__, __LINE__, &library));
  // From torch 2.13 on.
  using SetPythonModule = AOTITorchError (*)(TorchLibraryHandle, const char* module, const char* context);
  void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (void* const found = torch != nullptr ? dlsym(torch, "torch_library_set_python_module") : nullptr)
    reinterpret_cast<SetPythonModule>(found)(library, "posenc_ext.ops.fake", "`import posenc_ext` does it.");
  const auto define = [&](const std::string& name, const std::string& arguments) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_library_def(library, (name + arguments).c_str()));
  };
  define(
      "embed",
      "(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float token_scale, float base, int flags, int "
      "padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor");
  define("_embed_fwd",
         "(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float token_scale, float base, int flags) "
         "-> Tensor");
  define("embed_out",
         "(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float token_scale, float base, int flags, "
         "Tensor(a!) out) -> ()");
  define("check_embed",
         "(Tensor weight, Tensor input, Tensor? positions, SymInt offset, float base, int flags, Tensor? out=None, "
         "Tensor? frequencies=None, Tensor? position_table=None) -> ()");
  // Tensors are not keyword-only, since torch cannot differentiate those. 1052672: the flags of "vaswani".
  const std::string embed_general =
      "(Tensor weight, Tensor input, Tensor? positions=None, Tensor? frequencies=None, Tensor? position_table=None, "
      "Tensor? seed=None, Tensor? encoding_scale_tensor=None, *, SymInt offset=0, float token_scale=1.0, float "
      "base=10000.0, int flags=1052672, int padding_idx=-1, ";
  const std::string elements = "float encoding_scale=1.0, int at_padding=0, float dropout_p=0.0, ";
  define("embed_general",
         embed_general + "bool scale_grad_by_freq=False, bool sparse=False, " + elements +
             "SymInt first_row=0, SymInt total_rows=-1, SymInt first_column=0, SymInt d_model=-1) -> Tensor");
  define("embed_general_out", embed_general + elements + "Tensor(a!) out) -> ()");
  for (const char* name : {"embed_backward", "_embed_bwd"})
    define(name,
           "(Tensor grad, Tensor input, SymInt num_weights, float token_scale, int padding_idx, bool "
           "scale_grad_by_freq) -> Tensor");
  for (const char* name : {"embed_backward_sparse", "_embed_bwd_sparse"})
    define(name,
           "(Tensor grad, Tensor input, SymInt num_weights, float token_scale, int padding_idx, bool "
           "scale_grad_by_freq) -> (Tensor rows, Tensor values)");
  // The gradient of what dropout was applied to: its tokens are numbered as in the forward.
  const std::string general_backward =
      "(Tensor grad, Tensor input, SymInt num_weights, float token_scale, int padding_idx, bool scale_grad_by_freq, "
      "Tensor? seed=None, *, float dropout_p=0.0, SymInt first_column=0, SymInt d_model=-1) ";
  define("embed_general_backward", general_backward + "-> Tensor");
  define("embed_general_backward_sparse", general_backward + "-> (Tensor rows, Tensor values)");
  for (const char* name : {"add_positional_encoding", "_add_positional_encoding_fwd"})
    define(name, "(Tensor x, Tensor? positions, SymInt offset, float base, int flags) -> Tensor");
  define("add_positional_encoding_out",
         "(Tensor x, Tensor? positions, SymInt offset, float base, int flags, Tensor(a!) out) -> ()");
  const std::string add_general =
      "(Tensor x, Tensor? positions=None, Tensor? seed=None, Tensor? encoding_scale_tensor=None, Tensor? "
      "frequencies=None, Tensor? position_table=None, *, SymInt offset=0, float base=10000.0, int flags=1052672, float "
      "token_scale=1.0, SymInt first_column=0, SymInt d_model=-1, float encoding_scale=1.0, float dropout_p=0.0";
  define("add_general", add_general + ") -> Tensor");
  define("add_general_out", add_general + ", Tensor(a!) out) -> ()");
  define("positional_encoding",
         "(Tensor positions, SymInt d_model, SymInt offset, float base, int flags, ScalarType dtype) -> Tensor");
  define("positional_encoding_out",
         "(Tensor positions, SymInt d_model, SymInt offset, float base, int flags, Tensor(a!) out) -> ()");
  const std::string encode_general =
      "(Tensor positions, Tensor? frequencies=None, *, SymInt d_model, SymInt offset=0, float base=10000.0, int "
      "flags=1052672, ";
  // dtype: a code of conventions.py. Torch ends the process where a formula of Python is handed a ScalarType that is
  // none.
  define("positional_encoding_general", encode_general + "int dtype=0) -> Tensor");
  define("positional_encoding_general_out", encode_general + "Tensor(a!) out) -> ()");
  // first_position: of the first token that counts. offset: added to it, 0-d or one for each row.
  define(
      "positions_from_padding",
      "(Tensor ids_or_mask, int padding_idx, Tensor? offset=None, SymInt first_position=0, SymInt? padding_position=0, "
      "bool batch_first=True) -> Tensor");
  define("positions_from_cu_seqlens", "(Tensor cu_seqlens, SymInt total, SymInt first_position=0) -> Tensor");
  define("positions_from_sequence_ids", "(Tensor ids, SymInt first_position=0, bool batch_first=True) -> Tensor");
  return true;
}();

}  // namespace
}  // namespace posenc
