#include "forward_launch.cuh"

namespace posenc::cuda {

void launch_forward_bfloat16(Source source, const ForwardArgs& args, const Choice& choice, const Launch& launch) {
  launch_forward<BFloat16>(source, args, choice, launch);
}

}  // namespace posenc::cuda
