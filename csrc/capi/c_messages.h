// Sends and receives of the C table.
#pragma once

#include "capi/pycoll.h"

namespace pycoll {

int start_message(pycoll_comm* comm, const pycoll_message* message, pycoll_done done, void* context,
                  pycoll_handle** handle, pycoll_error* error);
int wait_message(pycoll_handle* handle, double timeout_s, pycoll_error* error);

}  // namespace pycoll
