// Definitions of the opaque types of pycoll.h.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>

#include "capi/pycoll.h"
#include "comm/communicator.h"

namespace pycoll {

/// A communicator, shared by its C handles.
struct SharedCommunicator {
  explicit SharedCommunicator(std::unique_ptr<Communicator> opened) : comm(std::move(opened)) {}
  ~SharedCommunicator() { Communicator::retire(std::move(comm)); }

  std::unique_ptr<Communicator> comm;
  pid_t pid = ::getpid();  // differs in a forked process, which is not the rank
  std::mutex starting;     // serializes the start of asynchronous operations and of their threads
};

}  // namespace pycoll

struct pycoll_comm {
  std::shared_ptr<pycoll::SharedCommunicator> shared;
};

struct pycoll_handle {
  std::shared_ptr<pycoll::SharedCommunicator> shared;
  std::shared_ptr<pycoll::MessageOp> op;
};

struct pycoll_memory {
  pycoll::SharedMemory memory;
};

struct pycoll_array {
  std::shared_ptr<pycoll::CachedArray> cached;
};

struct pycoll_device_bytes {
  std::shared_ptr<pycoll::DeviceMessages::Bytes> bytes;
  pycoll::Device device;
  void* stream;  // copies to `bytes`
  bool is_sent = false;
};

struct pycoll_device_work {
  std::shared_ptr<pycoll::SharedCommunicator> shared;
  std::shared_ptr<pycoll::DeviceWork> work;
};
