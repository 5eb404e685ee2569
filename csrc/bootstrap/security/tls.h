// TLS 1.3 over one connected, non-blocking socket, with a pre-shared key and without certificates.
// Every connection has fresh record keys (psk_dhe_ke): a recorded session stays unreadable even if
// the secret leaks later.
//
// A connection ends as in TCP, without a TLS alert: a leaving rank says so in a frame, and a
// connection that breaks without that frame counts as lost.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <string_view>
#include <vector>

#include "bootstrap/security/openssl.h"
#include "bootstrap/security/sha256.h"

namespace pycoll {

class Tls {
 public:
  enum class Role { kConnects, kAccepts };
  enum class Greeting { kGoesOn, kDone, kFailed };
  /// Why the other end refused the handshake.
  enum class Refusal { kNone, kNoTls, kOtherSecret };

  /// Raises SystemError if OpenSSL is not installed.
  Tls(int socket, Role role, std::string_view secret);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  /// Continues the TLS handshake as far as the socket allows. kGoesOn: call again when it is
  /// readable.
  Greeting greet();
  Refusal refusal() const { return refusal_; }

  /// As sendmsg and recvmsg of a non-blocking socket: return the number of bytes, 0 at the end, or
  /// -1 and errno. After EAGAIN the next send must begin with the same bytes: some are already
  /// encrypted.
  ssize_t send(const iovec* parts, size_t num_parts);
  ssize_t receive(const iovec* parts, size_t num_parts);
  /// Whether bytes may be buffered that a poll of the socket does not show: receive() until EAGAIN.
  bool may_have_more() const { return may_have_more_; }

  /// The answer of an end without TLS to an end with TLS, so that the latter knows the reason.
  static std::string_view refusal_without_tls();
  /// Whether these first bytes begin a TLS handshake.
  static bool is_greeting(std::string_view bytes);
  static bool is_refusal(std::string_view bytes);

 private:
  class Parts;

  static int read_socket(bio_st* bio, char* bytes, int nbytes);
  static int keep_output(bio_st* bio, const char* bytes, int nbytes);
  static unsigned give_key_to_client(ssl_st* ssl, const char* hint, char* identity,
                                     unsigned max_identity_bytes, unsigned char* key,
                                     unsigned max_key_bytes);
  static unsigned give_key_to_server(ssl_st* ssl, const char* identity, unsigned char* key,
                                     unsigned max_key_bytes);
  static ssl_ctx_st* context(const OpenSsl& api);
  static ssl_ctx_st* make_context(const OpenSsl& api);
  static bio_method_st* make_bio_method(const OpenSsl& api);

  bool encrypt(Parts& parts);
  bool write(const std::byte* bytes, size_t nbytes);
  bool flush();
  /// Sets errno after a failed call. Returns whether the call may be repeated.
  bool may_repeat(int returned);
  void fail(int error);

  const OpenSsl& api_;
  const int socket_;
  const Role role_;
  const Digest key_;
  ssl_st* ssl_;
  bool greeted_ = false;
  Refusal refusal_ = Refusal::kNone;
  int failed_ = 0;        // errno: every later call fails
  bool ended_ = false;    // the other end has closed the connection
  int socket_error_ = 0;  // of the last read
  bool may_have_more_ = false;
  size_t num_records_ = 0;  // encrypted with the current key
  std::vector<char> out_;   // encrypted bytes; sent up to `out_sent_`
  size_t out_sent_ = 0;
  size_t in_out_ = 0;  // plain bytes of the caller that `out_` contains
  std::unique_ptr<std::byte[]> record_;
};

}  // namespace pycoll
