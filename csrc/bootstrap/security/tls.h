// TLS 1.3 over one connected, non-blocking socket, with a key that both ends have from elsewhere:
// no certificates. Keys of the records are fresh for each connection (psk_dhe_ke), so that whoever
// learns the secret later cannot read what was recorded before.
//
// A connection ends as TCP's does, without a word of TLS: who leaves says so in frames, and one
// that is cut in between counts as lost.
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
  /// What the other end said when it refused the greeting.
  enum class Refusal { kNone, kNoTls, kOtherSecret };

  /// Raises SystemError where there is no OpenSSL.
  Tls(int socket, Role role, std::string_view secret);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  /// Goes on with the greeting as far as the socket allows; kGoesOn: when it can be read again.
  Greeting greet();
  Refusal refusal() const { return refusal_; }

  /// As sendmsg and recvmsg of a non-blocking socket: how many bytes, 0 for an end, or -1 and
  /// errno. After EAGAIN the next send must begin with the same bytes: some are encrypted already.
  ssize_t send(const iovec* parts, size_t num_parts);
  ssize_t receive(const iovec* parts, size_t num_parts);
  /// Bytes may have come that the socket does not show any more: receive() until it says EAGAIN.
  bool may_have_more() const { return may_have_more_; }

  /// What an end that speaks no TLS answers to one that does, so that it need not guess.
  static std::string_view refusal_without_tls();
  /// Whether these first bytes are TLS's.
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
  /// Of a call that has not worked: errno is set. True when it may be repeated.
  bool may_repeat(int returned);
  void fail(int error);

  const OpenSsl& api_;
  const int socket_;
  const Role role_;
  const Digest key_;
  ssl_st* ssl_;
  bool greeted_ = false;
  Refusal refusal_ = Refusal::kNone;
  int failed_ = 0;        // errno: nothing works any more
  bool ended_ = false;    // the other end has closed
  int socket_error_ = 0;  // of the last read
  bool may_have_more_ = false;
  size_t num_records_ = 0;  // encrypted with the current key
  std::vector<char> out_;   // encrypted, from `out_sent_` on not yet sent
  size_t out_sent_ = 0;
  size_t in_out_ = 0;  // bytes of the caller's that are in `out_`
  std::unique_ptr<std::byte[]> record_;
};

}  // namespace pycoll
