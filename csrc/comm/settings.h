// Settings of the selection from the job's environment, cache directory and network. The rank that
// creates a communicator's memory reads them and stores them there before the other ranks map it,
// so that all ranks choose identically even if their environments and files differ.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "plan/select.h"

namespace pycoll {

struct Settings {
  std::string rules;         // PYCOLL_ALGO
  std::string table;         // text of the tuning table; empty: there is none, or it is ignored
  std::string table_note;    // the table's path, or why there is none
  NetworkCost network;       // between hosts, as measured when the ranks met
  bool checks_data = false;  // PYCOLL_CHECK_DATA
  bool tunes_online = true;  // PYCOLL_ONLINE_TUNING

  /// Reads the settings from the environment and the file system. Raises nothing: `table_note` has
  /// the table's problem, and every rank raises the rules' errors in parse().
  static Settings read();

  std::string to_bytes() const;  // at most Segment::kMaxSettingsText
  static Settings from_bytes(std::string_view bytes);

  /// Parses the rules and the table. Raises UsageError for invalid rules.
  std::shared_ptr<const SelectionInputs> parse() const;
};

inline constexpr const char* kRulesVariable = "PYCOLL_ALGO";

}  // namespace pycoll
