// Runs a model that was compiled ahead of time (compile_model.py) in a process without Python.
//
//   TORCH=$(python -c "import torch; print(torch.__path__[0])")
//   OPS=$(python -c "import posenc_ext; print(posenc_ext.ops_library())")
//   python compile_model.py model.pt2
//   c++ -std=c++20 run_model.cpp -o run_model -I$TORCH/include -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch_cpu -lc10
//   ./run_model $OPS model.pt2 3 1 4 1 5
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: %s OPS_LIBRARY MODEL.pt2 ID...\n", arguments[0]);
    return 2;
  }
  // To load the library is to register the ops. A program may link to it as well; the linker must then be told to keep
  // it (-Wl,--no-as-needed), since nothing in the program calls it.
  if (dlopen(arguments[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  std::vector<int64_t> ids;
  for (int i = 3; i < count; ++i) ids.push_back(std::atoll(arguments[i]));
  try {
    const c10::InferenceMode no_gradients;
    torch::inductor::AOTIModelPackageLoader model(arguments[2]);
    const at::Tensor result = model.run({at::tensor(ids, at::kLong).unsqueeze(0)}).at(0).squeeze(0);
    for (int64_t t = 0; t < result.size(0); ++t) {
      for (int64_t j = 0; j < result.size(1); ++j)
        std::printf("%s%.9g", j == 0 ? "" : " ", result[t][j].item<double>());
      std::printf("\n");
    }
  } catch (const std::exception& error) {  // an id out of range, for one
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
