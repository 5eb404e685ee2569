#include "kernels/cuda/cuda_memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "base/environment.h"
#include "kernels/cuda/cuda_driver.h"
#include "kernels/cuda/cuda_status.h"

namespace pycoll {
namespace {

struct Driver {
#define PYCOLL_DRIVER(name) decltype(&::name) name = find_driver_function<decltype(&::name)>(#name)
  PYCOLL_DRIVER(cuDeviceGetAttribute);
  PYCOLL_DRIVER(cuMemCreate);
  PYCOLL_DRIVER(cuMemRelease);
  PYCOLL_DRIVER(cuMemAddressReserve);
  PYCOLL_DRIVER(cuMemAddressFree);
  PYCOLL_DRIVER(cuMemMap);
  PYCOLL_DRIVER(cuMemUnmap);
  PYCOLL_DRIVER(cuMemSetAccess);
  PYCOLL_DRIVER(cuMemGetAllocationGranularity);
  PYCOLL_DRIVER(cuMemExportToShareableHandle);
  PYCOLL_DRIVER(cuMemImportFromShareableHandle);
  PYCOLL_DRIVER(cuMemGetAddressRange);
#undef PYCOLL_DRIVER

  bool has_virtual_memory() const {
    return cuDeviceGetAttribute != nullptr && cuMemCreate != nullptr && cuMemRelease != nullptr &&
           cuMemAddressReserve != nullptr && cuMemAddressFree != nullptr && cuMemMap != nullptr &&
           cuMemUnmap != nullptr && cuMemSetAccess != nullptr &&
           cuMemGetAllocationGranularity != nullptr && cuMemExportToShareableHandle != nullptr &&
           cuMemImportFromShareableHandle != nullptr;
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

/// A mapping of this process; stored by address.
struct Mapped {
  size_t nbytes;  // mapped size
  CUmemGenericAllocationHandle handle;
};

struct Mappings {
  std::mutex mutex;
  std::map<uintptr_t, Mapped> by_address;

  /// The mapping that contains `address`, or the end.
  std::map<uintptr_t, Mapped>::iterator around(uintptr_t address) {
    auto found = by_address.upper_bound(address);
    if (found == by_address.begin()) return by_address.end();
    --found;
    return address < found->first + found->second.nbytes ? found : by_address.end();
  }
};

Mappings& mappings() {
  static Mappings all;
  return all;
}

/// Properties of memory of `device` that can be exported to other processes as a descriptor.
CUmemAllocationProp exportable(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

/// Set once the driver has refused memory that can be exported, as it does in some virtual machines
/// and containers although the attribute says yes. CUDA IPC shares what cudaMalloc gives.
std::atomic<bool> refuses_exportable{false};

/// A stream of each device for what is done at once: it waits for no other stream, as the default
/// stream would. Never destroyed, since it is used until the process ends.
struct OwnStreams {
  std::mutex mutex;
  std::map<int, cudaStream_t> streams;

  int find(int device, cudaStream_t* stream) {
    const std::lock_guard lock(mutex);
    cudaStream_t& found = streams[device];
    int status = 0;
    if (found == nullptr) {
      status = cuda_status(cudaStreamCreateWithFlags(&found, cudaStreamNonBlocking));
    }
    *stream = found;
    return status;
  }
};

OwnStreams& own_streams() {
  static OwnStreams all;
  return all;
}

std::mutex note_mutex;
std::string note_text;  // cuda_memory_note()

bool can_export(int device) {
  if (!env_flag("PYCOLL_CUDA_VMM") || !driver().has_virtual_memory() || refuses_exportable) {
    return false;
  }
  int supported = 0;
  return driver().cuDeviceGetAttribute(
             &supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) ==
             CUDA_SUCCESS &&
         supported != 0;
}

int map_at(int device, CUdeviceptr address, CUmemGenericAllocationHandle handle, size_t nbytes) {
  int status = driver_status(driver().cuMemMap(address, nbytes, 0, handle, 0), "mapping memory");
  if (status != 0) return status;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  status = driver_status(driver().cuMemSetAccess(address, nbytes, &access, 1),
                         "allowing access to mapped memory");
  if (status != 0) {
    (void)driver().cuMemUnmap(address, nbytes);
    return status;
  }
  // Kernels of ranks of this process on other devices use the memory, too. Peer access between
  // devices, which the runtime enables, does not apply to mapped memory.
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess) num_devices = 0;
  for (int peer = 0; peer < num_devices; ++peer) {
    int reaches = 0;
    if (peer == device || cudaDeviceCanAccessPeer(&reaches, peer, device) != cudaSuccess) continue;
    access.location.id = peer;
    // Where this fails, the test of the link finds it (transport/memory/device_window.cc).
    if (reaches != 0) (void)driver().cuMemSetAccess(address, nbytes, &access, 1);
  }
  (void)cudaGetLastError();
  return 0;
}

/// Maps `handle` for kernels of `device`, and takes ownership of it.
int map_handle(int device, CUmemGenericAllocationHandle handle, size_t nbytes, void** memory) {
  CUdeviceptr address = 0;
  int status =
      driver_status(driver().cuMemAddressReserve(&address, nbytes, 0, 0, 0), "reserving addresses");
  if (status != 0) {
    (void)driver().cuMemRelease(handle);
    return status;
  }
  status = map_at(device, address, handle, nbytes);
  if (status != 0) {
    (void)driver().cuMemAddressFree(address, nbytes);
    (void)driver().cuMemRelease(handle);
    return status;
  }
  *memory = reinterpret_cast<void*>(address);
  const std::lock_guard lock(mappings().mutex);
  mappings().by_address.emplace(address, Mapped{nbytes, handle});
  return 0;
}

/// Allocates memory that can be exported as a descriptor. Returns a CUresult.
int allocate_exportable(int device, size_t nbytes, void** memory) {
  const CUmemAllocationProp properties = exportable(device);
  size_t unit = 0;
  int status = driver_status(
      driver().cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      "reading the page size");
  if (status != 0) return status;
  const size_t rounded = (nbytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  status = driver_status(driver().cuMemCreate(&handle, rounded, &properties, 0), "an allocation");
  return status != 0 ? status : map_handle(device, handle, rounded, memory);
}

/// Unmaps memory. False when it was not mapped here.
bool unmap(void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const std::lock_guard lock(mappings().mutex);
  const auto found = mappings().by_address.find(address);
  if (found == mappings().by_address.end()) return false;
  (void)driver().cuMemUnmap(address, found->second.nbytes);
  (void)driver().cuMemAddressFree(address, found->second.nbytes);
  (void)driver().cuMemRelease(found->second.handle);
  mappings().by_address.erase(found);
  return true;
}

/// Remembers the last error as the reason why no memory is exported by a descriptor any more.
void refuse_exportable() {
  refuses_exportable = true;
  const std::lock_guard lock(note_mutex);
  note_text = std::string("shared by IPC handles, because of ") + cuda_last_error();
}

}  // namespace

int cuda_allocate(int32_t device, size_t nbytes, void** memory) {
  const AllowedInCapture allowed;
  const OnDevice current(device);
  (void)cudaFree(nullptr);  // the driver's functions need the runtime's context
  const bool exportable = can_export(device);
  int status = exportable ? allocate_exportable(device, nbytes, memory) : 1;
  if (exportable && status == CUDA_ERROR_OUT_OF_MEMORY) return status;
  if (status != 0) {
    // Whatever the error says: cudaMalloc is another way, and reports a device that is lost.
    if (exportable) refuse_exportable();
    status = cuda_status(cudaMalloc(memory, nbytes));
  }
  if (status != 0) return status;
  cudaStream_t own = nullptr;
  if (const int found = own_streams().find(device, &own)) return found;
  if (const int cleared = cuda_status(cudaMemsetAsync(*memory, 0, nbytes, own))) return cleared;
  return cuda_status(cudaStreamSynchronize(own));
}

int cuda_copy_now(int32_t device, void* dst, const void* src, size_t nbytes) {
  const AllowedInCapture allowed;
  const OnDevice current(device);
  cudaStream_t own = nullptr;
  if (const int found = own_streams().find(device, &own)) return found;
  if (const int status = cuda_status(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, own))) {
    return status;
  }
  return cuda_status(cudaStreamSynchronize(own));
}

std::string cuda_memory_note() {
  const std::lock_guard lock(note_mutex);
  return note_text;
}

int cuda_free(void* memory) {
  const AllowedInCapture allowed;
  if (unmap(memory)) return 0;
  return cuda_status(cudaFree(memory));
}

int cuda_export_memory(const void* p, DeviceHandle* handle, int32_t* fd) {
  *handle = {};
  *fd = -1;
  const auto address = reinterpret_cast<uintptr_t>(p);
  {
    const std::lock_guard lock(mappings().mutex);
    const auto found = mappings().around(address);
    if (found != mappings().by_address.end()) {
      int shared = -1;
      const int status = driver_status(
          driver().cuMemExportToShareableHandle(&shared, found->second.handle,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "exporting memory");
      if (status != 0) return status;
      *fd = shared;
      handle->kind = DeviceHandleKind::kFd;
      handle->nbytes = found->second.nbytes;
      handle->offset = address - found->first;
      return 0;
    }
  }
  // Memory of another library: CUDA IPC exports the whole allocation that contains `p`.
  CUdeviceptr base = 0;
  size_t nbytes = 0;
  if (driver().cuMemGetAddressRange == nullptr) return cuda_refuse("the driver is too old");
  if (const int status = driver_status(driver().cuMemGetAddressRange(&base, &nbytes, address),
                                       "finding an allocation")) {
    return status;
  }
  handle->nbytes = nbytes;
  handle->offset = address - base;
  cudaIpcMemHandle_t ipc{};
  static_assert(sizeof(ipc) <= sizeof(handle->bytes));
  if (cudaIpcGetMemHandle(&ipc, reinterpret_cast<void*>(base)) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;  // kNone: neither way exports this memory
  }
  handle->kind = DeviceHandleKind::kIpc;
  std::memcpy(handle->bytes, &ipc, sizeof(ipc));
  return 0;
}

int cuda_import_memory(int32_t device, const DeviceHandle* handle, int32_t fd, void** base) {
  const OnDevice current(device);
  (void)cudaFree(nullptr);
  if (handle->kind == DeviceHandleKind::kIpc) {
    cudaIpcMemHandle_t ipc{};
    std::memcpy(&ipc, handle->bytes, sizeof(ipc));
    return cuda_status(cudaIpcOpenMemHandle(base, ipc, cudaIpcMemLazyEnablePeerAccess));
  }
  if (handle->kind != DeviceHandleKind::kFd || !driver().has_virtual_memory()) {
    return cuda_refuse("this memory cannot be imported");
  }
  CUmemGenericAllocationHandle imported = 0;
  const int status =
      driver_status(driver().cuMemImportFromShareableHandle(
                        &imported, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                    "importing memory");
  if (status != 0) return status;
  return map_handle(device, imported, handle->nbytes, base);
}

int cuda_release_import(void* base) {
  const AllowedInCapture allowed;
  if (unmap(base)) return 0;
  return cuda_status(cudaIpcCloseMemHandle(base));
}

int cuda_withdraw(int32_t device, void* p, int32_t* can) {
  const OnDevice current(device);
  const auto address = reinterpret_cast<uintptr_t>(p);
  *can = 0;
  uintptr_t base = 0;
  size_t nbytes = 0;
  {
    const std::lock_guard lock(mappings().mutex);
    const auto found = mappings().around(address);
    if (found == mappings().by_address.end()) return 0;
    base = found->first;
    nbytes = found->second.nbytes;
  }
  *can = 1;
  const CUmemAllocationProp properties = exportable(device);
  CUmemGenericAllocationHandle own = 0;
  void* copy = nullptr;
  int status = driver_status(driver().cuMemCreate(&own, nbytes, &properties, 0), "an allocation");
  if (status == 0) status = map_handle(device, own, nbytes, &copy);
  if (status != 0) return status;
  status = cuda_copy_now(device, copy, reinterpret_cast<void*>(base), nbytes);
  if (status == 0) {
    const std::lock_guard lock(mappings().mutex);
    Mapped& mapped = mappings().by_address.at(base);
    Mapped& copied = mappings().by_address.at(reinterpret_cast<uintptr_t>(copy));
    status = driver_status(driver().cuMemUnmap(base, nbytes), "unmapping memory");
    if (status == 0) {
      status = map_at(device, base, own, nbytes);
      if (status == 0) {
        std::swap(mapped.handle, copied.handle);  // unmap() below releases the former memory
      } else {
        (void)map_at(device, base, mapped.handle, nbytes);
      }
    }
  }
  (void)unmap(copy);
  return status;
}

int cuda_allocate_host(size_t nbytes, void** memory) {
  if (const int status =
          cuda_status(cudaHostAlloc(memory, nbytes, cudaHostAllocPortable | cudaHostAllocMapped))) {
    return status;
  }
  std::memset(*memory, 0, nbytes);
  void* on_device = nullptr;
  if (const int status = cuda_status(cudaHostGetDevicePointer(&on_device, *memory, 0))) {
    return status;
  }
  return on_device == *memory ? 0 : cuda_refuse("CPU memory has another address on the device");
}

int cuda_free_host(void* memory) {
  const AllowedInCapture allowed;
  return cuda_status(cudaFreeHost(memory));
}

int cuda_map_host(void* memory, size_t nbytes, void** on_device) {
  if (const int status = cuda_status(
          cudaHostRegister(memory, nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped))) {
    return status;
  }
  return cuda_status(cudaHostGetDevicePointer(on_device, memory, 0));
}

int cuda_unmap_host(void* memory) {
  const AllowedInCapture allowed;
  return cuda_status(cudaHostUnregister(memory));
}

}  // namespace pycoll
