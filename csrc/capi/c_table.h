// The function table of pycoll.h.
#pragma once

#include "capi/pycoll.h"

namespace pycoll {

const pycoll_api* capi_table();

}  // namespace pycoll
