#include "forward_launch.cuh"

namespace posenc::cuda {

void launch_forward_float64(Source source, const ForwardArgs& args, const Choice& choice, const Launch& launch) {
  launch_forward<double>(source, args, choice, launch);
}

}  // namespace posenc::cuda
