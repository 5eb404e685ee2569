#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace pycoll {

void throw_system_error(const std::string& what) {
  throw SystemError(what + ": " + std::strerror(errno));
}

}  // namespace pycoll
