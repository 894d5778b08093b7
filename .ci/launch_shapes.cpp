// Prints the launch shapes of forward calls, one a line of input: units seq batch resident_blocks together.
#include <iostream>

#include "../csrc/cuda/launch_config.h"

int main() {
  int64_t units, seq, batch, resident, together;
  while (std::cin >> units >> seq >> batch >> resident >> together) {
    const auto shape = posenc::cuda::forward_shape(units, seq, batch, resident, together);
    std::cout << shape.x * shape.y * shape.z << ' ' << shape.y << ' ' << shape.z << ' ' << shape.blocks_x << ' '
              << shape.blocks_y << ' ' << shape.blocks_z << ' ' << shape.steps << '\n';
  }
}
