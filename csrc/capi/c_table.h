// The table of pycoll.h, for whoever hands it out.
#pragma once

#include "capi/pycoll.h"

namespace pycoll {

const pycoll_api* capi_table();

}  // namespace pycoll
