// What programs over a DeviceTable begin with: the library that they are linked with, options, and
// main().
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "device/device.h"

extern "C" const pycoll::DeviceTable* pycoll_device_table();

namespace pycoll {

/// The first device; null, and a line that says why, if there is none.
inline std::optional<Device> first_device(const char* program) {
  const DeviceTable& table = *pycoll_device_table();
  int num_devices = 0;
  if (table.count_devices(&num_devices) == 0 && num_devices > 0) return Device(table, 0);
  std::fprintf(stderr, "%s: no device here: %s\n", program, table.last_error());
  return std::nullopt;
}

/// Options of all these programs.
struct DeviceOptions {
  bool few = false;
  std::string only;      // part of a name
  double seconds = 1e9;  // nothing begins later
};

/// Reads the options. `take(flag, value)` reads the program's own, and returns false for others.
/// Raises UsageError for those that neither knows.
template <class Take>
void read_options(const std::string& program, int argc, char** argv, DeviceOptions& options,
                  Take&& take) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--few") {
      options.few = true;
      continue;
    }
    if (i + 1 == argc) throw UsageError(program + ": unknown or incomplete: " + flag);
    const std::string value = argv[++i];
    if (flag == "--only") {
      options.only = value;
    } else if (flag == "--seconds") {
      options.seconds = std::atof(value.c_str());
    } else if (!take(flag, value)) {
      throw UsageError(program + ": unknown option " + flag);
    }
  }
}

/// Prints the help, or returns the status of `run`: 1 if it raises, 2 for wrong arguments.
template <class Run>
int main_of(const char* program, const char* help, int argc, char** argv, Run&& run) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (first == "--help" || first == "-h") {
    std::fputs(help, stdout);
    return 0;
  }
  try {
    return run();
  } catch (const UsageError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 1;
  }
}

}  // namespace pycoll
