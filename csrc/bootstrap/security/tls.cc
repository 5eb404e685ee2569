#include "bootstrap/security/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace pycoll {
namespace {

using namespace std::string_view_literals;

constexpr size_t kRecordBytes = 16384;            // the maximum of TLS
constexpr size_t kBatchBytes = 4 * kRecordBytes;  // encrypted in one go, then sent in one call
constexpr size_t kReadBytes = 65536;
// RFC 8446, 5.5: AES-GCM is safe for 2^24.5 full records with one key. OpenSSL does not count.
constexpr size_t kRecordsPerKey = 1 << 16;
constexpr char kIdentity[] = "pycoll";

// Constants of OpenSSL's headers, which are part of its ABI.
constexpr int kCtrlMode = 33;
constexpr int kCtrlReadAhead = 41;
constexpr int kCtrlSessionCache = 44;
constexpr int kCtrlMinVersion = 123;
constexpr long kTls13 = 0x0304;
constexpr long kModes = 1 | 2;  // partial writes, and moving write buffers
constexpr int kVerifyPeer = 1;
constexpr int kErrorWantRead = 2;
constexpr int kErrorWantWrite = 3;
constexpr int kErrorOrderlyEnd = 6;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kBioType = 127 | 0x0400;  // BIO_TYPE_SOURCE_SINK and a number of our choice
constexpr int kBioCtrlFlush = 11;
constexpr int kBioReadRetry = 1 | 8;
constexpr int kBioRetryFlags = 1 | 2 | 4 | 8;
constexpr unsigned long kReasonMask = 0x7FFFFF;
constexpr unsigned long kReasonOfAlert = 1000;

// Alerts of TLS (RFC 8446, 6.2).
constexpr unsigned long kIllegalParameter = 47;  // sent by OpenSSL if the proof of the key is wrong
constexpr unsigned long kProtocolVersion = 70;
constexpr std::string_view kAlertNoTls = "\x15\x03\x03\x00\x02\x02\x46"sv;
constexpr std::string_view kAlertFailed = "\x15\x03\x03\x00\x02\x02\x28"sv;

}  // namespace

/// A cursor over the caller's bytes.
class Tls::Parts {
 public:
  Parts(const iovec* parts, size_t num_parts) : part_(parts), end_(parts + num_parts) { settle(); }

  bool at_end() const { return part_ == end_; }
  const std::byte* data() const { return static_cast<const std::byte*>(part_->iov_base) + at_; }
  size_t size() const { return part_->iov_len - at_; }
  void skip(size_t nbytes) {
    for (; nbytes != 0 && !at_end(); settle()) {
      const size_t now = std::min(nbytes, size());
      at_ += now;
      nbytes -= now;
    }
  }

 private:
  void settle() {
    for (; part_ != end_ && at_ == part_->iov_len; ++part_) at_ = 0;
  }
  const iovec* part_;
  const iovec* end_;
  size_t at_ = 0;
};

Tls::Tls(int socket, Role role, std::string_view secret)
    : api_(openssl()),
      socket_(socket),
      role_(role),
      key_(hmac_sha256(secret, "pycoll tls 1")),
      ssl_(api_.SSL_new(context(api_))) {
  static bio_method_st* const method = make_bio_method(api_);
  bio_st* bio = ssl_ == nullptr ? nullptr : api_.BIO_new(method);
  if (bio == nullptr) {
    if (ssl_ != nullptr) api_.SSL_free(ssl_);
    throw SystemError("OpenSSL: out of memory for a connection");
  }
  api_.BIO_set_data(bio, this);
  api_.BIO_set_init(bio, 1);
  api_.SSL_set_bio(ssl_, bio, bio);
  api_.SSL_set_ex_data(ssl_, 0, this);
  if (role == Role::kAccepts) {
    api_.SSL_set_accept_state(ssl_);
  } else {
    // No certificate is trusted, so the handshake succeeds only with the key.
    api_.SSL_set_verify(ssl_, kVerifyPeer, nullptr);
    api_.SSL_set_connect_state(ssl_);
  }
}

Tls::~Tls() { api_.SSL_free(ssl_); }

ssl_ctx_st* Tls::context(const OpenSsl& api) {
  static ssl_ctx_st* const made = make_context(api);
  return made;
}

ssl_ctx_st* Tls::make_context(const OpenSsl& api) {
  ssl_ctx_st* made = api.SSL_CTX_new(api.TLS_method());
  // Both use SHA-256, the hash to which OpenSSL binds pre-shared keys of these callbacks.
  if (made == nullptr ||
      api.SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") !=
          1 ||
      api.SSL_CTX_ctrl(made, kCtrlMinVersion, kTls13, nullptr) != 1) {
    throw SystemError("OpenSSL: TLS 1.3 with AES-128-GCM is not allowed on this system");
  }
  api.SSL_CTX_ctrl(made, kCtrlMode, kModes, nullptr);
  api.SSL_CTX_ctrl(made, kCtrlReadAhead, 1, nullptr);
  api.SSL_CTX_ctrl(made, kCtrlSessionCache, 0, nullptr);
  api.SSL_CTX_set_default_read_buffer_len(made, kReadBytes);
  api.SSL_CTX_set_num_tickets(made, 0);
  api.SSL_CTX_set_psk_client_callback(made, give_key_to_client);
  api.SSL_CTX_set_psk_server_callback(made, give_key_to_server);
  return made;
}

bio_method_st* Tls::make_bio_method(const OpenSsl& api) {
  bio_method_st* method = api.BIO_meth_new(kBioType, "pycoll");
  if (method == nullptr) throw SystemError("OpenSSL: out of memory for a BIO method");
  api.BIO_meth_set_read(method, read_socket);
  api.BIO_meth_set_write(method, keep_output);
  api.BIO_meth_set_ctrl(method, [](bio_st*, int command, long, void*) -> long {
    return command == kBioCtrlFlush ? 1 : 0;
  });
  return method;
}

unsigned Tls::give_key_to_client(ssl_st* ssl, const char*, char* identity,
                                 unsigned max_identity_bytes, unsigned char* key,
                                 unsigned max_key_bytes) {
  if (max_identity_bytes < sizeof(kIdentity)) return 0;
  std::memcpy(identity, kIdentity, sizeof(kIdentity));
  return give_key_to_server(ssl, kIdentity, key, max_key_bytes);
}

unsigned Tls::give_key_to_server(ssl_st* ssl, const char*, unsigned char* key,
                                 unsigned max_key_bytes) {
  const auto* self = static_cast<const Tls*>(openssl().SSL_get_ex_data(ssl, 0));
  if (max_key_bytes < self->key_.size()) return 0;
  std::memcpy(key, self->key_.data(), self->key_.size());
  return static_cast<unsigned>(self->key_.size());
}

int Tls::read_socket(bio_st* bio, char* bytes, int nbytes) {
  const OpenSsl& api = openssl();
  auto* self = static_cast<Tls*>(api.BIO_get_data(bio));
  api.BIO_clear_flags(bio, kBioRetryFlags);
  const ssize_t got = ::recv(self->socket_, bytes, static_cast<size_t>(nbytes), MSG_DONTWAIT);
  self->ended_ = got == 0;
  self->socket_error_ = got < 0 ? errno : 0;
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) api.BIO_set_flags(bio, kBioReadRetry);
  return static_cast<int>(got);
}

/// Buffers all output, so that one system call sends a whole batch of records.
int Tls::keep_output(bio_st* bio, const char* bytes, int nbytes) {
  const OpenSsl& api = openssl();
  auto* self = static_cast<Tls*>(api.BIO_get_data(bio));
  api.BIO_clear_flags(bio, kBioRetryFlags);
  self->out_.insert(self->out_.end(), bytes, bytes + nbytes);
  return nbytes;
}

Tls::Greeting Tls::greet() {
  if (greeted_) return Greeting::kDone;
  if (failed_ != 0) return Greeting::kFailed;
  api_.ERR_clear_error();
  const int returned = api_.SSL_do_handshake(ssl_);
  const bool goes_on = returned != 1 && may_repeat(returned);
  if (returned != 1 && !goes_on) {
    const unsigned long reason = api_.ERR_peek_error() & kReasonMask;
    if (reason == kReasonOfAlert + kIllegalParameter) refusal_ = Refusal::kOtherSecret;
    if (reason == kReasonOfAlert + kProtocolVersion) refusal_ = Refusal::kNoTls;
    // OpenSSL sends no alert to an end without TLS. If it has sent one, this second one is ignored.
    if (role_ == Role::kAccepts) out_.insert(out_.end(), kAlertFailed.begin(), kAlertFailed.end());
  }
  // A few bytes on a new connection: a socket that does not accept them is unusable.
  if (!flush()) fail(errno);
  if (returned == 1 && api_.SSL_session_reused(ssl_) != 1)
    fail(EPROTO);  // not authenticated by the key
  if (failed_ != 0) return Greeting::kFailed;
  if (goes_on) return Greeting::kGoesOn;
  greeted_ = may_have_more_ = true;
  return Greeting::kDone;
}

bool Tls::may_repeat(int returned) {
  const int code = api_.SSL_get_error(ssl_, returned);
  if (code == kErrorWantRead || code == kErrorWantWrite) {
    errno = EAGAIN;
    return true;
  }
  if (code == kErrorOrderlyEnd) ended_ = true;
  const bool by_socket = socket_error_ != 0 && socket_error_ != EAGAIN && socket_error_ != EINTR;
  fail(by_socket ? socket_error_ : EPROTO);
  return false;
}

void Tls::fail(int error) {
  if (failed_ == 0) failed_ = error;
  errno = failed_;
}

bool Tls::flush() {
  while (out_sent_ < out_.size()) {
    const ssize_t sent = ::send(socket_, out_.data() + out_sent_, out_.size() - out_sent_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return false;
    out_sent_ += static_cast<size_t>(sent);
  }
  out_.clear();
  out_sent_ = 0;
  return true;
}

bool Tls::write(const std::byte* bytes, size_t nbytes) {
  const int written = api_.SSL_write(ssl_, bytes, static_cast<int>(nbytes));
  if (written != static_cast<int>(nbytes)) {
    fail(EPROTO);  // keep_output() accepts everything
    return false;
  }
  in_out_ += nbytes;
  ++num_records_;
  return true;
}

/// Fills `out_` with records of maximum size.
bool Tls::encrypt(Parts& parts) {
  api_.ERR_clear_error();
  if (num_records_ >= kRecordsPerKey) {
    num_records_ = 0;
    if (api_.SSL_key_update(ssl_, kKeyUpdateNotRequested) != 1) {
      fail(EPROTO);
      return false;
    }
  }
  while (!parts.at_end() && in_out_ < kBatchBytes) {
    size_t nbytes = 0;
    if (parts.size() >= kRecordBytes) {
      nbytes = kRecordBytes;
      if (!write(parts.data(), nbytes)) return false;
      parts.skip(nbytes);
      continue;
    }
    if (!record_) record_ = std::make_unique<std::byte[]>(kRecordBytes);
    while (!parts.at_end() && nbytes < kRecordBytes) {
      const size_t now = std::min(parts.size(), kRecordBytes - nbytes);
      std::memcpy(record_.get() + nbytes, parts.data(), now);
      nbytes += now;
      parts.skip(now);
    }
    if (!write(record_.get(), nbytes)) return false;
  }
  return true;
}

ssize_t Tls::send(const iovec* parts, size_t num_parts) {
  if (failed_ != 0) {
    errno = failed_;
    return -1;
  }
  Parts rest(parts, num_parts);
  rest.skip(in_out_);
  size_t sent = 0;
  for (;;) {
    if (!flush()) break;
    sent += std::exchange(in_out_, 0);
    if (rest.at_end()) return static_cast<ssize_t>(sent);
    if (!encrypt(rest)) break;
  }
  if (errno != EAGAIN && errno != EINTR) fail(errno);
  return sent != 0 ? static_cast<ssize_t>(sent) : -1;
}

ssize_t Tls::receive(const iovec* parts, size_t num_parts) {
  ssize_t received = 0;
  if (failed_ != 0) {
    errno = failed_;
    return ended_ ? 0 : -1;
  }
  api_.ERR_clear_error();
  may_have_more_ = false;
  for (size_t i = 0; i < num_parts; ++i) {
    auto* to = static_cast<std::byte*>(parts[i].iov_base);
    for (size_t left = parts[i].iov_len; left != 0;) {
      const int got = api_.SSL_read(ssl_, to, static_cast<int>(std::min<size_t>(left, 1 << 30)));
      if (got <= 0) {
        const bool over = !may_repeat(got);
        if (received != 0) return received;
        return over && ended_ ? 0 : -1;
      }
      to += got;
      left -= static_cast<size_t>(got);
      received += got;
    }
  }
  may_have_more_ = true;
  return received;
}

std::string_view Tls::refusal_without_tls() { return kAlertNoTls; }

bool Tls::is_greeting(std::string_view bytes) { return bytes.starts_with("\x16\x03\x01"sv); }

bool Tls::is_refusal(std::string_view bytes) { return bytes.starts_with("\x15\x03"sv); }

}  // namespace pycoll
