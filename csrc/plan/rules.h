// PYCOLL_ALGO: the user's rules for which algorithm and protocol a message gets.
//
//   rules  = rule { ";" rule } [ ";" ]
//   rule   = [ collective ":" ] choice [ ":" range ]   without a collective: that of the rule
//   before choice = ( algorithm | "auto" ) [ "/" protocol ]   auto: pycoll's choice (of that
//   protocol) range  = size "-" ( size | "max" )                 first <= bytes of the message <
//   last size   = digits [ "k" | "m" | "g" ]                times 1024, 1024^2, 1024^3
//
// Spaces around words do not matter, nor does the case of k, m and g. Of several rules that match a
// message the first decides.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/protocol.h"
#include "schedule/collectives.h"

namespace pycoll {

struct Rule {
  Collective collective;
  std::string algorithm;  // empty: pycoll's choice
  std::optional<ProtocolKind> protocol;
  int64_t first_nbytes = 0;
  int64_t last_nbytes = INT64_MAX;  // not included
  std::string text;                 // as the user wrote it
};

class Rules {
 public:
  Rules() = default;
  /// Raises UsageError that shows the offending piece of `text`, which `name` is the name of.
  static Rules parse(std::string_view text, std::string_view name);

  bool empty() const { return rules_.empty(); }
  /// Null: none matches.
  const Rule* find(Collective collective, int64_t nbytes) const;
  /// True when find() gives the same for all of [first_nbytes, last_nbytes].
  bool agree_between(Collective collective, int64_t first_nbytes, int64_t last_nbytes) const;

 private:
  std::vector<Rule> rules_;
};

}  // namespace pycoll
