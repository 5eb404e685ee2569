// Typed exceptions of the control plane. The data plane never throws: it writes a Failure
// (transport/ring/segment.h), from which the caller's thread raises one of these.
#pragma once

#include <stdexcept>
#include <string>

namespace pycoll {

/// Base of every error that pycoll raises; `pycoll.Error` in Python.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller asked for something impossible (Python: also a ValueError).
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A call of the operating system failed (Python: also an OSError).
class SystemError : public Error {
 public:
  using Error::Error;
};

/// A call of a device or of its library failed.
class CudaError : public Error {
 public:
  using Error::Error;
};

/// A call of MPI failed, or no MPI library fits this build.
class MpiError : public Error {
 public:
  using Error::Error;
};

/// A peer did not arrive, or made no progress, before the deadline.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

/// A peer's process ended, or a peer left the communicator, while other ranks still needed it.
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

/// Bytes changed on their way from one rank to another. Only PYCOLL_CHECK_DATA=1 finds it.
class DataError : public Error {
 public:
  using Error::Error;
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
