#include "errors.h"

namespace posenc {

Allocate allocate_from_python = nullptr;

void set_allocate_from_python(Allocate allocate) { allocate_from_python = allocate; }

}  // namespace posenc
