// The table of environment variables that pycoll reads at run time: `pycoll info --env` prints it,
// and every reader of a variable looks up its row. An empty value counts as not set.
//
// Everything is in this header, because the libraries for devices are linked without the core.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/printable.h"

namespace pycoll {

enum class EnvType : uint8_t {
  kText,     // any text; the reader of the variable parses it
  kFlag,     // 0 or 1
  kNumber,   // a whole number from `min` to `max`
  kSeconds,  // a number of seconds from `min` to `max`
  kChoice,   // one of the words of `choices`
  kPorts,    // FIRST-LAST
};

struct EnvVariable {
  std::string_view name;
  EnvType type;
  std::string_view otherwise;  // the default, in words
  std::string_view help;
  std::string_view choices = {};  // separated by spaces
  double min = 0, max = 0;
};

inline constexpr EnvVariable kEnvironment[] = {
    // How ranks find and trust each other.
    {"PYCOLL_TOKEN", EnvType::kText, "no secret: one host and one user only",
     "Secret of a job, for several hosts; `none`: every process may join (SECURITY.md)."},
    {"PYCOLL_TLS", EnvType::kFlag, "0", "1: encrypt connections between hosts (docs/hosts.md)."},
    {"PYCOLL_OPENSSL", EnvType::kText, "libssl.so.3", "OpenSSL library for PYCOLL_TLS=1."},
    {"PYCOLL_IFNAME", EnvType::kText, "every interface that is up",
     "Interfaces to listen on, by the beginnings of their names."},
    {"PYCOLL_PORTS", EnvType::kPorts, "the system's choice",
     "Ports to listen on, such as 20000-20100."},
    {"PYCOLL_TRANSPORT", EnvType::kChoice, "mpi on a fast fabric, else tcp",
     "Transport between hosts.", "tcp mpi"},
    {"PYCOLL_MPI", EnvType::kText, "the loaded one, else the first found", "MPI library to use."},
    {"PYCOLL_SILENCE_S", EnvType::kSeconds, "5",
     "Seconds without a sign of life after which a host counts as lost; 0: never.", "", 0, 1e6},
    {"PYCOLL_SSH", EnvType::kText, "ssh", "Command of `pycoll run --hosts` to reach a host."},
    // Selection of algorithms, and where their bytes go.
    {"PYCOLL_ALGO", EnvType::kText, "tuning table, else cost model",
     "Rules of selection, such as all_reduce:ring:0-64k (docs/selection.md)."},
    {"PYCOLL_ONLINE_TUNING", EnvType::kFlag, "1",
     "0: calls do not try several plans to find the fastest (docs/selection.md)."},
    {"PYCOLL_ISA", EnvType::kChoice, "the best one of the CPU",
     "Highest instruction set that reductions may use.", "generic avx2 avx512"},
    {"PYCOLL_PEER_STORES", EnvType::kChoice, "measured",
     "How ranks write what others read next: through the caches, or past them.",
     "measured cached memory"},
    {"PYCOLL_PEER_LOADS", EnvType::kChoice, "measured",
     "What ranks do with lines of peers' arrays that they have only read.",
     "measured kept returned claimed"},
    {"PYCOLL_REGISTER_AFTER", EnvType::kNumber, "8",
     "Uses of an array before it is registered automatically; 0: never.", "", 0, 1e6},
    {"PYCOLL_PEER_MEMORY", EnvType::kFlag, "1",
     "0: never read or write another process's arrays by process_vm_readv."},
    {"PYCOLL_CHECK_DATA", EnvType::kFlag, "0",
     "1: checksums on all bytes between ranks, for memory and networks that are in doubt."},
    {"PYCOLL_CACHE_DIR", EnvType::kText, "~/.cache/pycoll",
     "Folder of tuning tables and of torch backends built at first use."},
    {"PYCOLL_ELASTIC", EnvType::kText, "none",
     "Address, host:port, at which pycoll.parallel.elastic takes new ranks."},
    {"PYCOLL_JOIN", EnvType::kFlag, "0",
     "1: this process is a new rank of pycoll.parallel.elastic, and joins at PYCOLL_ELASTIC."},
    {"PYCOLL_MESH", EnvType::kText, "set by the script",
     "Sizes of the axes of pc.mesh, such as dp=2,tp=2 (`pycoll run --mesh`)."},
    {"PYCOLL_REPLICAS", EnvType::kText, "set by the script",
     "How replicas stay together: replicas= of pc.parallelize (`pycoll run --replicas`)."},
    // Diagnosis.
    {"PYCOLL_FLIGHT_DIR", EnvType::kText, "no files",
     "Folder in which a rank writes its flight record on its first error."},
    {"PYCOLL_DUMP_SIGNAL", EnvType::kText, "none",
     "Signal on which a process writes its flight records, such as USR1."},
    {"PYCOLL_DOCTOR_SIGNAL", EnvType::kText, "SIGRTMIN+7",
     "Signal by which `pycoll doctor` asks for Python stacks; 0: never."},
    {"PYCOLL_CHECK", EnvType::kText, "none", "Set by `pycoll check` for the script it runs."},
    {"PYCOLL_PLAN", EnvType::kText, "none",
     "Set by `pycoll plan` and `pycoll flops` for the script."},
    {"PYCOLL_TIMES", EnvType::kText, "none", "Set by `pycoll scale` for the script it runs."},
    // Devices.
    {"PYCOLL_DEVICE_LIBRARY", EnvType::kText, "pycoll/_cuda.so", "Device library to load."},
    {"PYCOLL_DEVICE_LINKS", EnvType::kChoice, "device", "Memory of the links between devices.",
     "device cpu"},
    {"PYCOLL_DEVICE_WAITS", EnvType::kChoice, "streams where kernels would take turns",
     "How operations of devices wait for peers, with arrays that all ranks access.",
     "kernels streams"},
    {"PYCOLL_CUDA_VMM", EnvType::kFlag, "1",
     "0: share GPU memory by CUDA IPC instead of virtual memory handles."},
    {"PYCOLL_DEVICE_THREADS_COUNT", EnvType::kNumber, "1", "Number of emulated devices.", "", 1,
     64},
    {"PYCOLL_DEVICE_THREADS_PROCESSORS", EnvType::kNumber, "32",
     "Processors of an emulated device.", "", 1, 1024},
    {"PYCOLL_DEVICE_THREADS_REACH", EnvType::kFlag, "1",
     "0: emulated devices cannot access each other's memory."},
    {"PYCOLL_DEVICE_THREADS_EXPORT", EnvType::kFlag, "1",
     "0: memory of an emulated device cannot be shared."},
    {"PYCOLL_DEVICE_THREADS_MPS", EnvType::kFlag, "1",
     "0: processes take turns on an emulated device, as on a GPU without MPS."},
    {"PYCOLL_DEVICE_THREADS_WORD_OPS", EnvType::kFlag, "1",
     "0: streams of emulated devices cannot wait for words."},
    {"PYCOLL_DEVICE_THREADS_FAIL", EnvType::kText, "none",
     "A function of an emulated device that fails, and its error, as in launch:cudaErrorUnknown."},
};

inline const EnvVariable& env_row(std::string_view name) {
  for (const EnvVariable& row : kEnvironment) {
    if (row.name == name) return row;
  }
  throw UsageError(std::string(name) + " is not in the table of environment variables");
}

/// Describes the values that the row accepts, for error messages and `pycoll info --env`.
inline std::string env_expectation(const EnvVariable& row) {
  const auto whole = [](double bound) { return std::to_string(static_cast<int64_t>(bound)); };
  switch (row.type) {
    case EnvType::kFlag:
      return "0 or 1";
    case EnvType::kNumber:
      return "a number from " + whole(row.min) + " to " + whole(row.max);
    case EnvType::kSeconds:
      return "a number of seconds from " + whole(row.min) + " to " + whole(row.max);
    case EnvType::kChoice:
      return std::string("one of ").append(row.choices);
    case EnvType::kPorts:
      return "a range of ports like 20000-20100";
    case EnvType::kText:
      break;
  }
  return "text";
}

[[noreturn]] inline void refuse_env(const EnvVariable& row, std::string_view text) {
  throw UsageError(std::string(row.name) + "=" + printable(text, kShownBytes) + ": expected " +
                   env_expectation(row) + ". " + std::string(row.help));
}

inline std::optional<double> env_parse(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return {};
  return value;
}

/// The first and last port of the range; nothing if the text is not a range.
inline std::optional<std::pair<int, int>> env_parse_ports(std::string_view text) {
  const size_t dash = text.find('-');
  if (dash == std::string_view::npos) return {};
  const auto first = env_parse(text.substr(0, dash)), last = env_parse(text.substr(dash + 1));
  const auto is_port = [](double port) {
    return port >= 1 && port <= 65535 && port == std::floor(port);
  };
  if (!first || !last || !is_port(*first) || !is_port(*last) || *first > *last) return {};
  return std::pair(static_cast<int>(*first), static_cast<int>(*last));
}

/// Whether Python can decode the text.
inline bool is_utf8(std::string_view text) {
  size_t i = 0;
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(text[at]); };
  while (i < text.size()) {
    const uint8_t first = byte(i);
    const size_t more = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
    if ((first >= 0x80 && first < 0xc2) || first > 0xf4 || i + more >= text.size()) return false;
    for (size_t k = 1; k <= more; ++k) {
      if ((byte(i + k) & 0xc0) != 0x80) return false;
    }
    // Overlong forms, surrogates, and numbers above U+10FFFF.
    if (more >= 2) {
      const uint8_t second = byte(i + 1);
      if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
          (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f)) {
        return false;
      }
    }
    i += more + 1;
  }
  return true;
}

/// Whether `text` is one of the space-separated words of `choices`.
inline bool is_choice(std::string_view choices, std::string_view text) {
  while (!choices.empty()) {
    const std::string_view word = choices.substr(0, choices.find(' '));
    if (word == text) return true;
    choices.remove_prefix(std::min(choices.size(), word.size() + 1));
  }
  return false;
}

inline bool env_accepts(const EnvVariable& row, std::string_view text) {
  switch (row.type) {
    case EnvType::kFlag:
      return text == "0" || text == "1";
    case EnvType::kNumber:
    case EnvType::kSeconds: {
      const auto value = env_parse(text);
      return value && *value >= row.min && *value <= row.max &&
             (row.type == EnvType::kSeconds || *value == std::floor(*value));
    }
    case EnvType::kChoice:
      return is_choice(row.choices, text);
    case EnvType::kPorts:
      return env_parse_ports(text).has_value();
    case EnvType::kText:
      break;
  }
  return true;
}

/// The value of a variable of the table; nothing if it is not set or empty. Raises UsageError for a
/// value that its row does not accept.
inline std::optional<std::string> env_text(std::string_view name) {
  const EnvVariable& row = env_row(name);
  const char* text = std::getenv(std::string(name).c_str());
  if (text == nullptr || *text == 0) return {};
  if (!is_utf8(text)) throw UsageError(std::string(name) + " has a value that is no UTF-8 text");
  if (!env_accepts(row, text)) refuse_env(row, text);
  return text;
}

inline bool env_flag(std::string_view name) {
  return env_text(name).value_or(std::string(env_row(name).otherwise)) == "1";
}

/// The value of a kNumber or kSeconds variable whose default is a number.
inline double env_number(std::string_view name) {
  const std::string text = env_text(name).value_or(std::string(env_row(name).otherwise));
  return env_parse(text).value_or(0);
}

/// Raises UsageError for the first variable whose value its row does not accept. Called before the
/// ranks of a job meet, so that a wrong value is an error and is not ignored.
inline void check_environment() {
  for (const EnvVariable& row : kEnvironment) env_text(row.name);
}

}  // namespace pycoll
