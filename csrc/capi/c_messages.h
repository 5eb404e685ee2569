// Sends and receives of the C table.
#pragma once

#include "capi/pycoll.h"

namespace pycoll {

int start_message(pycoll_comm* comm, const pycoll_message* message, pycoll_done done, void* context,
                  pycoll_handle** handle, pycoll_error* error);
size_t max_staged_bytes(pycoll_comm* comm);
int copy_for_send(pycoll_comm* comm, const void* data, size_t nbytes, int device, void* stream,
                  pycoll_device_bytes** bytes, pycoll_error* error);
void release_device_bytes(pycoll_device_bytes* bytes);
int start_device_message(pycoll_comm* comm, const pycoll_message* message, int device,
                         pycoll_device_bytes* bytes, pycoll_done done, void* context,
                         pycoll_handle** handle, pycoll_error* error);
int wait_message(pycoll_handle* handle, double timeout_s, pycoll_error* error);

}  // namespace pycoll
