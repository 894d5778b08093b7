#include "forward_launch.cuh"

namespace posenc::cuda {

void launch_forward_float32(Source source, const ForwardArgs& args, const Choice& choice, const Launch& launch) {
  launch_forward<float>(source, args, choice, launch);
}

}  // namespace posenc::cuda
