// Memory of GPUs: allocations that other processes can map, and CPU memory that kernels reach.
// device/device_table.h documents the functions.
#pragma once

#include <string>

#include "device/device_table.h"

namespace pycoll {

int cuda_allocate(int32_t device, size_t nbytes, void** memory);
int cuda_free(void* memory);
int cuda_export_memory(const void* p, DeviceHandle* handle, int32_t* fd);
int cuda_import_memory(int32_t device, const DeviceHandle* handle, int32_t fd, void** base);
int cuda_release_import(void* base);
int cuda_withdraw(int32_t device, void* p, int32_t* can);
int cuda_allocate_host(size_t nbytes, void** memory);
int cuda_free_host(void* memory);
int cuda_copy_now(int32_t device, void* dst, const void* src, size_t nbytes);
/// DeviceFacts::memory_note.
std::string cuda_memory_note();
int cuda_map_host(void* memory, size_t nbytes, void** on_device);
int cuda_unmap_host(void* memory);

}  // namespace pycoll
