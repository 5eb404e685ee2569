// What the job's environment, cache directory and network say about selection. The rank that makes
// a communicator's memory reads it and writes it there before the others see the memory, so that
// all ranks choose alike even when their environments and files differ.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "plan/select.h"

namespace pycoll {

struct Settings {
  std::string rules;       // PYCOLL_ALGO
  std::string table;       // text of the measured table; empty: there is none, or it is ignored
  std::string table_note;  // where it is from, or why there is none
  NetworkCost network;     // between the hosts, as measured when the ranks met

  /// From the environment and the file system. Raises nothing: what is wrong with the table is in
  /// its note, and what is wrong with the rules comes out when they are parsed, on every rank.
  static Settings read();

  std::string to_bytes() const;  // at most Segment::kMaxSettingsText
  static Settings from_bytes(std::string_view bytes);

  /// Raises UsageError for rules that cannot be read.
  std::shared_ptr<const SelectionInputs> parse() const;
};

inline constexpr const char* kRulesVariable = "PYCOLL_ALGO";

}  // namespace pycoll
