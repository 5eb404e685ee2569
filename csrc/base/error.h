// Typed exceptions of the control plane. The data plane never throws: it writes an ErrorWord
// (transport/ring/segment.h) that the caller's thread turns into one of these.
#pragma once

#include <stdexcept>
#include <string>

namespace pycoll {

/// Base of every error that pycoll raises; `pycoll.Error` in Python.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller asked for something that cannot be done (Python: also a ValueError).
class UsageError : public Error {
 public:
  using Error::Error;
};

/// The operating system refused something (Python: also an OSError).
class SystemError : public Error {
 public:
  using Error::Error;
};

/// A device, or its library, refused something.
class CudaError : public Error {
 public:
  using Error::Error;
};

/// MPI refused something, or there is none that this build can use.
class MpiError : public Error {
 public:
  using Error::Error;
};

/// A peer did not come, or did not move on, before the deadline.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

/// A peer's process ended, or a peer left the communicator, while others still needed it.
class PeerDiedError : public Error {
 public:
  PeerDiedError(const std::string& what, int rank, int signal)
      : Error(what), rank_(rank), signal_(signal) {}
  int rank() const { return rank_; }
  /// Signal that ended the peer, or 0 when it is not known.
  int signal() const { return signal_; }

 private:
  int rank_;
  int signal_;
};

/// Two ranks entered the same operation number with different calls.
class CollectiveMismatchError : public Error {
 public:
  using Error::Error;
};

/// The communicator was broken by an earlier error, on this rank or on another one.
class AbortedError : public Error {
 public:
  using Error::Error;
};

/// Raises SystemError with `what` and the text of the current errno.
[[noreturn]] void throw_system_error(const std::string& what);

}  // namespace pycoll
