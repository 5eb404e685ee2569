#include "capi/guard.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pycoll {
namespace {

int fill(pycoll_error* error, int code, std::string_view text) {
  if (error == nullptr) return code;
  const size_t length = std::min(text.size(), sizeof(error->message) - 1);
  error->code = code;
  error->rank = -1;
  error->signal = 0;
  std::memcpy(error->message, text.data(), length);
  error->message[length] = '\0';
  return code;
}

}  // namespace

int describe_error(const std::exception_ptr& raised, pycoll_error* error) {
  try {
    std::rethrow_exception(raised);
  } catch (const PeerDiedError& e) {
    fill(error, PYCOLL_PEER_DIED_ERROR, e.what());
    if (error != nullptr) {
      error->rank = e.rank();
      error->signal = e.signal();
    }
    return PYCOLL_PEER_DIED_ERROR;
  } catch (const CollectiveMismatchError& e) {
    return fill(error, PYCOLL_MISMATCH_ERROR, e.what());
  } catch (const TimeoutError& e) {
    return fill(error, PYCOLL_TIMEOUT_ERROR, e.what());
  } catch (const AbortedError& e) {
    return fill(error, PYCOLL_ABORTED_ERROR, e.what());
  } catch (const UsageError& e) {
    return fill(error, PYCOLL_USAGE_ERROR, e.what());
  } catch (const SystemError& e) {
    return fill(error, PYCOLL_SYSTEM_ERROR, e.what());
  } catch (const DataError& e) {
    return fill(error, PYCOLL_DATA_ERROR, e.what());
  } catch (const std::exception& e) {
    return fill(error, PYCOLL_ERROR, e.what());
  } catch (...) {
    return fill(error, PYCOLL_ERROR, "an exception of unknown type");
  }
}

void raise_described(const pycoll_error& error) {
  const std::string text(error.message);
  switch (error.code) {
    case PYCOLL_USAGE_ERROR:
      throw UsageError(text);
    case PYCOLL_SYSTEM_ERROR:
      throw SystemError(text);
    case PYCOLL_TIMEOUT_ERROR:
      throw TimeoutError(text);
    case PYCOLL_PEER_DIED_ERROR:
      throw PeerDiedError(text, error.rank, error.signal);
    case PYCOLL_MISMATCH_ERROR:
      throw CollectiveMismatchError(text);
    case PYCOLL_ABORTED_ERROR:
      throw AbortedError(text);
    case PYCOLL_DATA_ERROR:
      throw DataError(text);
    default:
      throw Error(text);
  }
}

}  // namespace pycoll
