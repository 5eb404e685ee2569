// The functions of the system's OpenSSL 3 that encryption needs, loaded at first use: building
// pycoll, or running it without encryption, needs neither its headers nor its library.
#pragma once

#include <cstddef>
#include <cstdint>

// Opaque types of OpenSSL.
struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct bio_st;
struct bio_method_st;

namespace pycoll {

/// Variable with the path of the library, if it is not the system's libssl.so.3.
inline constexpr const char* kOpenSslVariable = "PYCOLL_OPENSSL";

struct OpenSsl {
  using PskOfClient = unsigned (*)(ssl_st*, const char* hint, char* identity,
                                   unsigned max_identity_bytes, unsigned char* key,
                                   unsigned max_key_bytes);
  using PskOfServer = unsigned (*)(ssl_st*, const char* identity, unsigned char* key,
                                   unsigned max_key_bytes);

  int (*OPENSSL_init_ssl)(uint64_t options, const void* settings);
  const ssl_method_st* (*TLS_method)();
  ssl_ctx_st* (*SSL_CTX_new)(const ssl_method_st*);
  long (*SSL_CTX_ctrl)(ssl_ctx_st*, int command, long number, void* pointer);
  int (*SSL_CTX_set_ciphersuites)(ssl_ctx_st*, const char* names);
  int (*SSL_CTX_set_num_tickets)(ssl_ctx_st*, size_t num_tickets);
  void (*SSL_CTX_set_default_read_buffer_len)(ssl_ctx_st*, size_t nbytes);
  void (*SSL_CTX_set_psk_client_callback)(ssl_ctx_st*, PskOfClient);
  void (*SSL_CTX_set_psk_server_callback)(ssl_ctx_st*, PskOfServer);

  ssl_st* (*SSL_new)(ssl_ctx_st*);
  void (*SSL_free)(ssl_st*);
  int (*SSL_set_ex_data)(ssl_st*, int index, void* data);
  void* (*SSL_get_ex_data)(const ssl_st*, int index);
  void (*SSL_set_bio)(ssl_st*, bio_st* input, bio_st* output);
  void (*SSL_set_verify)(ssl_st*, int mode, void* callback);
  void (*SSL_set_connect_state)(ssl_st*);
  void (*SSL_set_accept_state)(ssl_st*);
  int (*SSL_do_handshake)(ssl_st*);
  int (*SSL_session_reused)(const ssl_st*);
  int (*SSL_read)(ssl_st*, void* bytes, int nbytes);
  int (*SSL_write)(ssl_st*, const void* bytes, int nbytes);
  int (*SSL_key_update)(ssl_st*, int type);
  int (*SSL_get_error)(const ssl_st*, int returned);

  bio_method_st* (*BIO_meth_new)(int type, const char* name);
  int (*BIO_meth_set_write)(bio_method_st*, int (*)(bio_st*, const char*, int));
  int (*BIO_meth_set_read)(bio_method_st*, int (*)(bio_st*, char*, int));
  int (*BIO_meth_set_ctrl)(bio_method_st*, long (*)(bio_st*, int, long, void*));
  bio_st* (*BIO_new)(const bio_method_st*);
  void (*BIO_set_init)(bio_st*, int init);
  void (*BIO_set_data)(bio_st*, void* data);
  void* (*BIO_get_data)(bio_st*);
  void (*BIO_set_flags)(bio_st*, int flags);
  void (*BIO_clear_flags)(bio_st*, int flags);

  void (*ERR_clear_error)();
  unsigned long (*ERR_peek_error)();

  /// Raises SystemError, which says what to install.
  OpenSsl();
};

/// The library, which stays loaded. Every call raises SystemError if there is none.
const OpenSsl& openssl();

}  // namespace pycoll
