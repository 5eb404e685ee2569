#include "bootstrap/security/openssl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "base/environment.h"
#include "base/error.h"
#include "base/printable.h"

namespace pycoll {
namespace {

// Threads may still use OpenSSL while the exit handlers of the process run.
constexpr uint64_t kNoExitHandler = 0x00080000;

[[noreturn]] void fail(const std::string& why) {
  throw SystemError("PYCOLL_TLS=1 needs OpenSSL 3, but " + printable(why, 2 * kShownBytes) +
                    ": install the system's libssl3, or set the path of the library in " +
                    kOpenSslVariable);
}

}  // namespace

OpenSsl::OpenSsl() {
  const std::string path = env_text(kOpenSslVariable).value_or("libssl.so.3");
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(::dlerror());
  const auto find = [&](auto& function, const char* name) {
    // libssl depends on libcrypto, so dlsym finds its functions too.
    void* found = ::dlsym(library, name);
    if (found == nullptr) fail(std::string(path) + " has no " + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
#define PYCOLL_FIND(name) find(name, #name)
  PYCOLL_FIND(OPENSSL_init_ssl);
  PYCOLL_FIND(TLS_method);
  PYCOLL_FIND(SSL_CTX_new);
  PYCOLL_FIND(SSL_CTX_ctrl);
  PYCOLL_FIND(SSL_CTX_set_ciphersuites);
  PYCOLL_FIND(SSL_CTX_set_num_tickets);
  PYCOLL_FIND(SSL_CTX_set_default_read_buffer_len);
  PYCOLL_FIND(SSL_CTX_set_psk_client_callback);
  PYCOLL_FIND(SSL_CTX_set_psk_server_callback);
  PYCOLL_FIND(SSL_new);
  PYCOLL_FIND(SSL_free);
  PYCOLL_FIND(SSL_set_ex_data);
  PYCOLL_FIND(SSL_get_ex_data);
  PYCOLL_FIND(SSL_set_bio);
  PYCOLL_FIND(SSL_set_verify);
  PYCOLL_FIND(SSL_set_connect_state);
  PYCOLL_FIND(SSL_set_accept_state);
  PYCOLL_FIND(SSL_do_handshake);
  PYCOLL_FIND(SSL_session_reused);
  PYCOLL_FIND(SSL_read);
  PYCOLL_FIND(SSL_write);
  PYCOLL_FIND(SSL_key_update);
  PYCOLL_FIND(SSL_get_error);
  PYCOLL_FIND(BIO_meth_new);
  PYCOLL_FIND(BIO_meth_set_write);
  PYCOLL_FIND(BIO_meth_set_read);
  PYCOLL_FIND(BIO_meth_set_ctrl);
  PYCOLL_FIND(BIO_new);
  PYCOLL_FIND(BIO_set_init);
  PYCOLL_FIND(BIO_set_data);
  PYCOLL_FIND(BIO_get_data);
  PYCOLL_FIND(BIO_set_flags);
  PYCOLL_FIND(BIO_clear_flags);
  PYCOLL_FIND(ERR_clear_error);
  PYCOLL_FIND(ERR_peek_error);
#undef PYCOLL_FIND
  if (OPENSSL_init_ssl(kNoExitHandler, nullptr) != 1) fail(std::string(path) + " does not start");
}

const OpenSsl& openssl() {
  static const OpenSsl library;
  return library;
}

}  // namespace pycoll
